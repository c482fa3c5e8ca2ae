"""Shell completion: a real bash loads the script and completes words."""

import subprocess
from pathlib import Path

import pytest

from tests.conftest import Program

COMPLETE = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMP_LINE="$*"; COMP_POINT=${#COMP_LINE}
_shtab_hvdtrain
printf '%s\\n' "${COMPREPLY[@]}"
complete -p hvdtrain
"""


@pytest.fixture(scope="module")
def script(hvdtrain: Program, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the script for bash, as a user gets it."""
    done = hvdtrain("--print-completion", "bash")
    assert done.returncode == 0, done.stderr
    path = tmp_path_factory.mktemp("completion") / "hvdtrain.bash"
    path.write_text(done.stdout)
    return path


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        (["tr"], ["train"]),
        (["train", "--prec"], ["--precision"]),
        (["train", "--precision", ""], ["fp32", "tf32", "bf16", "fp16", "fp64", "auto"]),
        (["train", "--compile", "--prec"], ["--precision"]),
        (["train", "--no-c"], ["--no-compile"]),
        (["jobs", "s"], ["submit", "sweep", "status"]),
        (
            ["jobs", "submit", "--no"],
            [
                *("--no-bind", "--no-compile", "--no-deterministic", "--no-dry-run"),
                *("--no-resume", "--no-shard-optimizer", "--no-verify"),
                *("--nodes", "--normalise"),
            ],
        ),
        (["data", "fetch", "c"], ["cifar10", "cifar100"]),
        (["train", "--config", "ru"], ["run.yaml", "runs"]),
        (["train", "--data", "ru"], ["runs"]),
        (["data", "verify", "ru"], ["runs"]),
        (["bench", "step", "--data", "ru"], ["runs"]),
        (["bench", "loader", "--data", "ru"], ["runs"]),
        (["jobs", "submit", "--site", "ru"], ["run.yaml", "runs"]),
        (["plan", "show", "--save", "ru"], ["run.yaml", "runs"]),
        (["plan", "show", "--trace", "ru"], ["run.yaml", "runs"]),
        (["plan", "show", "--cluster", "ru"], ["run.yaml", "runs"]),
        (["plan", "show", "--actions", "ru"], ["run.yaml", "runs"]),
        (["plan", "show", "--picture", "ru"], ["run.yaml", "runs"]),
        (["train", "--resume", ""], ["auto"]),
        (["train", "--resume", "--prec"], ["--precision"]),
    ],
)
def test_bash_completes_commands_options_and_values(
    script: Path, tmp_path: Path, words: list[str], completed: list[str]
) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "run.yaml").touch()
    done = subprocess.run(
        ["bash", "-c", COMPLETE, "bash", script, "hvdtrain", *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    *suggestions, registered = done.stdout.splitlines()
    assert registered.endswith("-F _shtab_hvdtrain hvdtrain")
    assert sorted(suggestions) == sorted(completed)


def test_the_script_of_zsh_is_one(hvdtrain: Program) -> None:
    done = hvdtrain("--print-completion", "zsh")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("#compdef hvdtrain\n")
