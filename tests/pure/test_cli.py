"""The command line: its errors are one line with the nearest valid name, and exit with 2."""

from pathlib import Path

import pytest

from hvdtrain import cli
from hvdtrain.config import TrainConfig, option_names
from hvdtrain.errors import UsageError
from hvdtrain.jobs.options import JobOptions

TRAIN = ["train", "--model", "cnn", "--data", "d"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian"], "unknown command trian; did you mean train?"),
        ([], "a command is missing: one of doctor, data, train"),
        (["data"], "a command is missing: one of fetch, pack, synth, verify, info"),
        (["data", "pakc"], "unknown command pakc; did you mean pack?"),
        (["data", "fetch", "cifar11", "--to", "x"], "cifar11 is not known; did you mean cifar1"),
        (["train", "--data", "d"], "missing: --model"),
        ([*TRAIN, "--epoch", "3"], "unknown option --epoch; did you mean --epochs"),
        ([*TRAIN, "--epochs", "many"], "--epochs must be a whole number, not many"),
        ([*TRAIN, "--epochs", "1.5"], "--epochs must be a whole number, not 1.5"),
        ([*TRAIN, "--ranks", "1.5"], "--ranks must be a whole number, not 1.5"),
        ([*TRAIN, "--device", "gpu"], "--device gpu is not known; did you mean cpu"),
        ([*TRAIN, "--lr", "fast"], "--lr must be a number, not fast"),
        ([*TRAIN, "--precision", "fp16"], "--precision fp16 is not known; did you mean"),
        ([*TRAIN, "--optimizer", "adma"], "--optimizer adma is not known; did you mean adam"),
        ([*TRAIN, "--config", "no.yaml"], "--config: File does not exist"),
    ],
)
def test_wrong_usage_is_one_line_with_a_suggestion(arguments: list[str], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        cli.run(arguments)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


def test_an_unknown_key_of_the_file_is_named_with_the_nearest(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("model: cnn\ndata: d\nbatch_sze: 3\n")
    with pytest.raises(UsageError, match=r"unknown key batch_sze; did you mean batch_size"):
        cli.run(["train", "--config", str(path)])


def test_the_command_line_wins_over_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("model: cnn\ndata: d\nepochs: 3\nlr: 0.5\nresume: true\nrun: r\n")
    seen: list[TrainConfig] = []
    monkeypatch.setattr("hvdtrain.training.loop.train", lambda config, stop: seen.append(config))
    assert cli.run(["train", "--config", str(path), "--lr", "0.25"]) == 0
    assert (seen[0].epochs, seen[0].lr, seen[0].resume) == (3, 0.25, True)


def test_a_job_s_file_and_command_line_are_read_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """YAML 1.1 reads 1:30:00 as 5400, of which nothing tells that it was a time."""
    path = tmp_path / "run.yaml"
    path.write_text("model: cnn\ndata: d\ntime: 1:30:00\nmem: 4000\nsbatch: [exclusive]\n")
    seen: list[JobOptions] = []

    def submit(run: TrainConfig, job: JobOptions) -> list[str]:
        seen.append(job)
        return []

    monkeypatch.setattr("hvdtrain.jobs.submit.submit", submit)
    command = ["jobs", "submit", "--config", str(path)]
    assert cli.run([*command, "--sbatch", "hold", "--sbatch", "mail-type=END"]) == 0
    assert (seen[0].minutes(), seen[0].mem) == (90, 4000)
    assert seen[0].sbatch == ["exclusive", "hold", "mail-type=END"]
    assert cli.run([*command, "--time", "30:00"]) == 0
    assert (seen[1].minutes(), seen[1].sbatch) == (30, ["exclusive"])


def test_the_options_of_train_are_a_contract() -> None:
    """Scripts rely on these names: one may be added, none may go."""
    fixed = {
        *("--model", "--data", "--plan", "--ranks", "--epochs", "--max-steps", "--batch-size"),
        *("--microbatches", "--precision", "--optimizer", "--lr", "--lr-base-batch"),
        *("--lr-schedule", "--warmup-epochs", "--holdout", "--augment", "--normalise"),
        *("--image-size", "--patch-size", "--device", "--threads", "--allreduce", "--seed"),
        *("--run", "--resume", "--ledger"),
    }
    assert fixed <= set(option_names())
