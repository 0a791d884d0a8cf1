"""`Sends`: messages that have not left yet, kept until they have and not much longer."""

from __future__ import annotations

import threading
from collections import deque
from typing import Protocol, final

from torch import Tensor


class Work(Protocol):
    """What ``torch.distributed`` gives for an operation that it has started."""

    def wait(self) -> object: ...

    def is_completed(self) -> bool: ...


HELD = 8 << 20
"""Bytes of messages that may be held although they have left. A thread costs some 0.5 ms on a busy host: less than so
many bytes take on their way, and much more than a small message does."""


@final
class Sends:
    """Keeps each message until it has left.

    gloo tells of a message that it has left only to who waits for it (``is_completed`` of a send stays false), and a
    wait in the middle of a schedule may be for a rank that waits for this one. So where `HELD` bytes are kept, a thread
    waits for all of them, in their order, and ends. NCCL's answer to ``is_completed`` is true when it is, and waiting
    is a matter of streams: ``asked`` is for that, and has no thread.
    """

    def __init__(self, *, asked: bool) -> None:
        self._asked = asked
        self._kept: deque[tuple[Work, Tensor]] = deque()
        self._change = threading.Condition()
        self._bytes = 0
        self._waiting = False
        self._error: RuntimeError | None = None

    def add(self, work: Work, message: Tensor) -> None:
        """Keep ``message`` until ``work`` has ended."""
        if self._asked:
            self._kept = deque(pair for pair in self._kept if not pair[0].is_completed())
        with self._change:
            self._kept.append((work, message))
            self._bytes += message.nbytes
            if self._bytes >= HELD and not self._asked and not self._waiting:
                self._waiting = True
                threading.Thread(target=self._wait, name="plait-sends", daemon=True).start()

    def flush(self) -> None:
        """Return when every message has left; RuntimeError, torch's, where one has not within the group's time-out."""
        with self._change:
            self._change.wait_for(lambda: not self._waiting)
            error, self._error = self._error, None
        if error is not None:
            raise error
        while self._kept:
            self._kept[0][0].wait()
            self._kept.popleft()
        self._bytes = 0

    def _wait(self) -> None:
        while True:
            with self._change:
                if not self._kept:
                    self._waiting = False
                    self._change.notify_all()
                    return
                work, _ = self._kept[0]
            try:
                work.wait()
            except RuntimeError as error:
                self._error = self._error or error
            del work
            with self._change:
                self._bytes -= self._kept.popleft()[1].nbytes
