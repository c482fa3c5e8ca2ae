"""tools/fresh_machine without building a root: its reading of README.md, and its error lines."""

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT

README = """\
```console
$ make other
```

## Two commands

```console
$ make demo    # comment
$ make 'test' X=1
```

```console
$ make demo
...
```

## Requirements

```console
$ sudo apt install g++ cmake
```
"""


@pytest.fixture
def script() -> Iterator[Path]:
    """Make a copy of the script that every user can read, without README.md."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        copy = Path(folder) / "tools" / "fresh_machine"
        copy.parent.mkdir()
        shutil.copy(ROOT / "tools" / "fresh_machine", copy)
        yield copy


def run(*command: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(word) for word in command], capture_output=True, text=True)


def error_of(*command: object) -> str:
    """Return the error line of a command that must exit with 2 and print nothing else."""
    done = run(*command)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done
    return done.stderr


def test_it_reads_packages_and_commands_in_readme_md() -> None:
    done = run(ROOT / "tools" / "fresh_machine", "--list")
    assert done.returncode == 0, done.stderr
    packages, *commands = done.stdout.splitlines()
    assert f"\n$ sudo apt install {packages}\n" in (ROOT / "README.md").read_text()
    assert commands == ["make demo", "make test"]


def test_other_blocks_and_comments_are_no_commands(script: Path) -> None:
    (script.parent.parent / "README.md").write_text(README)
    listed = run(script, "--list").stdout.splitlines()
    assert listed == ["g++ cmake", "make demo", "make 'test' X=1"]
    listed = run(script, "--list", "--twice").stdout.splitlines()
    assert listed == ["g++ cmake", *["make demo", "make 'test' X=1"] * 2]
    listed = run(script, "--list", "--command", "id; ls", "--command", "true").stdout.splitlines()
    assert listed == ["g++ cmake", "id; ls", "true"]


def test_a_readme_md_without_them_is_an_error(script: Path) -> None:
    readme = script.parent.parent / "README.md"
    readme.write_text(README.replace("sudo apt", "sudo dnf"))
    assert 'no line "$ sudo apt install ..."' in error_of(script, "--list")
    readme.write_text(README.replace("## Two commands", "## Commands"))
    assert 'no section "Two commands"' in error_of(script, "--list")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rot", "x"], "--rot is not an option: see tools/fresh_machine --help"),
        (["--root"], "--root has no value: see tools/fresh_machine --help"),
        (["--bind", "/no such"], "--bind /no such does not exist: name a file or folder"),
        (["--data", "/no such"], "--data /no such does not exist: name a file or folder"),
    ],
)
def test_a_wrong_option_is_a_one_line_error(
    script: Path, arguments: list[str], message: str
) -> None:
    assert error_of(script, *arguments) == f"tools/fresh_machine: {message}\n"


def test_without_root_it_says_how_to_become_root(script: Path) -> None:
    nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    command = [*(nobody if os.getuid() == 0 else []), str(script)]
    assert error_of(*command) == (
        "tools/fresh_machine: only root can build a root folder: use sudo -E tools/fresh_machine\n"
    )


def test_the_help_names_every_option(script: Path) -> None:
    done = run(script, "--help")
    assert done.returncode == 0
    named = set(re.findall(r"^  (--[a-z]+)", done.stdout, flags=re.MULTILINE))
    cases = re.findall(r"^ +(--[a-z| -]+)\)", script.read_text(), flags=re.MULTILINE)
    assert named == set(" | ".join(cases).split(" | ")) - {"--help"}


def test_enter_root_refuses_to_mount_outside_a_name_space() -> None:
    error = error_of(ROOT / "tools" / "enter_root", "/nowhere", "root", "/", "true")
    assert error == "usage: see the head of tools/enter_root\n"
