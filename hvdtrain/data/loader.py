"""Batches made ahead of their use by one background thread."""

import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
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

    Attributes:
        last_wait: seconds that the consumer waited for the last batch.
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
        # Two queues of C make one with a limit: a step costs no lock of Python's own.
        self._made: queue.SimpleQueue[Item | _End] = queue.SimpleQueue()
        self._room: queue.SimpleQueue[bool] = queue.SimpleQueue()
        for _ in range(prefetch):
            self._room.put(True)
        self._ended = False
        self.last_wait = 0.0
        self._thread = threading.Thread(
            target=_produce,
            args=(source, iter(requests), transform, self._made, self._room),
            name="hvdtrain-loader",
            daemon=True,
        )
        self._thread.start()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Item:
        if self._ended:
            raise StopIteration
        began = time.perf_counter()
        item = self._made.get()
        self.last_wait = time.perf_counter() - began
        if not isinstance(item, _End):
            self._room.put(True)
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
        while not self._room.empty():
            with suppress(queue.Empty):  # the thread may be faster
                self._room.get_nowait()
        self._room.put(False)
        self._thread.join()
        self._made = queue.SimpleQueue()


def _produce(
    source: Source[Request, Item],
    requests: Iterator[Request],
    transform: Callable[[Item], Item] | None,
    made: "queue.SimpleQueue[Item | _End]",
    room: "queue.SimpleQueue[bool]",
) -> None:
    """Make batches while there is room for them: one for each True, until a False."""
    error: BaseException | None = None
    try:
        for request in requests:
            if not room.get():
                return
            batch = source.gather(request)
            made.put(batch if transform is None else transform(batch))
    except BaseException as raised:  # whatever it is, it belongs to the consumer
        error = raised
    made.put(_End(error))
