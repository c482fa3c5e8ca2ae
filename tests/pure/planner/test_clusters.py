"""Hardware that you do not have: its figures, its files, and the planner's predictions for it."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest

from hvdtrain import models
from hvdtrain.errors import UsageError
from hvdtrain.models.costs import ComponentCost, component_costs
from hvdtrain.planner import clusters
from hvdtrain.planner.clusters import PRESETS, ClusterNetwork, load
from hvdtrain.planner.solve import solve

FILE = """
ranks: 6
ranks_per_node: 3
gflops: 1000
memory_gbytes: 100
memory_gib: 16
gbytes: 5
node_gbytes: 1.1
node_latency_microseconds: 30
"""


@cache
def costs_of(model: str, patch: int | None = None) -> Sequence[ComponentCost]:
    return component_costs(models.components(model, 100, 32, patch), 32, classes=100)


def test_a_ring_moves_what_rings_move() -> None:
    """ResNet-50 for CIFAR, 8 ranks, fp32: 165.9 MB per rank and step."""
    cluster = load("8-h200")
    size = sum(cost.parameter_bytes for cost in costs_of("resnet50"))
    seconds = ClusterNetwork(cluster).reduce_seconds(range(8), size)
    sent = (seconds - 14 * 1e-6 * cluster.latency_microseconds) * 1e9 * cluster.gbytes
    assert sent == pytest.approx(165.9e6, rel=0.01)


def test_between_nodes_a_sum_goes_within_each_first(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(FILE)
    network = ClusterNetwork(load(str(path)))
    within, between = (network.reduce_seconds(ranks, 3e8) for ranks in ((0, 1, 2), range(6)))
    assert within == pytest.approx(2 * 2 * 1e8 / 5e9)
    assert between == pytest.approx(within + 2 * (30e-6 + 1.5e8 / 1.1e9))
    assert network.send_seconds(0, 0, 1e9) == 0
    assert network.send_seconds(2, 3, 1e6) > network.send_seconds(0, 1, 1e6)


@pytest.mark.parametrize(
    ("cluster", "model", "batch", "is_dp"),
    [
        ("8-v100", "resnet50", 256, True),
        ("8-h200", "resnet50", 512, True),
        ("8-h200", "vit_b16", 512, True),
        ("16-cpu-10g", "vit_b16", 64, False),
    ],
)
def test_the_choice_is_the_known_one(cluster: str, model: str, batch: int, is_dp: bool) -> None:
    """Data parallelism is best except for ViTs on a slow network.

    It follows from the bytes on the network: 600 MB of ViT-B's gradients per step, or 0.2 MB per
    image at a cut.
    """
    costs = costs_of(model, 4 if model == "vit_b16" else None)
    question = clusters.question_of(load(cluster), costs, batch, "sgd")
    chosen = solve(question).chosen
    assert (len(chosen.plan.stages) == 1) == is_dp, chosen.name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("gflops: -1", "gflops must be a number of at least 0, not -1"),
        ("gflops: .inf", "gflops must be a finite number, not inf"),
        ("gflops: fast", "gflops must be a number of at least 0, not 'fast'"),
        ("ranks: 2.5", "ranks must be a whole number above 0, not 2.5"),
        ("ranks: 4096", "--ranks must be between 1 and 1024, not 4096"),
        ("rank: 8", "unknown key rank; did you mean ranks?"),
        ("memory_gib: 0", "memory_gib is missing, or zero"),
        ("node_gbytes: 0", "no network between nodes"),
        ("compute_contention: 0.5", "compute_contention must be at least 1, not 0.5"),
    ],
)
def test_a_file_that_is_wrong_is_refused(tmp_path: Path, change: str, message: str) -> None:
    path = tmp_path / "cluster.yaml"
    key = change.partition(":")[0]
    lines = [line for line in FILE.splitlines() if not line.startswith(f"{key}:")]
    path.write_text("\n".join([*lines, change]))
    with pytest.raises(UsageError, match=message.replace("?", r"\?")):
        load(str(path))


def test_a_cluster_that_there_is_not() -> None:
    with pytest.raises(UsageError, match="--cluster 8-v10 is unknown; did you mean 8-v100"):
        load("8-v10")
    with pytest.raises(UsageError, match="cannot be read"):
        load("/nowhere/cluster.yaml")
    with pytest.raises(UsageError, match="no network between nodes"):
        load("8-h200", 16)
    assert load("16-cpu-10g", 512).ranks == 512
    assert set(PRESETS) == {"8-v100", "8-h200", "16-cpu-10g", "16-cpu-100g"}
    assert clusters.MOST_RANKS == 1024
