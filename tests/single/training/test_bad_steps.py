"""Gradients that are not finite or too large are reported; all ranks stop or skip the step."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from hvdtrain import data
from hvdtrain.engine.progress import LOSS_SCALE
from tests.conftest import Program
from tests.single.training.jobs import events_of, samples_of, summary_of

PLANS = {
    "one": (),
    "dp": ("--ranks", 2),
    "mp": ("--ranks", 2, "--plan", "mp", "--microbatches", 2),
    "hp": ("--ranks", 3, "--plan", "hp.json"),
}
HYBRID = {
    "stages": [
        {"components": ["stem", "layer1.0", "layer1.1", "layer2.0"], "ranks": [0, 2]},
        {"components": ["layer2.1", "layer3.0", "layer3.1"], "ranks": [1]},
        {"components": ["layer4.0", "layer4.1", "head"], "ranks": [2]},
    ],
    "microbatches": 2,
}


# PyTorch computes fp16 on processors some 40 times slower than fp32 (58 of 2,526 images/s).
FP16 = ("--model", "cnn", "--precision", "fp16", "--batch-size", 4)


@pytest.fixture(scope="module")
def tiny_set(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a data set of 61 images of 8 x 8 pixels, of 5 classes."""
    folder = tmp_path_factory.mktemp("data") / "tiny"
    data.synth(folder, 61, 5, size=8, seed=1)
    return folder


def command(path: Path, run: Path, plan: str, *options: object) -> tuple[object, ...]:
    """Return the command for a network with batch norm, which has running statistics."""
    (run.parent / "hp.json").write_text(json.dumps(HYBRID))
    common: tuple[object, ...] = ("train", "--model", "resnet18", "--data", path, "--run", run)
    common += ("--batch-size", 12, "--threads", 1, "--augment", "crop-flip", "--eval-every", 0)
    return (*common, *PLANS[plan], *options)


def bad_steps(run: Path) -> list[dict[str, Any]]:
    """Return the bad steps in the metrics, where busy cores may cause stragglers as well."""
    return [line for line in events_of(run, "fault") if line["cause"] == "bad step"]


@pytest.mark.parametrize("plan", ["one", "hp"])
def test_a_skipped_step_changes_nothing(
    hvdtrain: Program, small_set: Path, tmp_path: Path, plan: str
) -> None:
    """A fourth, bad step leaves weights, statistics and optimizer as they were after three."""
    digests = {}
    rank = 0 if plan == "one" else 1
    component = "layer3.0" if plan == "hp" else "layer1.0"
    fault = f"nan step=4 rank={rank} component={component}"
    runs: dict[str, tuple[object, ...]] = {
        "three": ("--max-steps", 3),
        "skipped": ("--max-steps", 4, "--inject", fault, "--on-bad-step", "skip"),
    }
    if plan == "one":
        runs["four"] = ("--max-steps", 4)  # a good fourth step changes the weights
    for name, options in runs.items():
        run, ledger = tmp_path / name, tmp_path / f"{name}.csv"
        done = hvdtrain(*command(small_set, run, plan, *options, "--ledger", ledger), cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        summary = summary_of(run)
        digests[name] = summary["weights_sha256"]
        assert summary["skipped_steps"] == (name == "skipped")
    assert digests["skipped"] == digests["three"] != digests.get("four")
    (line,) = bad_steps(tmp_path / "skipped")
    assert line["step"] == 4
    reason = f"{component} is the first component whose output is not finite"
    assert f"{reason} (its input and weights are finite); skipped" in line["message"]
    counts = [len(samples_of(tmp_path / f"{name}.csv", 1)[0]) for name in digests]
    assert counts == [36, 36, 48][: len(counts)], "what entered no gradient is not in the ledger"


def test_a_run_goes_on_after_skipped_steps(
    hvdtrain: Program, small_set: Path, tmp_path: Path
) -> None:
    """The faults name a component, a component of a rank, and a rank's first component."""
    run = tmp_path / "run"
    fault = "nan step=5 rank=1 component=dense; nan step=3 component=dense; nan step=7 rank=1"
    done = hvdtrain(
        *("train", "--model", "cnn", "--data", small_set, "--run", run, "--epochs", 2),
        *("--ranks", 2, "--inject", fault, "--on-bad-step", "skip", "--log-every", 5),
    )
    assert done.returncode == 0, done.stderr
    assert [line["step"] for line in bad_steps(run)] == [3, 5, 7]
    assert all(line["loss"] > 0 for line in events_of(run, "step"))
    summary = summary_of(run)
    assert summary["skipped_steps"] == 3
    assert summary["final"]["train_loss"] > 0
    assert summary["steps"] == 20


def test_a_run_is_resumed_that_has_skipped_all_its_steps(
    hvdtrain: Program, small_set: Path, tmp_path: Path
) -> None:
    """The optimizer has no state yet; the first epoch has no loss, so it is not the best."""
    run, fault = tmp_path / "run", "nan step=1 steps=7"
    common = ["train", "--model", "cnn", "--data", small_set, "--run", run, "--batch-size", 100]
    common += ["--on-bad-step", "skip", "--inject", fault]
    done = hvdtrain(*common, "--epochs", 1)
    assert done.returncode == 0, done.stderr
    done = hvdtrain(*common, "--epochs", 2, "--resume")
    assert done.returncode == 0, done.stderr
    assert "resumed after step 7" in done.stdout
    summary = summary_of(run)
    assert summary["skipped_steps"] == 7
    assert summary["best"]["step"] == 14
    assert events_of(run, "epoch")[0]["train_loss"] is None


def test_ten_in_a_row_are_enough(hvdtrain: Program, small_set: Path, tmp_path: Path) -> None:
    done = hvdtrain(
        *("train", "--model", "cnn", "--data", small_set, "--run", tmp_path / "run"),
        *("--inject", "nan step=4 steps=100", "--on-bad-step", "skip"),
    )
    assert done.returncode == 1
    assert "at step 14 (epoch 2)" in done.stderr
    assert "10 steps before it were skipped" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.proves(
    "A bad step stops all ranks and names its component, or is skipped and changes nothing."
)
@pytest.mark.parametrize("plan", ["dp", "mp"])
def test_a_bad_step_stops_all_ranks_and_the_component_is_named(
    hvdtrain: Program, small_set: Path, tmp_path: Path, plan: str
) -> None:
    options = ("--inject", "nan step=3 rank=1 component=layer4.0", "--checkpoint-every", "2 steps")
    done = hvdtrain(*command(small_set, tmp_path / "run", plan, *options), cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert "the loss became nan at step 3 (epoch 1): " in done.stderr
    reason = "layer4.0 is the first component whose output is not finite (its input and weights "
    assert f"{reason}are finite)" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert len(bad_steps(tmp_path / "run")) == 1
    assert (tmp_path / "run" / "checkpoints" / "step-00000002").is_dir()


def test_gradients_above_the_limit_are_bad_and_their_largest_part_is_named(
    hvdtrain: Program, small_set: Path, tmp_path: Path
) -> None:
    common = ("train", "--model", "cnn", "--data", small_set, "--ranks", 2, "--max-steps", 2)
    done = hvdtrain(*common, "--run", tmp_path / "run", "--on-bad-step", "stop:0.5")
    assert done.returncode == 1
    assert "the norm of the gradients was " in done.stderr
    assert ", above 0.5, at step 1 (epoch 1): " in done.stderr
    assert "dense has the largest (" in done.stderr
    done = hvdtrain(*common, "--run", tmp_path / "free", "--on-bad-step", "stop:1e6")
    assert done.returncode == 0, done.stderr


def test_weights_that_are_no_numbers_are_named(
    hvdtrain: Program, small_set: Path, tmp_path: Path
) -> None:
    """The learning rate of plain SGD is infinite in fp32, and the weights after one step, too."""
    done = hvdtrain(
        *("train", "--model", "cnn", "--data", small_set, "--run", tmp_path / "run"),
        *("--optimizer", "sgd", "--lr", "1e39", "--max-steps", 3),
    )
    assert done.returncode == 1
    reason = "step 2 (epoch 1): conv1 is the first component whose output is not finite"
    assert f"{reason} (its weights are not finite either)" in done.stderr


@pytest.mark.parametrize("plan", ["dp", "mp"])
def test_an_overflow_in_fp16_halves_the_scale_on_all_ranks_and_resumes_to_the_bit(
    hvdtrain: Program, tiny_set: Path, tmp_path: Path, plan: str
) -> None:
    fault = f"nan step=3 rank={1 if plan == 'dp' else 0}"
    digests = {}
    for name, more in (("whole", ""), ("resumed", "; kill step=11")):
        run = tmp_path / name
        options = (*FP16, "--max-steps", 12, "--checkpoint-every", "4 steps")
        done = hvdtrain(
            *command(tiny_set, run, plan, *options, "--inject", fault + more), cwd=tmp_path
        )
        if more:
            assert done.returncode == 4, done.stderr
            again = command(tiny_set, run, plan, *options, "--resume")
            done = hvdtrain(*again, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert not bad_steps(run)
        halved = [(line["step"], line["loss_scale"]) for line in events_of(run, "loss_scale")]
        assert 3 in [step for step, _ in halved]
        assert halved[0][1] == LOSS_SCALE / 2
        summary = summary_of(run)
        assert summary["skipped_steps"] == len(halved)
        digests[name] = summary["weights_sha256"]
    assert digests["whole"] == digests["resumed"]


def test_what_overflows_at_any_scale_is_a_bad_step(
    hvdtrain: Program, tiny_set: Path, tmp_path: Path
) -> None:
    """The scale of the loss falls to 1 first, and then the step is reported as in fp32."""
    run = tmp_path / "run"
    faults = "; ".join(f"nan step={step}" for step in range(2, 20))
    options = (*FP16, "--max-steps", 24, "--inject", faults)
    done = hvdtrain(*command(tiny_set, run, "one", *options), cwd=tmp_path)
    assert done.returncode == 1
    # The first step may overflow of itself: then the scale is at 1 a step earlier.
    assert re.search(r"the loss became nan at step 1[78] ", done.stderr), done.stderr
    scales = [line["loss_scale"] for line in events_of(run, "loss_scale")]
    assert scales == [2.0**power for power in range(15, -1, -1)]
