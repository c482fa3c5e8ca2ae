"""A loader that prepares batches in advance in one background thread."""

import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Generic, Protocol, Self, TypeVar

from hvdtrain.errors import UsageError

Request = TypeVar("Request")
Item = TypeVar("Item")
_Request = TypeVar("_Request", contravariant=True)
_Made = TypeVar("_Made", covariant=True)


class Source(Protocol[_Request, _Made]):
    """A source of batches, such as `Samples`, whose requests are arrays of rows."""

    def gather(self, request: _Request, /) -> _Made:
        """Read one batch."""


class _End:
    """The last item of the queue, with the error that ended the thread, if any."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


class Loader(Generic[Request, Item]):
    """An iterator over one batch per request, in the order of the requests.

    The source must accept the requests; `transform` is applied to each batch in the background
    thread. At most `prefetch` batches are held ready. An error in the thread is raised in the
    consumer, in place of the batch that failed. The thread ends after the last request or with
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
        # Two queues in C form one with a limit: a step then needs none of Python's own locks.
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
        start = time.perf_counter()
        item = self._made.get()
        self.last_wait = time.perf_counter() - start
        if not isinstance(item, _End):
            self._room.put(True)
            return item
        self.close()
        if item.error is not None:
            raise item.error
        raise StopIteration

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the thread after its current batch, and drop the prepared batches."""
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
    """Make one batch per True from `room`, and stop at a False."""
    error: BaseException | None = None
    try:
        for request in requests:
            if not room.get():
                return
            batch = source.gather(request)
            made.put(batch if transform is None else transform(batch))
    except BaseException as raised:  # any error is raised in the consumer
        error = raised
    made.put(_End(error))
