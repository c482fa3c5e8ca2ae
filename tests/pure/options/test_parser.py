"""Help pages: every command in one line, every option under its heading, with its default."""

import dataclasses
import re
from pathlib import Path

import pytest

from hvdtrain import cli
from hvdtrain.cli import COMMANDS
from hvdtrain.config import TrainConfig
from hvdtrain.errors import UsageError
from hvdtrain.options.parser import Parser, add_config, add_dataclass, metavar
from hvdtrain.options.sections import flag


@pytest.fixture(autouse=True)
def _eighty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


def page(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Return the whole help page of a command."""
    option = "--help-all" if words in (("train",), ("jobs", "submit")) else "--help"
    with pytest.raises(SystemExit) as ended:
        cli.run([*words, option])
    assert ended.value.code == 0
    return capsys.readouterr().out


def options_on(printed: str) -> list[str]:
    return re.findall(r"^  (?:-h, )?(--[a-z0-9_-]+)", printed, re.MULTILINE)


@pytest.mark.parametrize("command", ["train", "jobs submit"])
def test_the_first_page_has_the_options_of_a_first_run_and_names_the_other_page(
    capsys: pytest.CaptureFixture[str], command: str
) -> None:
    whole = page(capsys, *command.split())
    with pytest.raises(SystemExit):
        cli.run([*command.split(), "--help"])
    first = capsys.readouterr().out
    names = {flag(item.name) for item in dataclasses.fields(TrainConfig)}
    assert len(names & set(options_on(first))) == 25
    assert set(options_on(whole)) > set(options_on(first)) > {"--model", "--data", "--help-all"}
    hidden = len(options_on(whole)) - len(options_on(first))
    assert f"`hvdtrain {command} --help-all` lists {hidden} more options." in first


def test_the_program_alone_lists_every_command_in_one_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(UsageError, match="a command is missing"):
        cli.run([])
    printed = capsys.readouterr().out
    assert printed == page(capsys)
    table = printed.partition("commands:\n")[2].partition("\n\n")[0].splitlines()
    rows = [re.fullmatch(r"  (\S+(?: \S+)?) {2,}(\S.*)", line) for line in table]
    assert [row and row[1] for row in rows] == list(COMMANDS)
    assert max(map(len, table)) <= 80


def test_a_group_alone_lists_its_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError, match="one of submit, sweep, status, logs, cancel"):
        cli.run(["jobs"])
    printed = capsys.readouterr().out
    assert printed.startswith("usage: hvdtrain jobs COMMAND [options]\n")
    assert re.findall(r"^  ([a-z]+) ", printed, re.MULTILINE) == [
        *("submit", "sweep", "status", "logs", "cancel")
    ]


def test_the_options_of_train_stand_under_headings_with_true_defaults(
    capsys: pytest.CaptureFixture[str],
) -> None:
    printed = page(capsys, "train")
    assert printed.startswith("usage: hvdtrain train --model NAME --data DIR [options]\n")
    headings = re.findall(r"^(\S.*):$", printed, re.MULTILINE)
    assert headings == [
        *("options", "model and data", "plan", "agreement of replicas"),
        *("length and batch", "precision and devices"),
        *("optimisation", "fault tolerance", "output"),
    ]
    assert {field.metadata["group"] for field in dataclasses.fields(TrainConfig)} == {
        *headings[1:]
    }
    shown = options_on(printed)
    options = [flag(item.name) for item in dataclasses.fields(TrainConfig)]
    assert sorted(shown) == sorted(
        [*options, "--help", "--help-all", "--config", "--print_config"]
    )
    text = " ".join(printed.split())
    for part in (
        "--precision {fp32,tf32,bf16,fp16,fp64,auto} tf32: fp32, but a GPU rounds the factors of "
        "products to 10 bits, not 23; bf16 or fp16: autocast with fp32 weights, and in fp16 with "
        "a scaled loss; auto: bf16 where a measurement at the start says that it is faster, else "
        "fp32 (default: fp32)",
        "--device {cpu,cuda} device to train on (default: cuda if there is one)",
        "--epochs N passes over the training set (default: 10, or",
        "--lr X learning rate, used as given (default: 0.001)",
        "--warmup-epochs X epochs of linear warm-up (default: 0.0)",
        "--microbatches N, --accumulate N gradient accumulation: micro-batches that each step",
        "--compile, --no-compile compile each component",
        "--resume [auto], --no-resume resume the run",
        "returns a factor of --lr (default: constant)",
    ):
        assert part in text


@pytest.mark.parametrize("command", COMMANDS)
def test_no_page_shows_types_of_python_or_empty_defaults(
    capsys: pytest.CaptureFixture[str], command: str
) -> None:
    """jsonargparse alone prints `(type: Optional[Literal[...]], default: null)`."""
    printed = page(capsys, *command.split())
    assert not re.search(r"type:|null|None|Optional|Literal|Union|%%|\[options\] ", printed)
    assert printed.startswith(f"usage: hvdtrain {command}")


@pytest.mark.parametrize(
    ("kind", "word"),
    [(int, "N"), (float | None, "X"), (str, None), (int | None, "N"), (bool, None)],
)
def test_a_type_says_what_stands_for_a_value(kind: object, word: str | None) -> None:
    assert metavar(kind) == word


@pytest.mark.parametrize("columns", ["1", "2", "30"])
def test_a_page_is_readable_in_a_terminal_too_narrow_for_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: str
) -> None:
    """textwrap alone raises an error with 2 columns."""
    monkeypatch.setenv("COLUMNS", columns)
    assert "hvdtrain" in page(capsys)
    assert "--precision {fp32,tf32,bf16,fp16,fp64,auto}" in page(capsys, "train")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_default_is_written_the_same_way(
    capsys: pytest.CaptureFixture[str], command: str
) -> None:
    assert not re.search(r"[^(]default:", page(capsys, *command.split()))


def test_a_configuration_of_an_older_state_is_read_if_it_did_not_use_what_is_gone(
    tmp_path: Path,
) -> None:
    """Each job that waited during an upgrade ended with an unknown key."""
    parser, path = Parser(), tmp_path / "config.yaml"
    add_config(parser)
    add_dataclass(parser, TrainConfig)
    kept = "model: cnn\ndata: d\nallow_approximate: true\nfragments: 1\n"
    path.write_text(f"{kept}overlap: 0\n")
    assert parser.parse_args(["--config", str(path)]).model == "cnn"
    path.write_text(f"{kept}overlap: 2\n")
    with pytest.raises(UsageError, match="unknown key overlap"):
        parser.parse_args(["--config", str(path)])
    path.write_text(f"{kept}help_all: 1\n")
    with pytest.raises(UsageError, match="unknown key help_all") as raised:
        parser.parse_args(["--config", str(path)])
    assert "mean help_all" not in str(raised.value)
