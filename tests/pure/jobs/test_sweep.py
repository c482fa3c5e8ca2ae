"""The runs that a study's file describes."""

from pathlib import Path

import pytest

from hvdtrain.errors import UsageError
from hvdtrain.jobs import sweep
from hvdtrain.jobs.options import SlurmOptions
from hvdtrain.jobs.sweep import Study


def _load(tmp_path: Path, text: str) -> Study:
    path = tmp_path / "study.yaml"
    path.write_text(f"model: cnn\ndata: d\n{text}")
    return sweep.load(str(path), "runs")


def test_lists_are_combined_and_one_rank_is_the_base_of_all_plans(tmp_path: Path) -> None:
    study = _load(tmp_path, "ranks: [1, 2, 4]\nplan: [dp, mp]\nrepeats: 3\nseed: 10\n")
    sizes = sorted((c.runs[0].ranks or 0, c.runs[0].plan or "") for c in study.cells)
    assert sizes == [(1, ""), (2, "dp"), (2, "mp"), (4, "dp"), (4, "mp")]
    assert all([run.seed for run in cell.runs] == [10, 11, 12] for cell in study.cells)
    folders = [run.run for cell in study.cells for run in cell.runs]
    assert len(set(folders)) == 15
    assert "runs/ranks=4-plan=mp-seed=12" in folders


def test_ways_to_agree_are_combined_and_one_rank_is_the_base_of_all(tmp_path: Path) -> None:
    study = _load(
        tmp_path,
        "ranks: [1, 2]\nsync: [exact, 'local:8', 'diloco:8,lr=0.5']\n"
        "compress: [none, 'bf16,after=0']\n",
    )
    runs = [run for cell in study.cells for run in cell.runs]
    assert sorted((run.ranks, run.sync, run.compress) for run in runs) == [
        (1, "exact", "none"),
        (2, "diloco:8,lr=0.5", "none"),
        (2, "exact", "bf16,after=0"),
        (2, "exact", "none"),
        (2, "local:8", "none"),
    ]


def test_no_run_is_named_after_a_compression_that_it_does_not_have(tmp_path: Path) -> None:
    text = "ranks: [2]\nsync: [exact, 'local:8']\ncompress: [bf16, none]\n"
    cells = _load(tmp_path, text).cells
    assert sorted(str(cell.runs[0].run) for cell in cells) == [
        "runs/sync=exact-compress=bf16-seed=0",
        "runs/sync=exact-compress=none-seed=0",
        "runs/sync=local-8-compress=none-seed=0",
    ]
    with pytest.raises(UsageError, match="which does not sum the gradients"):
        _load(tmp_path, "ranks: [2]\nsync: [exact, 'local:8']\ncompress: bf16\n")


def test_the_order_is_not_that_of_the_file_and_always_the_same(tmp_path: Path) -> None:
    text = "ranks: [1, 2, 3, 4, 5, 6, 7, 8]\n"
    order = [cell.runs[0].ranks for cell in _load(tmp_path, text).cells]
    assert order != sorted(order, key=lambda ranks: ranks or 0)
    assert order == [cell.runs[0].ranks for cell in _load(tmp_path, text).cells]


def test_weak_scaling_with_servers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="but servers do not train: use scaling: strong"):
        _load(tmp_path, "ranks: [2, 4]\nsync: server\nbatch_size: 32\nscaling: weak\n")


def test_weak_scaling_keeps_the_batch_of_a_rank(tmp_path: Path) -> None:
    study = _load(tmp_path, "ranks: [1, 4]\nbatch_size: 32\nscaling: weak\n")
    assert {c.runs[0].ranks: c.runs[0].batch_size for c in study.cells} == {1: 32, 4: 128}


def test_nodes_follow_from_the_ranks_of_each(tmp_path: Path) -> None:
    study = _load(tmp_path, "ranks: [1, 2, 4, 8]\nranks_per_node: 2\n")
    assert {c.runs[0].ranks: c.job.nodes for c in study.cells} == {1: 1, 2: 1, 4: 2, 8: 4}


def test_gpus_and_threads_follow_from_the_ranks_of_a_node(tmp_path: Path) -> None:
    study = _load(tmp_path, "ranks: [1, 2, 8]\nranks_per_node: 4\ngpus_per_node: 4\n")
    sizes = {c.runs[0].ranks: (c.job.nodes, c.job.gpus_per_node) for c in study.cells}
    assert sizes == {1: (1, 1), 2: (1, 2), 8: (2, 4)}
    assert {run.threads for cell in study.cells for run in cell.runs} == {1}
    study = _load(tmp_path, "ranks: [1, 2]\ncpus_per_rank: 3\n")
    assert {run.threads for cell in study.cells for run in cell.runs} == {3}


def test_repeats_alone_are_in_the_folder_too(tmp_path: Path) -> None:
    (cell,) = _load(tmp_path, "repeats: 2\n").cells
    assert [run.run for run in cell.runs] == ["runs/run-seed=0", "runs/run-seed=1"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("rank: 2", "unknown key rank; did you mean"),
        ("ranks: two", "--ranks must be a whole number"),
        ("ranks: []", "requests 0 sizes"),
        ("ranks: 3\nranks_per_node: 2", "cannot be spread evenly"),
        ("repeats: 0", "repeats must be between 1 and"),
        ("scaling: loose", "loose"),
        ("run: here", "run is an option of a single run"),
        ("time: {a: b}", "time"),
        ("lr: -1", "--lr must be above 0"),
        (f"seed: {list(range(1001))}", "requests 1,001 sizes"),
    ],
)
def test_what_makes_no_study_is_refused_in_one_line(
    tmp_path: Path, text: str, reason: str
) -> None:
    with pytest.raises(UsageError, match=reason) as caught:
        _load(tmp_path, text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "minutes"),
    [("30", 30), ("30:00", 30), ("1:30:00", 90), ("'1:30:00'", 90), ("1-12", 2160)],
)
def test_a_time_needs_no_quotes(tmp_path: Path, text: str, minutes: int) -> None:
    """YAML 1.1 reads 1:30:00 as 5400, and 30:00 as 1800."""
    (cell,) = _load(tmp_path, f"time: {text}\n").cells
    assert cell.job.minutes() == minutes


def test_options_of_sbatch_are_one_list_and_the_command_line_overrides_the_file(
    tmp_path: Path,
) -> None:
    path = tmp_path / "study.yaml"
    path.write_text(
        "model: cnn\ndata: d\nmem: 4000\nconstraint: [icelake, milan]\nsbatch: [exclusive, hold]\n"
    )
    study = sweep.load(str(path), "runs", SlurmOptions(mem="8G", sbatch=["mail-type=END"]))
    assert sorted(str(cell.job.constraint) for cell in study.cells) == ["icelake", "milan"]
    for cell in study.cells:
        assert cell.job.mem == "8G"
        assert cell.job.sbatch == ["exclusive", "hold", "mail-type=END"]
    assert {cell.job.mem for cell in sweep.load(str(path), "runs").cells} == {4000}


def test_a_study_without_model_or_data_says_so(tmp_path: Path) -> None:
    path = tmp_path / "study.yaml"
    path.write_text("ranks: 2\n")
    with pytest.raises(UsageError, match="model"):
        sweep.load(str(path), "runs")


def test_a_study_takes_the_settings_of_a_recipe_and_what_to_reach(tmp_path: Path) -> None:
    folder = tmp_path / "recipes"
    folder.mkdir()
    (folder / "recipe.yaml").write_text("model: cnn\nepochs: 7\nlr: 0.5\nexpected: 0.9\n")
    path = folder / "study.yaml"
    path.write_text("config: recipe.yaml\ndata: d\nepochs: 3\nranks: [1, 2]\nto_accuracy: 0.8\n")
    study = sweep.load(str(path), "runs/s")
    runs = [run for cell in study.cells for run in cell.runs]
    assert {(run.ranks, run.epochs, run.lr, run.expected) for run in runs} == {
        (1, 3, 0.5, 0.8),
        (2, 3, 0.5, 0.8),
    }
    path.write_text("config: recipe.yaml\ndata: d\n")
    (cell,) = sweep.load(str(path), "runs/s").cells
    assert (cell.runs[0].expected, cell.runs[0].epochs) == (0.9, 7)
    path.write_text("config: nowhere.yaml\ndata: d\n")
    with pytest.raises(UsageError, match=r"nowhere\.yaml"):
        sweep.load(str(path), "runs/s")
