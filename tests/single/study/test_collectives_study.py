"""The study of all-reduces with short real measurements on two ranks."""

import csv
import json
from pathlib import Path

from tests.conftest import Program


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def test_a_study_measures_each_cell_once_and_reports_it(
    hvdtrain: Program, small_set: Path, tmp_path: Path
) -> None:
    to = tmp_path / "study"
    words = ("reproduce", "collectives", "--to", to, "--data", small_set, "--ranks", 2)
    short = ("--repeats", 1, "--algorithms", "ring", "--steps", 4)
    command = (*words, *short, "--largest", 8192)
    done = hvdtrain(*command)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == str(to / "report.md")
    text = (to / "report.md").read_text()
    for library in ("MPI", "Horovod"):
        assert f"### {library}, 2 ranks" in text
        assert (to / f"allreduce-{library.lower()}-2.png").read_bytes().startswith(b"\x89PNG")
    assert (to / "steps-cnn.png").read_bytes().startswith(b"\x89PNG")
    sums = rows_of(to / "sums.csv")
    assert [row["algorithm"] for row in sums] == ["ring"] * 8
    assert [int(row["bytes"]) for row in sums][:4] == [1024, 2048, 4096, 8192]
    assert all(float(row["seconds"]) > 0 for row in sums)
    steps = rows_of(to / "steps.csv")
    assert [row["library"] for row in steps] == ["mpi", "horovod"]
    for row in steps:
        ratio = float(row["predicted"]) / float(row["measured"])
        assert float(row["ratio"]) == ratio
        assert 0.02 < ratio < 50  # the machine may be busy
    results = [*(to / "sums").iterdir(), *(to / "profiles").iterdir()]
    results += (to / "runs").rglob("summary.json")
    assert len(results) == 1 + 2 + 2
    made = {path: path.stat().st_mtime_ns for path in results}
    (to / "report.md").unlink()
    done = hvdtrain(*command)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(" is finished") == len(results)
    assert (to / "report.md").read_text() == text
    assert {path: path.stat().st_mtime_ns for path in results} == made
    done = hvdtrain(*words, *short, "--largest", 4096)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "was measured with other settings (sizes was" in done.stderr


def test_a_study_that_was_stopped_measures_only_what_is_missing(
    hvdtrain: Program, tmp_path: Path
) -> None:
    words = ("--to", tmp_path, "--ranks", 2, "--repeats", 1, "--algorithms", "ring,tree")
    command = ("reproduce", "collectives", *words, "--models", "none", "--largest", 2048)
    done = hvdtrain(*command)
    assert done.returncode == 0, done.stderr
    kept = tmp_path / "sums" / "ring-2-0.json"
    before = kept.read_text()
    (tmp_path / "sums" / "tree-2-0.json").unlink()
    done = hvdtrain(*command)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(" is finished") == 1
    assert kept.read_text() == before
    assert json.loads((tmp_path / "sums" / "tree-2-0.json").read_text())["ranks"] == 2
    assert not (tmp_path / "runs").exists()
    text = (tmp_path / "report.md").read_text()
    assert "## Crossovers" in text
    assert "What a training step gains" not in text


def test_what_cannot_be_measured_is_one_line_and_leaves_nothing(
    hvdtrain: Program, tmp_path: Path
) -> None:
    to = tmp_path / "to"
    for words, code in (
        (("--ranks", 1), 2),
        (("--algorithms", "star"), 2),
        (("--data", tmp_path / "none"), 3),
    ):
        done = hvdtrain("reproduce", "collectives", "--to", to, *words)
        assert (done.returncode, len(done.stderr.splitlines())) == (code, 1), done.stderr
        assert not to.exists()
