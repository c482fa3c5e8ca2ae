"""Downloads that resume: a `.part` file, HTTP ranges, and an MD5 at the end."""

import hashlib
import http.client
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path

from hvdtrain.errors import DataError
from hvdtrain.host import output
from hvdtrain.host.files import sync

Progress = Callable[[int, int | None], None]  # bytes so far, total bytes if known

_BLOCK = 2**18
_TIMEOUT = 30.0  # seconds without a byte
_ATTEMPTS = 5

# Errors of a connection that breaks, or of an unreachable server.
_NETWORK_ERRORS = (urllib.error.URLError, http.client.HTTPException, OSError)


class _Interrupted(Exception):
    """The connection ended early; the received bytes are in the part file."""


def download(url: str, path: Path, md5: str, progress: Progress | None = None) -> Path:
    """Download `url` to `path`, unless the file exists already; return `path`.

    A download that an earlier call left in `path`.part resumes. Without `progress`, a terminal
    shows a bar. Raises DataError (one line) if the network or the disk fails, or if the file has
    another MD5: a finished part file with a wrong MD5 is deleted.
    """
    if path.exists():
        if file_md5(path) == md5:
            return path
        raise DataError(f"{path}: has another MD5 than the official file; remove it")
    part = path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _bar(path.name, progress) as show:
            _fetch_all(url, part, show)
        if file_md5(part) != md5:
            part.unlink()
            raise DataError(
                f"{url}: the download had a wrong MD5 and was deleted; try again, "
                f"or put the official file at {path}"
            )
        sync(part)
        part.rename(path)
        sync(path.parent)
    except OSError as error:
        raise DataError(f"{part}: cannot be written ({error.strerror or error})") from error
    return path


def file_md5(path: Path) -> str:
    """Return the MD5 (hex) of a file; raise DataError if it cannot be read."""
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False))
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error
    return digest.hexdigest()


def _fetch_all(url: str, part: Path, show: Progress) -> None:
    """Fill the part file, resuming after an interruption as long as attempts make progress."""
    for attempt in range(1, _ATTEMPTS + 1):
        before = _size(part)
        try:
            _fetch_rest(url, part, show)
            return
        except _Interrupted as error:
            if attempt == _ATTEMPTS or _size(part) == before:
                target = part.with_name(part.name.removesuffix(".part"))
                raise DataError(
                    f"cannot download {url} ({error}): run this again to resume from "
                    f"{_size(part):,} bytes, or copy the file to {target} yourself"
                ) from error


def _fetch_rest(url: str, part: Path, show: Progress) -> None:
    """Append the missing bytes to the part file; raise _Interrupted if that ends early."""
    have = _size(part)
    headers = {"User-Agent": "hvdtrain", "Accept-Encoding": "identity"}
    if have:
        headers["Range"] = f"bytes={have}-"
    try:
        response = urllib.request.urlopen(
            urllib.request.Request(url, headers=headers), timeout=_TIMEOUT
        )
    except urllib.error.HTTPError as error:
        error.close()  # it holds the connection
        if error.code == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            return  # nothing is left to fetch; the MD5 decides
        raise _Interrupted(f"the server answers {error.code} {error.reason}") from error
    except _NETWORK_ERRORS as error:
        raise _Interrupted(_reason(error)) from error
    with response:
        resumed = response.status == HTTPStatus.PARTIAL_CONTENT
        if resumed and not response.headers.get("Content-Range", "").startswith(f"bytes {have}-"):
            raise _Interrupted("the server sent another range than the requested one")
        have = have if resumed else 0
        total = None if response.length is None else have + response.length
        with part.open("ab" if have else "wb") as file:
            show(have, total)
            while True:
                try:
                    block = response.read(_BLOCK)
                except _NETWORK_ERRORS as error:
                    raise _Interrupted(_reason(error)) from error
                if not block:
                    break
                have += file.write(block)
                show(have, total)
    if total is not None and have < total:
        raise _Interrupted(f"the connection ended after {have:,} of {total:,} bytes")


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _reason(error: BaseException) -> str:
    reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
    return " ".join(str(reason).split()) or type(error).__name__


@contextmanager
def _bar(name: str, progress: Progress | None) -> Iterator[Progress]:
    """Yield the caller's progress function, else a bar on a terminal, else a dummy."""
    if progress is not None:
        yield progress
    elif sys.stderr.isatty():
        from rich.progress import BarColumn, DownloadColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        console = output.console(stderr=True)
        columns = ("{task.description}", BarColumn(), DownloadColumn(), TimeRemainingColumn())
        with Bar(*columns, console=console) as bar:
            task = bar.add_task(name, total=None)
            yield lambda have, total: bar.update(task, completed=have, total=total)
    else:
        yield lambda have, total: None
