"""This Python environment: whether packages can be installed in it, and pip."""

from __future__ import annotations

import errno
import importlib.util
import os
import shutil
import sys
import sysconfig
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hvdtrain.errors import UsageError
from hvdtrain.setup import progress

MAKE_ONE = "make an environment of your own with python3 -m venv DIR, and install hvdtrain in it"
OTHER_DISK = "choose another disk (TMPDIR for temporary files, --cache for wheels)"
NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True)
class Pip:
    """The pip of this environment, and where it takes packages from.

    Attributes:
        log: file that receives its output.
        constraint: file with the versions that packages must have.
        variables: further environment variables.
    """

    log: Path
    constraint: Path | None = None
    variables: Mapping[str, str] = field(default_factory=dict)

    def environment(self) -> dict[str, str]:
        """Return the environment variables of a command of pip, and of those it starts."""
        quiet = {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_ROOT_USER_ACTION": "ignore"}
        return os.environ | quiet | dict(self.variables)

    def run(self, title: str, command: str, *arguments: str) -> None:
        """Run a command of pip and show its progress.

        Raises:
            CommandFailed: pip failed.
        """
        words = [sys.executable, "-m", "pip", command, *arguments]
        if self.constraint is not None:
            words += ["--constraint", str(self.constraint)]
        progress.run(title, words, self.environment(), self.log)

    def install(self, title: str, *arguments: str) -> None:
        """Install packages in this environment.

        Raises:
            CommandFailed: pip failed.
        """
        self.run(title, "install", *arguments)


def check() -> None:
    """Refuse an environment in which no package can be installed.

    Raises:
        UsageError: with the fix.
    """
    if sys.prefix == sys.base_prefix:
        check_owner(Path(sysconfig.get_path("stdlib")))
    check_writable(Path(sysconfig.get_path("platlib")))
    if importlib.util.find_spec("pip") is None:
        raise UsageError(
            f"{sys.executable} has no pip: run it with -m ensurepip, or run uv pip install pip"
        )


def check_owner(standard_library: Path) -> None:
    """Refuse a Python whose packages the operating system manages, as pip does.

    Raises:
        UsageError: with the fix.
    """
    allowed = os.environ.get("PIP_BREAK_SYSTEM_PACKAGES", "0") in ("1", "true", "yes", "on")
    if Path(standard_library, "EXTERNALLY-MANAGED").is_file() and not allowed:
        raise UsageError(f"{sys.executable} belongs to the operating system: {MAKE_ONE}")


def check_writable(packages: Path) -> None:
    """Refuse a folder of packages that this user cannot write.

    Raises:
        UsageError: with the fix.
    """
    if not os.access(packages, os.W_OK | os.X_OK):
        raise UsageError(f"{packages} is not writable: {MAKE_ONE}")


def check_space(needs: Iterable[tuple[Path, int]]) -> None:
    """Refuse to start where the disks have too little room.

    Args:
        needs: folders that exist, and the bytes to be written in each; those on one disk add up.

    Raises:
        UsageError: naming the folder.
    """
    totals: dict[int, tuple[Path, int]] = {}
    for folder, size in needs:
        device = folder.stat().st_dev
        first, total = totals.get(device, (folder, 0))
        totals[device] = first, total + size
    for folder, total in totals.values():
        free = shutil.disk_usage(folder).free
        if free < total:
            raise UsageError(
                f"{folder} has {free >> 20:,} MB free, and {total >> 20:,} MB are needed: free "
                f"some, or {OTHER_DISK}"
            )


def no_space(error: OSError) -> UsageError | None:
    """Return the error of a full disk in one line with its fix, None for another error."""
    if error.errno not in NO_SPACE:
        return None
    place = error.filename or "the disk"
    return UsageError(f"no space is left for {place}: free some, or {OTHER_DISK}")
