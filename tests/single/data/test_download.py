"""Downloads from a real server on this machine: complete, interrupted, resumed, wrong, missing."""

import hashlib
import http.server
import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from hvdtrain.data.sources import CIFAR10, download, fetch
from hvdtrain.errors import DataError

CONTENT = np.random.default_rng(0).bytes(1_000_000)
MD5 = hashlib.md5(CONTENT).hexdigest()


class Handler(http.server.BaseHTTPRequestHandler):
    """A handler that serves CONTENT at every path, according to its server's settings."""

    server: "Server"

    def do_GET(self) -> None:
        range_header = self.headers.get("Range")
        self.server.ranges.append(range_header)
        if self.server.status is not None:
            self.send_error(self.server.status)
            return
        start = 0
        if range_header and self.server.knows_ranges:
            match = re.fullmatch(r"bytes=(\d+)-", range_header)
            assert match
            start = int(match[1])
            if start >= len(CONTENT):
                self.send_error(416)
                return
            self.send_response(206)
            sent_range = start + self.server.range_error
            self.send_header(
                "Content-Range", f"bytes {sent_range}-{len(CONTENT) - 1}/{len(CONTENT)}"
            )
        else:
            self.send_response(200)
        self.send_header("Content-Length", str(len(CONTENT) - start))
        self.end_headers()
        # The connection breaks after `room` bytes.
        room = self.server.breaks.pop(0) if self.server.breaks else len(CONTENT)
        self.wfile.write(CONTENT[start : start + room])

    def log_message(self, format: str, *args: object) -> None:
        pass


class Server(http.server.ThreadingHTTPServer):
    """A server with settings: connections that break after N bytes, ranges, a response status."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.breaks: list[int] = []
        self.ranges: list[str | None] = []
        self.knows_ranges = True
        self.range_error = 0
        self.status: int | None = None

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore clients that close the connection, as some tests do; print any other error."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/archive.tar.gz"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with Server() as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def refusal(server: Server, path: Path, md5: str = MD5) -> str:
    with pytest.raises(DataError) as caught:
        download(server.url, path, md5)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_file_is_fetched_once(server: Server, tmp_path: Path) -> None:
    seen: list[tuple[int, int | None]] = []
    path = tmp_path / "new" / "file"
    for _ in range(2):
        assert download(server.url, path, MD5, lambda *now: seen.append(now)) == path
    assert path.read_bytes() == CONTENT
    assert names_in(path.parent) == ["file"]
    assert server.ranges == [None]
    assert seen[0] == (0, len(CONTENT))
    assert seen[-1] == (len(CONTENT), len(CONTENT))
    assert seen == sorted(seen)


@pytest.mark.proves(
    "`data fetch` resumes a broken download and checks its MD5; `data pack` refuses "
    "pickles and damaged files."
)
def test_a_broken_connection_is_taken_up_where_it_ended(server: Server, tmp_path: Path) -> None:
    server.breaks = [400_000, 300_000]
    seen: list[int] = []
    download(server.url, tmp_path / "file", MD5, lambda have, total: seen.append(have))
    assert (tmp_path / "file").read_bytes() == CONTENT
    assert server.ranges == [None, "bytes=400000-", "bytes=700000-"]
    assert seen == sorted(seen)


def test_a_later_call_goes_on_from_the_part_file(server: Server, tmp_path: Path) -> None:
    server.breaks = [123_456, 0]
    message = refusal(server, tmp_path / "file")
    assert "run this again to resume from 123,456 bytes" in message
    assert str(tmp_path / "file") in message
    assert names_in(tmp_path) == ["file.part"]
    download(server.url, tmp_path / "file", MD5)
    assert server.ranges[-1] == "bytes=123456-"
    assert (tmp_path / "file").read_bytes() == CONTENT
    assert names_in(tmp_path) == ["file"]


def test_a_server_without_ranges_sends_it_all_again(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file.part").write_bytes(CONTENT[:5000])
    server.knows_ranges = False
    download(server.url, tmp_path / "file", MD5)
    assert (tmp_path / "file").read_bytes() == CONTENT


def test_a_server_that_sends_another_range_is_refused(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file.part").write_bytes(CONTENT[:5000])
    server.range_error = 1
    assert "another range" in refusal(server, tmp_path / "file")
    assert (tmp_path / "file.part").read_bytes() == CONTENT[:5000]


def test_a_part_that_is_whole_already_is_taken(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file.part").write_bytes(CONTENT)
    download(server.url, tmp_path / "file", MD5)
    assert names_in(tmp_path) == ["file"]


def test_a_wrong_md5_deletes_the_part(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file.part").write_bytes(b"something else")
    message = refusal(server, tmp_path / "file")
    assert "wrong MD5 and was deleted" in message
    assert names_in(tmp_path) == []


def test_a_file_of_the_user_with_a_wrong_md5_is_not_touched(
    server: Server, tmp_path: Path
) -> None:
    (tmp_path / "file").write_bytes(b"mine")
    assert "has another MD5 than the official file; remove it" in refusal(
        server, tmp_path / "file"
    )
    assert (tmp_path / "file").read_bytes() == b"mine"
    assert server.ranges == []


def test_an_answer_of_the_server_is_passed_on(server: Server, tmp_path: Path) -> None:
    server.status = 404
    message = refusal(server, tmp_path / "file")
    assert "404 Not Found" in message
    assert f"copy the file to {tmp_path / 'file'} yourself" in message
    assert names_in(tmp_path) == []


def test_without_a_network_the_place_for_the_file_is_named(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = server.url.rsplit("/", 1)[0]
    server.shutdown()
    server.server_close()
    with pytest.raises(DataError) as caught:
        fetch("cifar10", tmp_path, site=site)
    message = str(caught.value)
    assert "\n" not in message
    assert f"cannot download {site}/{CIFAR10.archive} (" in message
    assert f"copy the file to {tmp_path / CIFAR10.archive} yourself" in message


def test_a_folder_that_cannot_be_written_is_named(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    assert "cannot be written" in refusal(server, tmp_path / "file" / "archive")


def test_fetch_asks_for_the_official_archive_and_checks_it(server: Server, tmp_path: Path) -> None:
    site = server.url.rsplit("/", 1)[0]
    with pytest.raises(DataError, match="wrong MD5 and was deleted"):
        fetch("cifar100", tmp_path, site=site)
    assert names_in(tmp_path) == []
