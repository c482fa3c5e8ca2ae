"""Functions on ranks from a notebook: values, exceptions, dead ranks and Ctrl-C come back."""

import os
import signal
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from hvdtrain import data, notebook, notebook_launch
from hvdtrain.errors import Interrupted, Preempted, RankError, UsageError
from tests.children import end_of, in_child
from tests.conftest import ROOT, program_environment

SECONDS = 120


def ranks_and_sum(number: int, more: int) -> list[int]:
    from hvdtrain import world

    here = world.start()
    gathered = here.gather(here.rank * 10 + number + more)
    world.stop()
    return gathered


def test_a_function_runs_on_all_ranks_and_returns_the_value_of_the_first() -> None:
    assert notebook_launch(ranks_and_sum, 1, more=2, ranks=3) == [3, 13, 23]
    local = {"seen": 4}
    assert notebook_launch(lambda: local["seen"] + 1, ranks=1) == 5


class Odd(Exception):
    """An exception that cannot be made from its message alone."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__("odd")


def test_an_exception_of_a_rank_is_raised_with_its_traceback(
    capfd: pytest.CaptureFixture[str],
) -> None:
    def fail(kind: str) -> None:
        from hvdtrain import world

        here = world.start()
        if here.rank == 1:
            raise ValueError("two\nlines") if kind == "value" else Odd(1, 2)
        here.barrier()  # waits until the job ends

    with pytest.raises(ValueError, match="two") as raised:
        notebook_launch(fail, "value")
    shown = "".join(traceback.format_exception(raised.value))
    assert 'raise ValueError("two\\nlines")' in shown
    assert raised.value.__notes__ == ["on rank 1"]
    assert isinstance(raised.value.__cause__, notebook.RankTraceback)
    assert capfd.readouterr().err == ""
    with pytest.raises(RankError, match=r"rank 1 failed: .*Odd: odd$"):
        notebook_launch(fail, "odd")


def test_a_killed_rank_is_named_in_the_error() -> None:
    def die() -> None:
        from hvdtrain import world

        here = world.start()
        if here.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        here.barrier()

    with pytest.raises(RankError, match=r"rank 1 on .* was ended by signal 9"):
        notebook_launch(die)


def test_errors_of_hvdtrain_keep_their_kind_and_what_cannot_be_sent_is_refused() -> None:
    def check() -> None:
        from hvdtrain import models

        models.check_name("cn")

    with pytest.raises(UsageError, match="unknown model 'cn': did you mean cnn"):
        notebook_launch(check, ranks=1)
    lock = threading.Lock()
    with pytest.raises(UsageError, match="<lambda> cannot be sent to the ranks"):
        notebook_launch(lambda: lock)
    with pytest.raises(UsageError, match="the value of rank 0, a lock, cannot be sent back"):
        notebook_launch(lambda: __import__("threading").Lock(), ranks=1)
    with pytest.raises(UsageError, match="ranks must be a whole number above 0, not 0"):
        notebook_launch(ranks_and_sum, ranks=0)


def test_ranks_start_no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    with pytest.raises(UsageError, match="call the function directly in a script"):
        notebook_launch(ranks_and_sum)


@pytest.mark.parametrize(
    ("number", "kind"), [(signal.SIGINT, Interrupted), (signal.SIGTERM, Preempted)]
)
def test_a_signal_ends_the_ranks(tmp_path: Path, number: int, kind: type[Exception]) -> None:
    def wait(folder: Path) -> None:
        from hvdtrain import world

        (folder / str(world.start().rank)).write_text(str(os.getpid()))
        time.sleep(SECONDS)

    def stop() -> None:
        while len(list(tmp_path.iterdir())) < 2:
            time.sleep(0.05)
        os.kill(os.getpid(), number)

    threading.Thread(target=stop, daemon=True).start()
    with pytest.raises(kind):
        notebook_launch(wait, tmp_path)
    for rank in ("0", "1"):
        assert not Path("/proc", (tmp_path / rank).read_text()).exists()


def test_no_rank_outlives_the_notebook(tmp_path: Path) -> None:
    def wait(folder: Path) -> None:
        from hvdtrain import world

        (folder / str(world.start().rank)).write_text(str(os.getpid()))
        time.sleep(SECONDS)

    child = in_child(lambda: notebook_launch(wait, tmp_path))
    while len(pids := [path.read_text() for path in tmp_path.iterdir()]) < 2 or not all(pids):
        time.sleep(0.05)
    os.kill(child, signal.SIGKILL)
    assert end_of(child) == -signal.SIGKILL
    while any(Path("/proc", pid).exists() for pid in pids):
        time.sleep(0.05)


@pytest.mark.weekly
def test_ctrl_c_during_training_saves_the_state(small_set: Path, tmp_path: Path) -> None:
    def train(folder: Path, data_set: Path) -> Any:
        from collections.abc import Mapping
        from typing import Any

        import hvdtrain

        class Tells(hvdtrain.Callback):
            def on_step(self, metrics: Mapping[str, Any]) -> None:
                (folder / "trains").touch()

        config = hvdtrain.TrainConfig(
            model="cnn", data=str(data_set), epochs=1000, log_every=1, run=str(folder / "run")
        )
        return hvdtrain.train(config, callbacks=Tells())

    def stop() -> None:
        while not (tmp_path / "trains").exists():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=stop, daemon=True).start()
    with pytest.raises(Interrupted, match=r"stopped after step \d+, state saved: continue with"):
        notebook_launch(train, tmp_path, small_set, ranks=1)
    assert any((tmp_path / "run" / "checkpoints").glob("step-*"))


@pytest.mark.proves(
    "`notebook_launch` runs a function on ranks: it returns values, raises exceptions of "
    "ranks and passes Ctrl-C on; a real notebook runs."
)
def test_the_notebook_of_the_examples_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data.synth(tmp_path / "data" / "synthetic", 2000, 10)
    for name, value in program_environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("PYTEST_CURRENT_TEST", raising=False)  # else it captures no output of ranks
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    content = nbformat.read(ROOT / "examples" / "notebook.ipynb", as_version=4)
    client = NotebookClient(
        content, timeout=300, kernel_name="python3", resources={"metadata": {"path": tmp_path}}
    )
    client.execute()
    outputs = content.cells[-1].outputs
    printed = "".join(one["text"] for one in outputs if one["output_type"] == "stream")
    assert "2 rank(s)" in printed
    assert "stage 1 on rank 1" in printed
    (result,) = (one["data"]["text/plain"] for one in outputs if one["output_type"] != "stream")
    accuracies = eval(result)
    assert accuracies.keys() == {"dp", "mp"}
    assert accuracies["dp"] == pytest.approx(accuracies["mp"], abs=0.02)
    assert accuracies["dp"] > 0.2  # twice that of chance
