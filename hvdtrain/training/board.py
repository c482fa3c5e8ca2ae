"""Numbers for TensorBoard, by its own writer, which needs no framework."""

import sys
import time
import types
from collections.abc import Callable
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter


class Board:
    """An event file in a folder.

    Later write errors only lose curves: a run is worth more than they are.

    Args:
        purge_step: TensorBoard ignores what older files hold for this step and later ones.

    Raises:
        OSError: if the folder cannot be written to.
    """

    def __init__(self, folder: Path, purge_step: int | None) -> None:
        # TensorBoard loads TensorFlow where that is installed, unless this module exists.
        none = types.ModuleType("tensorboard.compat.notf")
        sys.modules.setdefault("tensorboard.compat.notf", none)
        self.folder = str(folder)
        self.writer: EventFileWriter | None = EventFileWriter(self.folder)
        if purge_step is not None:
            self._add(Event(step=purge_step, file_version="brain.Event:2"))
            start = SessionLog(status=SessionLog.START)
            self._add(Event(step=purge_step, session_log=start))

    def add(self, name: str, value: float, step: int) -> None:
        """Write one number."""
        summary = Summary(value=[Summary.Value(tag=name, simple_value=value)])
        self._add(Event(step=step, summary=summary))

    def flush(self) -> None:
        """Let readers see what was added."""
        self._try(EventFileWriter.flush)

    def close(self) -> None:
        """Close the file; nothing can be added afterwards."""
        self._try(EventFileWriter.close)

    def _add(self, event: Event) -> None:
        event.wall_time = time.time()
        self._try(lambda writer: writer.add_event(event))

    def _try(self, work: Callable[[EventFileWriter], object]) -> None:
        try:
            if self.writer is None:
                self.writer = EventFileWriter(self.folder)
            work(self.writer)
        except OSError:
            self.writer = None  # after an error this one writes nothing more: a new one does
