"""Signals that stop a command: what else the system sends is handled as Ctrl-C."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType

from qdraft.cli.run import INTERRUPTED
from qdraft.llama.interrupts import STOP_SIGNALS


class StopSignals:
    """During the block, SIGTERM and SIGHUP raise KeyboardInterrupt, as Ctrl-C does.

    A signal that this process ignores, as under ``nohup``, stays ignored. ``status`` is the exit
    status of what stopped the command.
    """

    def __init__(self) -> None:
        self.status = INTERRUPTED
        self._set: list[int] = []
        self._terminals: list[int] = []

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            self._terminals = [number for number in (1, 2) if os.isatty(number)]
            self._set = [n for n in STOP_SIGNALS if signal.getsignal(n) is signal.SIG_DFL]
        for number in self._set:
            signal.signal(number, self._stop)
        return self

    def __exit__(self, *error: object) -> None:
        for number in self._set:
            signal.signal(number, signal.SIG_DFL)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self._leave_closed_terminals()
        # A closed terminal and ``timeout`` send theirs twice. The second must not stop a clean-up.
        if self.status == INTERRUPTED:
            self.status = 128 + number
            raise KeyboardInterrupt

    def _leave_closed_terminals(self) -> None:
        """Send what would go to a terminal that is gone nowhere: writing there would fail."""
        for number in self._terminals:
            if not os.isatty(number):
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, number)
                os.close(null)
