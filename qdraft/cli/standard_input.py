"""Text on standard input beside a prompt, read only where it cannot hang."""

from __future__ import annotations

import io
import logging
import os
import select
import stat
import sys
from contextlib import suppress

log = logging.getLogger(__name__)

# How long a pipe may stay silent. A program that starts together with qdraft writes within this
# time; cron, CI and ssh leave pipes open on which nobody ever writes.
PATIENCE_S = 2.0


def read_all() -> bytes:
    """Return everything on standard input, however long that takes."""
    return sys.stdin.buffer.read() if sys.stdin else b""


def read_if_there() -> bytes:
    """Return what is on standard input if it is a file, or a pipe or socket that has data.

    Nobody asked for it, so that a terminal or a device is not read, and a pipe on which nothing
    comes for ``PATIENCE_S`` is left alone, with a warning.
    """
    if sys.stdin is None:
        return b""
    try:
        descriptor = sys.stdin.fileno()
        mode = os.fstat(descriptor).st_mode
    except io.UnsupportedOperation:  # a stand-in without a descriptor, which may refuse
        with suppress(OSError, ValueError):
            return b"" if sys.stdin.isatty() else read_all()
        return b""
    except (OSError, ValueError):  # closed
        return b""
    if stat.S_ISREG(mode):
        return read_all()
    if not (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)):
        return b""
    if _has_data(descriptor):
        return read_all()
    log.warning(
        "standard input is an open pipe without data, and is not read; -f - waits for it, "
        "< /dev/null closes it"
    )
    return b""


def _has_data(descriptor: int) -> bool:
    """Tell whether a read returns at once, with data or with the end, now or soon."""
    try:
        return bool(select.select([descriptor], [], [], PATIENCE_S)[0])
    except (OSError, ValueError):  # a system whose select knows no pipes
        return False
