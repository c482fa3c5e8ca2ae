"""`--plan auto` and `adaptive`: what is measured on the ranks of a run, and what comes of it."""

from pathlib import Path
from typing import Any

import pytest

from hvdtrain import models
from hvdtrain.config import TrainConfig
from hvdtrain.models.costs import component_costs
from hvdtrain.parallel.stage import Images
from hvdtrain.planner.measure import measured_sizes
from hvdtrain.training import planning
from hvdtrain.world import World
from tests.conftest import Program
from tests.single.training.jobs import events_of, samples_of, summary_of

RUN = ("train", "--model", "cnn", "--batch-size", 32, "--max-steps", 4, "--threads", 1)


def test_a_plan_is_measured_chosen_and_trained(
    hvdtrain: Program, small_set: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    options = (*RUN, "--data", small_set, "--plan", "auto", "--ranks", 3, "--run", run)
    done = hvdtrain(*options)
    assert done.returncode == 0, done.stderr
    assert "chosen: " in done.stdout
    assert "no plan can take less than" in done.stdout
    (plan,) = events_of(run, "plan")
    assert plan["predicted_seconds"] > 0
    held = {rank for stage in plan["stages"] for rank in stage["ranks"]}
    assert held == {0, 1, 2}
    assert summary_of(run)["steps"] == 4


def test_a_plan_is_changed_while_training(
    hvdtrain: Program, small_set: Path, tmp_path: Path
) -> None:
    """A rank that becomes slow is given less; no sample is lost or repeated."""
    run, ledger = tmp_path / "run", tmp_path / "ledger.csv"
    options: tuple[Any, ...] = ("train", "--model", "cnn", "--batch-size", 20, "--epochs", 3)
    options += ("--threads", 1, "--data", small_set, "--plan", "adaptive", "--ranks", 2)
    options += ("--run", run, "--ledger", ledger)
    done = hvdtrain(*options, "--inject", "slow step=20 rank=1 seconds=0.15")
    assert done.returncode == 0, done.stderr
    first, *others = events_of(run, "plan")
    assert "decision" not in first
    changes = [line for line in others if line["decision"] == "change"]
    assert changes, others
    assert any("rank 1 takes " in line["cause"] for line in changes)
    last = changes[-1]
    assert last["predicted_seconds"] < last["before_seconds"]
    assert "brings in" in last["reason"]
    assert f"step {last['step']:,}: {last['cause']}: change" in done.stdout
    work = dict.fromkeys((0, 1), 0.0)
    for stage in last["stages"]:
        for rank, share in zip(stage["ranks"], stage["shares"], strict=True):
            work[rank] += len(stage["components"]) * share / sum(stage["shares"])
    assert work[1] < work[0]
    for ids in samples_of(ledger, 3):
        assert sorted(ids) == sorted(set(ids))
        assert len(ids) == 601


def test_nothing_fits_is_one_line(hvdtrain: Program, small_set: Path, tmp_path: Path) -> None:
    options = (*RUN, "--data", small_set, "--plan", "auto", "--ranks", 2, "--run", tmp_path / "r")
    done = hvdtrain(*options, "--memory-limit", 0.1)
    assert done.returncode == 2
    assert done.stderr.startswith("hvdtrain: no plan fits: ")
    assert "raise --memory-limit" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize("model", ["cnn", "vit_tiny"])
def test_every_component_is_measured_in_every_way(model: str) -> None:
    """In a process without MPI: its own times alone."""
    import torch

    config = TrainConfig(model=model, data="", plan="auto", batch_size=16).check()
    components = models.components(model, 10, 32)
    images = Images([0.5] * 3, [0.25] * 3, torch.device("cpu"), "fp32")
    here = World("none", 0, 1, 0, 1, 1)
    found = planning.own_times(config, components, 32, images, here)
    costs = component_costs(components, 32, classes=10)
    assert list(found.components) == [cost.name for cost in costs]
    assert found.resident_bytes > 2**20
    sizes = measured_sizes(16, 1)
    for number, times in enumerate(found.components.values()):
        assert [size for size, _ in times.forward.points] == list(sizes)
        assert times.forward(8) > 0
        assert times.backward(8) > 0
        assert (times.input_half is None) == (number == 0 or not costs[number].parameters)
    assert sum(times.update for times in found.components.values()) > 0


def test_what_is_measured_goes_down_by_halves() -> None:
    assert measured_sizes(64, 2) == (2, 4, 8, 16, 32)
    assert measured_sizes(64, 4, 16) == (2, 4, 8, 16)
    assert measured_sizes(64, 1) == (4, 8, 16, 32, 64)
    assert measured_sizes(3, 4) == (2,)
