"""Errors of the command line are one line with the nearest valid name, and exit with 2."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import pytest

from hvdtrain import cli
from hvdtrain.bench.options import LoaderConfig, NetworkConfig, StepConfig
from hvdtrain.config import TrainConfig
from hvdtrain.errors import UsageError
from hvdtrain.jobs.options import JobOptions
from hvdtrain.options.sections import flag
from hvdtrain.planner.options import PlanConfig

TRAIN = ["train", "--model", "cnn", "--data", "d"]
PLAN = ["--model", "cnn", "--ranks", "2"]
# Each command whose options are the fields of dataclasses, with what it requires.
FROM_DATACLASSES: list[tuple[list[str], tuple[type, ...]]] = [
    (TRAIN, (TrainConfig,)),
    (["jobs", "submit", *TRAIN[1:]], (JobOptions, TrainConfig)),
    (["bench", "step", "--model", "cnn"], (StepConfig,)),
    (["bench", "loader", "--data", "d"], (LoaderConfig,)),
    (["bench", "allreduce"], (NetworkConfig,)),
    (["bench", "exchange"], (NetworkConfig,)),
    *((["plan", name, *PLAN], (PlanConfig,)) for name in ("show", "simulate", "check")),
]
SWITCHES = [
    (command, field.name)
    for command, kinds in FROM_DATACLASSES
    for kind in kinds
    for field in dataclasses.fields(kind)
    if isinstance(field.default, bool)
]


parser = functools.cache(cli._parser)


def parsed(arguments: list[str]) -> dict[str, Any]:
    """Return the values of the innermost command."""
    return cli._innermost(parser().parse_args(arguments).as_dict())[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian"], "unknown command trian; did you mean train?"),
        (
            [],
            "a command is missing: one of doctor, setup, data, train, evaluate, predict, export, "
            "jobs, report, reproduce",
        ),
        (["--print-completion", "fish"], "--print-completion fish is not known; valid are bash"),
        (["data"], "a command is missing: one of fetch, pack, synth, verify, info"),
        (["data", "pakc"], "unknown command pakc; did you mean pack?"),
        (["data", "fetch", "cifar11", "--to", "x"], "cifar11 is not known; did you mean cifar1"),
        (["data", "fetch", "mnist", "--to", "x"], "mnist is not known; valid are cifar10, cif"),
        (["data", "info", "d", "e"], "hvdtrain data info does not expect e: options start with"),
        (["jobs", "status", "absent"], "absent is not a folder: start a job with hvdtrain"),
        (["train", "--data", "d"], "missing: --model"),
        ([*TRAIN, "--epoch", "3"], "unknown option --epoch; did you mean --epochs?"),
        ([*TRAIN, "--epochs", "many"], "--epochs must be a whole number, not many"),
        ([*TRAIN, "--epochs", "1.5"], "--epochs must be a whole number, not 1.5"),
        ([*TRAIN, "--ranks", "1.5"], "--ranks must be a whole number, not 1.5"),
        ([*TRAIN, "--device", "gpu"], "--device gpu is not supported: use cuda"),
        ([*TRAIN, "--device", "tpu"], "--device tpu is not known; "),
        ([*TRAIN, "--lr", "fast"], "--lr must be a number, not fast"),
        ([*TRAIN, "--lr"], "--lr needs a value"),
        ([*TRAIN, "--no-compile=1"], "--no-compile takes no value: leave '1' out"),
        ([*TRAIN, "--precision", "half"], "--precision half is not supported: use fp16"),
        (
            [*TRAIN, "--precision", "fp8"],
            "--precision fp8 is not known; valid are auto, bf16, fp16, fp32, fp64",
        ),
        (
            ["jobs", "cancel", "r", "--gpus"],
            "unknown option --gpus: hvdtrain jobs cancel --help l",
        ),
        (
            ["jobs", "submit", *TRAIN[1:], "--mem-per-cpu", "3"],
            "unknown option --mem-per-cpu: write --sbatch mem-per-cpu, or --sbatch mem-per-cpu=V",
        ),
        (
            ["jobs", "sweep", "s", "--to", "d", "--exclusive"],
            "unknown option --exclusive: write --sbatch exclusive",
        ),
        (
            ["jobs", "submit", *TRAIN[1:], "--sbatch", "--mem=3"],
            "--sbatch needs a value: write --sbatch NAME=VALUE, without dashes",
        ),
        ([*TRAIN, "--gpus", "2"], "unknown option --gpus: use --ranks (one per GPU)"),
        (["jobs", "submit", *TRAIN[1:], "--gpus=2"], "unknown option --gpus; did you mean --gpus"),
        (
            [*TRAIN, "--zzz"],
            "unknown option --zzz: hvdtrain train --help-all lists the options",
        ),
        ([*TRAIN, "--optimizer", "adma"], "--optimizer adma is not known; did you mean adam"),
        ([*TRAIN, "--config", "no.yaml"], f"--config '{Path.cwd()}/no.yaml' does not exist: "),
    ],
)
def test_wrong_usage_is_one_line_with_a_suggestion(arguments: list[str], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        cli.run(arguments)
    assert str(caught.value).startswith(message)
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
    """YAML 1.1 would read 1:30:00 as the number 5400, which is not recognised as a time."""
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


@pytest.mark.parametrize(("command", "name"), SWITCHES)
def test_a_boolean_takes_a_value_or_no_and_the_last_one_wins(
    command: list[str], name: str
) -> None:
    """A `compile: true` in a file can be overridden on the command line."""
    yes, no = f"--{name.replace('_', '-')}", f"--no-{name.replace('_', '-')}"
    for words, value in [
        ([], False),
        ([yes], True),
        ([yes, "true"], True),
        ([yes, "false"], False),
        ([f"{yes}=false"], False),
        ([f"{yes}=true"], True),
        ([no], False),
        ([yes, no], False),
        ([no, yes], True),
        ([yes, "false", yes], True),
    ]:
        assert parsed([*command, *words])[name] is value, words
    for wrong in ("maybe", "1", "null"):
        with pytest.raises(UsageError, match=f"{yes} must be true") as caught:
            parsed([*command, yes, wrong])
        assert "\n" not in str(caught.value)


def test_the_command_line_wins_over_the_file_wherever_it_is_named(tmp_path: Path) -> None:
    """A `--config` after an option does not override it."""
    path = tmp_path / "run.yaml"
    path.write_text("compile: true\nlr: 0.5\nepochs: 3\n")
    for command in (TRAIN, ["jobs", "submit", *TRAIN[1:]]):
        for options in (["--no-compile"], ["--compile=false"], ["--compile", "false"]):
            words = [*options, "--lr", "0.25"]
            for config in (["--config", str(path)], [f"--config={path}"]):
                for order in ([*config, *words], [*words, *config]):
                    values = parsed([*command, *order])
                    assert (values["compile"], values["lr"], values["epochs"]) == (False, 0.25, 3)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("compile: maybe", "--compile must be true or false, not maybe"),
        ("no_compile: true", "write `compile: false` instead of `no_compile`"),
        ("no-compile: true", "write `compile: false` instead of `no-compile`"),
        ("no-compile: false", "write `compile: false` instead of `no-compile`"),
        ("print_completion: bash", "unknown key print_completion"),
    ],
)
def test_a_boolean_of_a_file_is_true_or_false(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(f"{content}\n")
    with pytest.raises(UsageError, match=message):
        parsed([*TRAIN, "--config", str(path)])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("time: 1.5", "--time 1.5 is not understood: give minutes, M:SS, H:MM:SS"),
        ("mem: 1.5", "--mem 1.5 is not understood: give megabytes, or a whole number with K"),
        ("account: 1.5", "--account must be text or a whole number, not 1.5"),
        ("time: null", "--time needs a value"),
        ("nodes:", "--nodes needs a value"),
        ("batch_sze: 3", "unknown key batch_sze; did you mean batch_size"),
    ],
)
def test_a_wrong_value_of_a_job_s_file_is_named(
    tmp_path: Path, content: str, message: str
) -> None:
    """jsonargparse alone would report an unknown key as `'jobs'`, and a wrong type for `time`."""
    path = tmp_path / "run.yaml"
    path.write_text(f"{content}\n")
    with pytest.raises(UsageError, match=message) as caught:
        cli.run(["jobs", "submit", *TRAIN[1:], "--config", str(path)])
    assert "\n" not in str(caught.value)


def test_an_account_of_a_file_keeps_its_leading_zeros(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("account: 007\n")
    command = ["jobs", "submit", *TRAIN[1:]]
    assert parsed([*command, "--config", str(path)])["account"] == "007"
    assert parsed([*command, "--account", "007"])["account"] == "007"


def test_gradient_accumulation_is_found_under_its_name(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("accumulate: 3\n")
    for command in (TRAIN, ["jobs", "submit", *TRAIN[1:]]):
        for words, parts in [
            (["--accumulate", "4"], 4),
            (["--microbatches", "2", "--accumulate", "4"], 4),
            (["--accumulate", "4", "--microbatches", "2"], 2),
            (["--config", str(path)], 3),
        ]:
            assert parsed([*command, *words])["microbatches"] == parts
    with pytest.raises(UsageError, match="--gradient-accumulation-steps: use --microbatches"):
        parsed([*TRAIN, "--gradient-accumulation-steps", "4"])


def test_resume_takes_a_third_value(tmp_path: Path) -> None:
    for words, value in [
        ([], False),
        (["--resume"], True),
        (["--resume", "true"], True),
        (["--resume", "auto"], "auto"),
        (["--resume=auto"], "auto"),
        (["--resume", "false"], False),
        (["--resume", "auto", "--no-resume"], False),
        (["--no-resume", "--resume", "auto"], "auto"),
    ]:
        assert parsed([*TRAIN, *words])["resume"] == value, words
    with pytest.raises(UsageError, match="--resume must be true, false or auto, not always"):
        parsed([*TRAIN, "--resume", "always"])
    path = tmp_path / "run.yaml"
    path.write_text("resume: auto\n")
    assert parsed([*TRAIN, "--config", str(path)])["resume"] == "auto"
    assert parsed([*TRAIN, "--config", str(path), "--no-resume"])["resume"] is False


def test_the_options_of_train_are_a_contract() -> None:
    """Scripts rely on these names: options may be added, but none may be removed."""
    fixed = {
        *("--model", "--data", "--plan", "--ranks", "--epochs", "--max-steps", "--batch-size"),
        *("--microbatches", "--precision", "--optimizer", "--lr", "--lr-base-batch"),
        *("--lr-schedule", "--warmup-epochs", "--holdout", "--augment", "--normalise"),
        *("--image-size", "--patch-size", "--device", "--threads", "--allreduce", "--seed"),
        *("--run", "--resume", "--ledger"),
    }
    assert fixed <= {flag(item.name) for item in dataclasses.fields(TrainConfig)}


def test_a_value_with_parts_is_read_as_it_is_written(tmp_path: Path) -> None:
    """YAML takes 2:1 for a number in base 60."""
    values = {
        "restarts": "2,min-ranks=1",
        "plan": "auto:12GiB",
        "loss": "cross-entropy:0.1",
        "on_bad_step": "skip:10",
        "emulate": "8-v100:20",
        "precision": "tf32",
    }
    words = [part for name, value in values.items() for part in (flag(name), value)]
    typed = parsed([*TRAIN, *words])
    path = tmp_path / "run.yaml"
    path.write_text("".join(f"{name}: {value}\n" for name, value in values.items()))
    read = parsed([*TRAIN, "--config", str(path)])
    for name, value in values.items():
        assert (typed[name], read[name]) == (value, value)
