"""Numbers of a report, computed from the files of run folders."""

import csv
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import yaml

from hvdtrain.config import TrainConfig
from hvdtrain.errors import DataError
from hvdtrain.jobs.estimate import estimate
from hvdtrain.jobs.options import JobOptions
from hvdtrain.study import report, results
from hvdtrain.study.series import arrange

IMAGES = 1000


def plan(ranks: int) -> dict[str, Any]:
    stage = {"components": ["all"], "ranks": list(range(ranks)), "shares": [1] * ranks}
    return {"stages": [stage], "microbatches": 1, "schedule": "1f1b"}


def write_run(
    folder: Path, ranks: int, train_seconds: float, own_seconds: list[float], **changes: Any
) -> Path:
    """Write a finished run of 1,000 images in 10 steps, a tenth of it waiting for transfers."""
    folder.mkdir(parents=True)
    options = changes.pop("options", {})
    config = TrainConfig(model="cnn", data="data", batch_size=100, ranks=ranks, **options)
    (folder / "config.yaml").write_text(yaml.safe_dump(asdict(config)))
    rate = IMAGES / train_seconds
    started = [
        {"event": "plan", "step": 0, **plan(count)} for count in changes.pop("starts", [ranks])
    ]
    waits = {"own_seconds": own_seconds, "data_seconds": [0.02 * train_seconds / 10] * ranks}
    step = {"event": "step", "step": 10, "images_per_second": rate, "ranks": waits}
    epoch = {"event": "epoch", "epoch": 1, "train_loss": 2.0, "test_loss": 1.5}
    profile = {"event": "profile", "step": 5, "ranks": [{"times_predicted": {"a": 1.0}}] * ranks}
    other = {"event": "of another version", "epoch": "warm", "message": None, "stages": 3}
    lines = [*started, profile, step, other, epoch | {"test_accuracy": 0.5}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    summary = {
        "model": "cnn",
        "ranks": ranks,
        "plan": plan(ranks),
        "samples": IMAGES,
        "seconds": train_seconds + 1,
        "startup_seconds": 4.0,
        "train_seconds": train_seconds,
        "images_per_second": rate,
        "communication": {"exposed_fraction": 0.1 if ranks > 1 else 0.0},
        "bubble_fraction": 0.05 if ranks > 1 else 0.0,
        "peak_memory_bytes": [2**30] * ranks,
        "final": {"test_accuracy": 0.5},
        "machine": {"processor": "A", "cores": 2, "threads": 1},
        "versions": {"hvdtrain": "1", "torch": "2", "horovod": "3"},
    }
    (folder / "summary.json").write_text(json.dumps(summary | changes))
    return folder


def test_a_run_without_a_batch_is_refused(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 1, 100.0, [9.0])
    config = run / "config.yaml"
    config.write_text(config.read_text().replace("batch_size: 100", "batch_size: 0"))
    with pytest.raises(DataError, match="cannot be read as a finished run"):
        results.read(run)


@pytest.mark.proves(
    "The report gives speed-up, efficiency and lost time with intervals that hold the "
    "truth as often as they say, names a law only if it describes the runs, and names "
    "disturbed runs."
)
def test_each_number_of_a_size_comes_from_its_files(tmp_path: Path) -> None:
    """A run takes 100 s on one rank and 60 s on two; rank 0 waits 0.4 s per step for rank 1."""
    write_run(tmp_path / "one", 1, 100.0, [9.0])
    write_run(tmp_path / "two", 2, 60.0, [5.0, 5.4], evaluation_seconds=0.8)
    two = results.read(tmp_path / "two")
    assert (two.exposed, two.bubble) == pytest.approx((6.0, 3.0))
    assert two.data == pytest.approx(0.02 * 60)
    assert two.imbalance == pytest.approx(0.2 / 6 * 60), "the mean of 0.4 s and none"
    assert two.core_hours == pytest.approx(2 * (61 + 4) / 3600)
    report.write([str(tmp_path)], str(tmp_path / "report"), 0.8)
    text = (tmp_path / "report" / "report.md").read_text()
    table = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if line.startswith("| ")
    ]
    sizes, lost = (
        dict(zip(head, next(row for row in table[place:] if row[0] == "2"), strict=True))
        for place, head in enumerate(table)
        if head[0] == "ranks"
    )
    assert sizes["speed-up"].startswith("1.67")
    assert sizes["efficiency"].startswith("0.83")
    assert sizes["communication"] == "10.0%"
    assert sizes["bubble"] == "5.0%"
    assert lost["ideal"] == "50.0"
    assert (lost["communication"], lost["imbalance"], lost["bubble"]) == ("+4.0", "+2.0", "+3.0")
    assert (lost["between steps"], lost["start-up"]) == ("1.0", "4.0")
    assert lost["evaluation"] == "0.8"
    assert "- 2 ranks: 16.7% of the steps' time is lost: 6.7% by communication, 5.0% by" in text
    with (tmp_path / "report" / "sizes.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [float(row["images_per_second"]) for row in rows] == pytest.approx([10, IMAGES / 60])
    assert float(rows[1]["efficiency"]) == pytest.approx(100 / 120)


def test_ways_to_agree_are_compared_if_there_are_several(tmp_path: Path) -> None:
    """Medians of two repeats; a key that only one way counts is a column of all."""
    write_run(tmp_path / "one", 1, 100.0, [9.0])
    exact = {"sync": "exact", "compress": "none", "sent_bytes_per_step": 4e6}
    write_run(tmp_path / "exact", 2, 60.0, [5.0, 5.4], agreement=exact)
    report.write([str(tmp_path)], str(tmp_path / "without"), 0.8)
    options = {"sync": "local:8,average-optimizer", "compress": "topk:0.01"}
    for number in (1, 3):
        counted = {"sent_bytes_per_step": 1e4 * number, "meetings": 5.0, "drift": 2.0}
        counted |= {"residual_norm": 0.25, "max_staleness": 3.0 + number}
        run = tmp_path / f"local{number}"
        write_run(run, 2, 50.0, [5.0, 5.4], options=options, agreement=counted)
    report.write([str(tmp_path)], str(tmp_path / "with"), 0.8)
    without, text = ((tmp_path / n / "report.md").read_text() for n in ("without", "with"))
    assert "How replicas agreed" not in without
    _, section = text.split("## How replicas agreed")
    heads, _, *rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in section.split("##")[0].splitlines()
        if line.startswith("|")
    ]
    plain, local = (dict(zip(heads, row, strict=True)) for row in rows)
    assert plain["agreement"] == "exact"
    assert local["agreement"] == "local:8, average-optimizer, compress topk:0.01"
    assert (local["repeats"], local["images/s"], local["accuracy"]) == ("2", "20", "0.5000")
    assert local["bytes sent per step and rank"] == "20,000"
    assert plain["bytes sent per step and rank"] == "4,000,000"
    assert (local["meetings"], plain["meetings"]) == ("5", "-")
    assert (local["residual norm"], local["staleness, maximum"]) == ("0.25", "5")
    assert "staleness, mean" not in heads, "no run has counted it"
    with (tmp_path / "with" / "sizes.csv").open() as file:
        sizes = [row for row in csv.DictReader(file) if row["agreement"].startswith("local")]
    assert [row["sent_bytes_per_step"] for row in sizes] == ["", "20000.0"]
    with (tmp_path / "with" / "runs.csv").open() as file:
        runs = {Path(row["run"]).name: row for row in csv.DictReader(file)}
    assert runs["local3"]["sent_bytes_per_step"] == "30000.0"
    assert runs["exact"]["agreement"] == "exact"
    with (tmp_path / "without" / "runs.csv").open() as file:
        assert "agreement" not in next(csv.DictReader(file))


@pytest.mark.filterwarnings("error::RuntimeWarning")  # of a mean of nothing
def test_runs_that_were_not_evaluated_have_a_report_without_accuracy(tmp_path: Path) -> None:
    for ranks in (1, 2):
        run = write_run(
            *(tmp_path / "runs" / str(ranks), ranks, 100.0 / ranks, [9.0 / ranks] * ranks),
            final={"train_loss": 2.0, "test_loss": None, "test_accuracy": None},
        )
        metrics = run / "metrics.jsonl"
        text = metrics.read_text().replace("1.5", "null")
        metrics.write_text(text.replace('"test_accuracy": 0.5', '"test_accuracy": null'))
    to = tmp_path / "report"
    report.write([str(tmp_path / "runs")], str(to), 0.8)
    heads, *_, last = [
        line.split(" | ") for line in (to / "report.md").read_text().splitlines() if "| " in line
    ][:4]
    assert last[heads.index("accuracy")] == "-"
    assert (to / "train_loss.png").exists()
    assert not (to / "accuracy.png").exists()
    assert not (to / "loss.png").exists()
    with (to / "runs.csv").open() as file:
        assert [row["accuracy"] for row in csv.DictReader(file)] == ["", ""]


def test_runs_of_before_evaluated_each_epoch(tmp_path: Path) -> None:
    """Options that an older run folder lacks must not put it into another series."""
    run = write_run(tmp_path / "run", 1, 100.0, [9.0])
    now = results.read(run).settings
    config = yaml.safe_load((run / "config.yaml").read_text())
    del config["eval_every"], config["framework"]
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    assert results.read(run).settings == now


@pytest.mark.parametrize(("starts", "ranks"), [([1, 2], 2), ([2, 1], 1)])
def test_a_run_that_went_on_with_other_ranks_is_of_no_size(
    tmp_path: Path, starts: list[int], ranks: int
) -> None:
    write_run(tmp_path / "one", 1, 100.0, [9.0])
    write_run(tmp_path / "other", ranks, 60.0, [5.0] * starts[0], starts=starts)
    finished, left_out = results.find([str(tmp_path)])
    assert [(one.name, one.has_one_size) for one in finished] == [("one", True), ("other", False)]
    assert not left_out
    _, without = arrange(finished)
    assert "other: it resumed with another plan or number of ranks" in without[0]


def test_a_finished_run_without_its_configuration_is_named(tmp_path: Path) -> None:
    write_run(tmp_path / "whole", 1, 100.0, [9.0])
    (write_run(tmp_path / "lost", 1, 100.0, [9.0]) / "config.yaml").unlink()
    (line,) = results.find([str(tmp_path)])[1]
    assert "lost" in line and "config.yaml" in line


@pytest.mark.parametrize("broken", ["[]", '"text"', "3"])
def test_metrics_that_are_none_are_named(tmp_path: Path, broken: str) -> None:
    run = write_run(tmp_path / "run", 1, 100.0, [9.0])
    (run / "metrics.jsonl").write_text(broken + "\n")
    with pytest.raises(DataError, match="cannot be read as a finished run"):
        results.read(run)


def test_an_estimate_prefers_the_run_that_is_most_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hvdtrain import data

    length = data.synth(tmp_path / "data", IMAGES, 4, size=8).splits["train"].count
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "runs" / "one", 1, 3600.0, [9.0])
    write_run(tmp_path / "runs" / "two", 2, 2400.0, [5.0, 5.0])
    config = TrainConfig(model="cnn", data="data", ranks=4, threads=1, epochs=2)
    text = estimate(config, JobOptions(), Path("runs"))
    hours = length * 2 / (IMAGES / 2400 * 4 / 2) * 2401 / 2400 / 3600
    assert f"about {60 * hours:.0f} min" in text
    assert "runs/two on 2 rank(s), assuming linear scaling" in text


@pytest.mark.parametrize(
    ("hosts", "energy"),
    [
        ([], {}),
        ([{"RAPL": {"package-0": 5.0, "package-1": 6.0}}], {"RAPL": 11.0}),
        ([{"RAPL": {"package-0": 5.0}}, {"RAPL": {"package-0": 7.0}}], {"RAPL": 12.0}),
        ([{"RAPL": {"package-0": 5.0}}, {}], {}),
        ([{"NVML": {"GPU 0": 5.0}, "missing": ["RAPL: no permission"]}], {"NVML": 5.0}),
        ([{"RAPL": {"package-0": 5.0}, "missing": ["RAPL package-1: gone"]}], {}),
        ([{"RAPL": {"package-0": 5.0}, "seconds": 50.0}], {}),
        ([{"Slurm": {"step 7.0": 90.0}, "missing": ["RAPL: no permission"]}, {}], {"Slurm": 90.0}),
        ([{"Slurm": {"step 7.0": 90.0}, "RAPL": {"package-0": 5.0}}], {"RAPL": 5.0}),
        ([{"Slurm": {"step 7.0": 90.0}, "RAPL": {"package-0": 5.0}}, {}], {"Slurm": 90.0}),
        ([{"Slurm": {"step 7.0": 0.0}}], {}),
    ],
)
def test_energy_is_that_of_the_whole_run_on_all_hosts(
    tmp_path: Path, hosts: list[dict[str, Any]], energy: dict[str, float]
) -> None:
    lines = [
        {
            "host": f"n{place}",
            "seconds": host.pop("seconds", 101.0),
            "missing": host.pop("missing", []),
            "joules": host,
        }
        for place, host in enumerate(hosts)
    ]
    run = write_run(tmp_path / "run", 1, 100.0, [9.0], energy=lines)
    assert results.read(run).energy == energy
