"""Batches made ahead of their use by one background thread."""

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Generic, Protocol, Self, TypeVar

from hvdtrain.errors import UsageError

Request = TypeVar("Request")
Item = TypeVar("Item")
_Asked = TypeVar("_Asked", contravariant=True)
_Made = TypeVar("_Made", covariant=True)


class Source(Protocol[_Asked, _Made]):
    """What batches come from; a `Samples` is one, its requests arrays of rows."""

    def gather(self, request: _Asked, /) -> _Made:
        """Read one batch."""


class _End:
    """Last item of the queue, with the error that ended the thread, if one did."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


class Loader(Generic[Request, Item]):
    """Iterates over one batch a request, in the order of the requests.

    Each request is what the source takes; `transform` is applied to each batch in the background
    thread. At most `prefetch` batches wait for their use. An error in the thread is raised in the
    consumer, in place of the batch that failed. The thread ends with the requests or with
    close(), whichever comes first; use it in a `with` statement.
    """

    def __init__(
        self,
        source: Source[Request, Item],
        requests: Iterable[Request],
        transform: Callable[[Item], Item] | None = None,
        prefetch: int = 2,
    ) -> None:
        if prefetch < 1:
            raise UsageError(f"prefetch is {prefetch}: it must be at least 1")
        self._queue: queue.Queue[Item | _End] = queue.Queue(prefetch)
        self._stop = threading.Event()
        self._ended = False
        self._thread = threading.Thread(
            target=_produce,
            args=(source, iter(requests), transform, self._queue, self._stop),
            name="hvdtrain-loader",
            daemon=True,
        )
        self._thread.start()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Item:
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
    source: Source[Request, Item],
    requests: Iterator[Request],
    transform: Callable[[Item], Item] | None,
    made: "queue.Queue[Item | _End]",
    stop: threading.Event,
) -> None:
    error: BaseException | None = None
    try:
        for request in requests:
            batch = source.gather(request)
            made.put(batch if transform is None else transform(batch))
            if stop.is_set():
                return
    except BaseException as raised:  # whatever it is, it belongs to the consumer
        error = raised
    if not stop.is_set():
        made.put(_End(error))
