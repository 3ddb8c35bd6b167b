"""Ctrl-C, and other signals that stop a command, during native calls."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from qdraft.llama.rpc_guard import GUARD

Handler = Callable[[int, FrameType | None], Any]


# What stops a command: Ctrl-C, kill and a closed terminal. Windows has no SIGHUP.
STOP_SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
)


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Hold signals that stop a command back during a native call that calls back into Python.

    Python would raise the interrupt inside the callback, where it is printed and lost. Instead this
    sets a flag, which the yielded function returns, and passes the signal to its handler when the
    call has returned. A second signal reaches the handler at once if the call waits for a server.
    A handler whose ``waits`` is True lets the call go on: it is called at once, and raises nothing.
    Only the main thread receives signals: in other threads, and for signals that Python does not
    handle, this changes nothing.
    """
    handlers = _handlers()
    received: list[int] = []

    def receive(number: int, frame: FrameType | None) -> None:
        if getattr(handlers[number], "waits", False):
            handlers[number](number, frame)
            return
        received.append(number)
        if len(received) > 1 and GUARD.started:  # else it would be raised in a callback
            handlers[number](number, frame)

    for number in handlers:
        signal.signal(number, receive)
    try:
        yield lambda: bool(received)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if received:  # even if the call failed: it may have ended because of the signal
            handlers[received[0]](received[0], None)


def _handlers() -> dict[int, Handler]:
    """Return the Python functions that handle stop signals on this thread, by signal."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    return {number: handler for number, handler in handlers.items() if callable(handler)}
