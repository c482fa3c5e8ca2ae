"""Batches made ahead of their use by one background thread."""

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from hvdtrain.data.shards import Batch, Samples
from hvdtrain.errors import UsageError

Transform = Callable[[Batch], Batch]


class _End:
    """Last item of the queue, with the error that ended the thread, if one did."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


class Loader:
    """Iterates over one batch a request, in the order of the requests.

    Each request is an int64 array of rows (it may be empty); `transform` is applied to each batch
    in the background thread. At most `prefetch` batches wait for their use. An error in the
    thread is raised in the consumer, in place of the batch that failed. The thread ends with the
    requests or with close(), whichever comes first; use it in a `with` statement.
    """

    def __init__(
        self,
        samples: Samples,
        requests: Iterable[NDArray[np.int64]],
        transform: Transform | None = None,
        prefetch: int = 2,
    ) -> None:
        if prefetch < 1:
            raise UsageError(f"prefetch is {prefetch}: it must be at least 1")
        self._queue: queue.Queue[Batch | _End] = queue.Queue(prefetch)
        self._stop = threading.Event()
        self._ended = False
        self._thread = threading.Thread(
            target=_produce,
            args=(samples, iter(requests), transform, self._queue, self._stop),
            name="hvdtrain-loader",
            daemon=True,
        )
        self._thread.start()

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if self._ended:
            raise StopIteration
        item = self._queue.get()
        if not isinstance(item, _End):
            return item
        self.close()
        if item.error is not None:
            raise item.error
        raise StopIteration

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop the thread, once it has finished the batch at hand; batches made are dropped."""
        self._ended = True
        self._stop.set()
        # A thread that waits for room finds some, and looks at the stop flag before it goes on:
        # it can put one more item at most, so it never waits again.
        while not self._queue.empty():
            self._queue.get_nowait()
        self._thread.join()


def _produce(
    samples: Samples,
    requests: Iterator[NDArray[np.int64]],
    transform: Transform | None,
    made: "queue.Queue[Batch | _End]",
    stop: threading.Event,
) -> None:
    error: BaseException | None = None
    try:
        for rows in requests:
            batch = samples.gather(rows)
            made.put(batch if transform is None else transform(batch))
            if stop.is_set():
                return
    except BaseException as raised:  # whatever it is, it belongs to the consumer
        error = raised
    if not stop.is_set():
        made.put(_End(error))
