"""Records of a run's jobs in its folder: `job.json`, and the version of the code."""

import json
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hvdtrain import __version__
from hvdtrain.errors import DataError
from hvdtrain.host import files

RECORD = "job.json"
LOGS = "logs"
PATCH = "code.patch"


@dataclass(frozen=True)
class Record:
    """The jobs of a run.

    Attributes:
        cluster: "slurm" or "local".
        host: name of the host that submitted them.
        name: name of the jobs.
        jobs: job numbers, the newest last.
        ranks, nodes: requested numbers of ranks and nodes.
        logs: folder with the output of the jobs.
        submitted: time of the newest submission, in seconds since 1970.
        version: version of hvdtrain, with the commit if it runs from a git clone.
    """

    cluster: str
    host: str
    name: str
    jobs: tuple[str, ...]
    ranks: int
    nodes: int
    logs: str
    submitted: float
    version: str


def write(run: Path, record: Record) -> None:
    """Write the record into the run folder.

    Raises:
        DataError: if it cannot be written.
    """
    text = json.dumps(asdict(record), indent=1)
    files.write_text(run / RECORD, text, "the record", DataError)


def read(run: Path) -> Record | None:
    """Return the record of a run folder, or None if the run has no job.

    Raises:
        DataError: if it cannot be parsed.
    """
    path = run / RECORD
    try:
        content: dict[str, Any] = json.loads(path.read_text())
        return Record(**content | {"jobs": tuple(map(str, content["jobs"]))})
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise DataError(f"{path} is not a valid job record ({error}): remove it") from None


def code_version() -> tuple[str, str]:
    """Return the version of the code, and the uncommitted changes of a git clone as a patch."""
    root = Path(__file__).parents[2]
    commit = _git(root, "describe", "--always", "--dirty", "--abbrev=12").strip()
    if not commit:
        return __version__, ""
    patch = _git(root, "diff", "HEAD") if commit.endswith("-dirty") else ""
    return f"{__version__}, {commit}", patch


def _git(root: Path, *arguments: str) -> str:
    if not (root / ".git").exists():
        return ""
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, errors="replace"
        )
    except OSError:
        return ""
    return done.stdout if done.returncode == 0 else ""
