"""`Signals`: what a launcher does with the signals that come to it while its ranks run."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any, final

from plait.train.supervise import STOPPING


@final
class Signals:
    """Notes the signals that come meanwhile, so that ranks are ended in order; a second one changes nothing.

    ``passed_on``: those of `STOPPING` ask the ranks to end; the same signal again ends them.
    """

    def __init__(self, *, passed_on: bool) -> None:
        self._passed_on = passed_on
        self.asked = 0
        """The first signal that asked the ranks to end."""
        self.fatal = 0
        """The first that ends them."""
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            taken = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT}
            for number in taken | set(STOPPING if self._passed_on else ()):
                if signal.getsignal(number) != signal.SIG_IGN:  # nohup
                    self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._passed_on and number in STOPPING and not self.asked:
            self.asked = number
        elif not self.fatal:
            self.fatal = number
