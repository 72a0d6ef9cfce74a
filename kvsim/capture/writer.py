"""A trace written by a thread of its own, so that the model waits for the disk only when it falls far behind."""

from __future__ import annotations

import threading
import time
from queue import Queue
from typing import Any

from kvsim.errors import KvsimError
from kvsim.trace.write import TraceWriter

ROOM = 8  # segments that may wait


class Writer:
    """Calls of a TraceWriter, carried out in order. An error of one is raised to the caller at its next call or at `close`."""

    def __init__(self, trace: TraceWriter) -> None:
        self.trace, self.stalled_seconds = trace, 0.0
        self.error: Exception | None = None
        self._queue: Queue[tuple[str, tuple[Any, ...]] | None] = Queue(ROOM)
        self._thread = threading.Thread(target=self._work, name="kvsim-writer", daemon=True)
        self._thread.start()

    def put(self, table: str, *rows: Any) -> None:
        """Has `TraceWriter.table(*rows)` called, rows that are on their way (staging.Later) first waited for; waits while the queue is
        full. Raises KvsimError."""
        self._complain()
        began = time.perf_counter()
        self._queue.put((table, rows))
        self.stalled_seconds += time.perf_counter() - began

    def drain(self) -> None:
        """Waits until what was put is written. Raises KvsimError."""
        self._queue.join()
        self._complain()

    def close(self) -> None:
        """Waits until all is written. Raises KvsimError."""
        self.abandon()
        self._complain()

    def abandon(self) -> None:
        """Waits until what was put is written, whatever came of it."""
        self._queue.put(None)
        self._thread.join()

    def _complain(self) -> None:
        if self.error is not None:
            raise KvsimError(
                f"{self.trace.path}: writing failed ({self.error}); the segments closed before can be read with allow_partial"
            ) from self.error

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            if self.error is None:  # after an error the queue is emptied, so that nobody waits for room in it
                table, rows = item
                try:
                    getattr(self.trace, table)(*(x() if callable(x) else x for x in rows))
                except Exception as e:
                    self.error = e
            self._queue.task_done()
