"""hvdtrain.planner.strategies: table I of paper B, predicted."""

from hvdtrain.planner.clusters import load, question_of
from hvdtrain.planner.strategies import describe_columns, five_columns
from tests.pure.planner.test_clusters import costs_of


def test_the_table_of_five_strategies() -> None:
    cluster = load("8-v100")
    question = question_of(cluster, costs_of("resnet50"), 256, "sgd")
    columns = five_columns(question)
    assert [column.name for column in columns] == ["single", "DP", "MP", "hybrid", "chosen"]
    seconds = [column.candidate.seconds for column in columns]
    assert seconds[-1] == min(seconds)
    assert seconds[0] == max(seconds)
    table = describe_columns("resnet50", cluster, question)
    content = table.content
    assert content["columns"][0]["speedup"] == 1
    assert content["columns"][0]["communication_fraction"] == 0
    assert 4 < content["columns"][1]["speedup"] < 8
    assert content["bound_seconds"] < min(seconds)
    text = table.text
    assert "predictions" in text
    for head in ("hours", "speed-up", "peak memory", "communication"):
        assert head in text
