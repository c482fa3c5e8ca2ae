"""The run folder: resumed or refused, depending on its content."""

from pathlib import Path
from typing import Any, Literal

import pytest

from hvdtrain import configfile
from hvdtrain.config import TrainConfig
from hvdtrain.errors import UsageError
from hvdtrain.training import metrics


def make(run: Path, **values: Any) -> TrainConfig:
    return TrainConfig(model="cnn", data="d", run=str(run), **values)


@pytest.fixture
def held(tmp_path: Path) -> Path:
    """Return a folder that holds a run."""
    run = tmp_path / "held"
    run.mkdir()
    (run / "config.yaml").write_text(configfile.to_yaml(make(run)))
    return run


@pytest.mark.parametrize("resume", [True, "auto"])
def test_a_folder_that_holds_a_run_is_resumed(held: Path, resume: Literal["auto"] | bool) -> None:
    folder, resumes = metrics.find_folder(make(held, resume=resume))
    assert (folder.path, resumes) == (held, True)


@pytest.mark.parametrize("resume", [False, "auto"])
def test_a_folder_without_a_run_starts_one(tmp_path: Path, resume: Literal["auto"] | bool) -> None:
    (tmp_path / "empty").mkdir()
    for run in (tmp_path / "absent", tmp_path / "empty"):
        folder, resumes = metrics.find_folder(make(run, resume=resume))
        assert (folder.path, resumes) == (run, False)


def test_a_folder_that_does_not_hold_what_is_expected_is_refused(
    held: Path, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match="holds this run already: add --resume"):
        metrics.find_folder(make(held))
    for resume in (False, True, "auto"):
        with pytest.raises(UsageError, match=r"another configuration \(lr was 0.001, is 0.5\)"):
            metrics.find_folder(make(held, resume=resume, lr=0.5))


@pytest.mark.parametrize(
    ("names", "content"),
    [
        (None, "there is no such folder"),
        ([], "it is empty"),
        (["notes.txt"], "it holds notes.txt and no config.yaml"),
        (["a", "b", "c", "d"], "it holds a, b, c, ... and no config.yaml"),
    ],
)
def test_a_folder_without_a_run_to_resume_is_refused_with_what_it_holds(
    tmp_path: Path, names: list[str] | None, content: str
) -> None:
    run = tmp_path / "run"
    for name in [] if names is None else ["", *names]:
        (run / name).mkdir()
    with pytest.raises(UsageError) as caught:
        metrics.find_folder(make(run, resume=True))
    assert str(caught.value) == (
        f"{run} holds no run to resume ({content}): correct --run, "
        "or start a run there with --resume auto"
    )
