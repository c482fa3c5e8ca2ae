"""A run on an emulated cluster: its times, its records, and options that it refuses."""

import json
from pathlib import Path

import pytest
from pytest import approx

from hvdtrain.config import TrainConfig
from hvdtrain.errors import UsageError
from tests.conftest import Program
from tests.single.training.jobs import summary_of

CLUSTER = """
ranks: 2
ranks_per_node: 2
gflops: 40
memory_gbytes: 80
memory_gib: 16
gbytes: 1
latency_microseconds: 100
events:
  - {slows: devices, ranks: [1], factor: 3, from_step: 7}
"""


def test_an_emulated_run_takes_the_modelled_time_and_resumes(
    hvdtrain: Program, small_set: Path, tmp_path: Path
) -> None:
    run, cluster = tmp_path / "run", tmp_path / "cluster.yaml"
    cluster.write_text(CLUSTER)
    options = ["train", "--model", "cnn", "--data", small_set, "--run", run, "--log-every", 2]
    options += ["--ranks", 2, "--plan", "mp", "--batch-size", 32, "--emulate", f"{cluster}:10"]
    options += ["--image-size", 32]  # those of the data set have 16 pixels
    for steps, more in ((6, []), (10, ["--resume"])):
        done = hvdtrain(*options, "--max-steps", steps, *more)
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.startswith(f"emulated on {cluster}: ")
    done = hvdtrain(*options, "--max-steps", 10, "--resume")
    assert done.stdout == f"{run} is done already\n", done.stderr
    summary = summary_of(run)
    emulated = summary["emulated"]
    assert emulated["dilation"] == 10
    assert emulated["step_seconds"] == approx(summary["train_seconds"] / 10)
    # The last process made 4 of the 10 steps: its overhead is not divided by fewer, nor by more.
    assert 0 < emulated["overhead_seconds_per_step"] < 10 * emulated["step_seconds"]
    assert summary["final"]["test_accuracy"] is None
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    seconds = [32 / line["images_per_second"] for line in lines if line["event"] == "step"]
    # A busy machine makes steps longer, never shorter.
    simulated = emulated["simulated_step_seconds"]
    assert simulated < min(seconds) < 5 * simulated
    assert seconds[-1] > 1.5 * simulated  # the throttled device
    refused = hvdtrain("evaluate", run)
    assert refused.returncode == 2
    assert "was emulated" in refused.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"framework": "tensorflow"}, "--emulate is not supported with --framework tensorflow"),
        ({"sync": "server"}, "--sync server is not supported with --emulate"),
        ({"compress": "fp16"}, "--compress fp16 is not supported with --emulate"),
        ({"holdout": 0.1}, "--holdout 0.1 is not supported with --emulate"),
        ({"verify": True}, "--verify is not supported with --emulate"),
        ({"device": "cuda"}, "--device cuda is not supported with --emulate"),
        ({"emulate": "8-v100:0"}, "the real seconds per emulated second must be above 0"),
    ],
)
def test_options_that_do_not_go_together_are_refused(
    options: dict[str, object], message: str
) -> None:
    values = {"model": "cnn", "data": "somewhere", "emulate": "8-v100"} | options
    with pytest.raises(UsageError, match=message) as caught:
        TrainConfig(**values).check()  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)
