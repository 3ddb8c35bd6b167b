"""Ctrl-C during native calls."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from qdraft.llama.rpc_guard import GUARD


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Hold Ctrl-C back during a native call that calls back into Python.

    Python would raise the interrupt inside the callback, where it is printed and lost. Instead this
    sets a flag, which the yielded function returns, and passes the interrupt to its handler when
    the call has returned. A second interrupt reaches the handler at once if the call waits for a
    server. Only the main thread receives signals: in other threads, and if the process ignores
    interrupts, this changes nothing.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield lambda: False
        return
    received: list[int] = []

    def receive(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if len(received) > 1 and GUARD.started:  # else it would be raised in a callback
            handler(number, frame)

    signal.signal(signal.SIGINT, receive)
    try:
        yield lambda: bool(received)
    finally:
        signal.signal(signal.SIGINT, handler)
    if received:
        handler(received[0], None)
