"""A report and the files of its runs as one RO-Crate, from which it can be made again.

Source: RO-Crate 1.1 (https://w3id.org/ro/crate/1.1), a ZIP file with JSON-LD about its files.
"""

import json
import zipfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any
from urllib.parse import quote

import yaml

from hvdtrain import __version__, configfile
from hvdtrain.errors import DataError, UsageError
from hvdtrain.host import files, records
from hvdtrain.training import runrecords
from hvdtrain.training.runrecords import METRICS, SUMMARY

CONFIGURATION = "config.yaml"
RUN_FILES = (CONFIGURATION, METRICS, SUMMARY)
RUNS = "runs"
METADATA = "ro-crate-metadata.json"
KINDS = {
    ".csv": "text/csv",
    ".html": "text/html",
    ".json": "application/json",
    ".jsonl": "application/jsonl",
    ".md": "text/markdown",
    ".pdf": "application/pdf",
    ".png": "image/png",
    ".tex": "application/x-tex",
    ".yaml": "application/yaml",
}
LATEST = 2**33  # seconds since 1970
_NO_DATE = (1980, 1, 1, 0, 0, 0)  # the first one of ZIP: a crate made twice holds the same bytes


def write(
    to: Path, report: Sequence[Path], names: Mapping[Path, str], options: Sequence[str]
) -> None:
    """Write a crate.

    Args:
        to: the ZIP file.
        report: files of the report.
        names: names of the runs, by their folders.
        options: options of `hvdtrain report` that make the report again.

    Raises:
        DataError: if it cannot be written, or a file of a run cannot be read.
    """
    try:
        contents = {path.name: path.read_bytes() for path in report}
        for folder, name in sorted(names.items(), key=lambda item: item[1]):
            for file in (folder / file for file in RUN_FILES):
                if file.is_symlink():  # what it points to may be private
                    raise OSError(f"{file} is a symbolic link: put a copy in its place")
                with suppress(OSError):  # its run is left out of the report, too
                    contents[f"{RUNS}/{name}/{file.name}"] = _public(file)
        metadata = describe(list(contents), options, _newest(contents))
        contents[METADATA] = (json.dumps(metadata, indent=1) + "\n").encode()

        def fill(file: IO[bytes]) -> None:
            with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
                for name, content in contents.items():
                    archive.writestr(_entry(name), content)

        files.write_whole(to, fill)
    except OSError as error:
        raise DataError(f"the crate {to} cannot be written: {error}") from None


def _public(file: Path) -> bytes:
    """Return the content of a file of a run without what other users should not read."""
    content = records.content(file, records.LARGEST_LINES)
    if file.name != CONFIGURATION:
        return content
    try:
        config = configfile.load(file)
    except UsageError:
        return b""  # it is left out of the report, too
    public = {name: value for name, value in config.items() if name not in configfile.PRIVATE}
    return yaml.safe_dump(public, sort_keys=False).encode()


def _newest(contents: Mapping[str, bytes]) -> str:
    """Return the day of the newest event of all runs, in UTC."""
    times = [0.0]
    for name, content in contents.items():
        if name.endswith(METRICS):
            with suppress(ValueError):
                times += [runrecords.parse_line(line).time for line in content.splitlines()[-1:]]
    return datetime.fromtimestamp(min(max(times), LATEST), UTC).date().isoformat()


def describe(names: Sequence[str], options: Sequence[str], day: str) -> dict[str, Any]:
    """Return the JSON-LD of a crate with these files, whose newest run is of a day."""
    ids = {name: quote(name) for name in names}
    again = " ".join(["hvdtrain report", RUNS, "--to again", *options])
    root = {
        "@id": "./",
        "@type": "Dataset",
        "name": "Scaling report",
        "description": f"A scaling report and the runs it is from. To make it again: {again}",
        "datePublished": day,
        "license": "Not stated: ask the authors of the runs.",
        "hasPart": [{"@id": part} for part in ids.values()],
        "mainEntity": {"@id": "report.md"},
    }
    descriptor = {
        "@id": METADATA,
        "@type": "CreativeWork",
        "conformsTo": {"@id": "https://w3id.org/ro/crate/1.1"},
        "about": {"@id": "./"},
    }
    software = {
        "@id": "#hvdtrain",
        "@type": "SoftwareApplication",
        "name": "hvdtrain",
        "version": __version__,
    }
    action = {
        "@id": "#report",
        "@type": "CreateAction",
        "name": again,
        "instrument": {"@id": software["@id"]},
        "object": [{"@id": ids[name]} for name in names if name.startswith(f"{RUNS}/")],
        "result": [{"@id": ids[name]} for name in names if not name.startswith(f"{RUNS}/")],
    }
    parts = [
        {"@id": ids[name], "@type": "File", "encodingFormat": KINDS[Path(name).suffix]}
        for name in names
    ]
    context = "https://w3id.org/ro/crate/1.1/context"
    return {"@context": context, "@graph": [descriptor, root, software, action, *parts]}


def _entry(name: str) -> zipfile.ZipInfo:
    entry = zipfile.ZipInfo(name, _NO_DATE)
    entry.compress_type = zipfile.ZIP_DEFLATED
    entry.external_attr = 0o644 << 16
    return entry
