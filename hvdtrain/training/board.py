"""Numbers for TensorBoard, by its own writer, which needs no framework."""

import sys
import time
import types
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter


class Board:
    """An event file in a folder.

    Args:
        purge_step: what older files hold of this step and later ones does not count any more.

    Raises:
        OSError: from everything here, if the disk is full or not writable.
    """

    def __init__(self, folder: Path, purge_step: int | None) -> None:
        # It loads TensorFlow where that is installed, unless this module exists.
        none = types.ModuleType("tensorboard.compat.notf")
        sys.modules.setdefault("tensorboard.compat.notf", none)
        self.writer = EventFileWriter(str(folder))
        if purge_step is not None:
            self._add(Event(step=purge_step, file_version="brain.Event:2"))
            start = SessionLog(status=SessionLog.START)
            self._add(Event(step=purge_step, session_log=start))

    def add(self, name: str, value: float, step: int) -> None:
        """One number."""
        summary = Summary(value=[Summary.Value(tag=name, simple_value=value)])
        self._add(Event(step=step, summary=summary))

    def flush(self) -> None:
        """Let readers see what was added."""
        self.writer.flush()

    def close(self) -> None:
        """Nothing more is added."""
        self.writer.close()

    def _add(self, event: Event) -> None:
        event.wall_time = time.time()
        self.writer.add_event(event)
