"""The keyboard while an answer streams: what is typed then waits for the next line."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

try:
    import termios
except ImportError:  # Windows
    termios = None  # type: ignore[assignment]


@contextmanager
def silent_keyboard() -> Iterator[None]:
    """Have the terminal show no keys during the block; without a terminal, change nothing."""
    if termios is None or sys.stdin is None or not sys.stdin.isatty():
        yield
        return
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    silent = list(before)
    silent[3] &= ~termios.ECHO  # of the local modes
    try:
        with suppress(termios.error):  # the terminal is gone
            termios.tcsetattr(descriptor, termios.TCSADRAIN, silent)
        yield
    finally:
        with suppress(termios.error):
            termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
