"""A lock on a file that several processes read, change and write."""

from __future__ import annotations

import errno
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

WAIT_S = 10.0  # an edit takes milliseconds
_STEP_S = 0.02


@contextmanager
def locked(path: Path, wait_s: float = WAIT_S) -> Iterator[None]:
    """Make other processes and threads that lock the same file wait until the block ends.

    The system frees the lock of a process that ends, however it ends: a lock file that was left
    behind keeps nobody waiting. Raises TimeoutError after ``wait_s`` seconds, and OSError if the
    folder of the file cannot be written.
    """
    real = Path(os.path.realpath(path))
    real.parent.mkdir(parents=True, exist_ok=True)
    lock = real.with_name(f".{real.name}.lock")
    deadline = time.monotonic() + wait_s
    while (handle := _open_locked(lock)) is None:
        if time.monotonic() > deadline:
            raise TimeoutError(errno.ETIMEDOUT, f"another process has held {lock} for too long")
        time.sleep(_STEP_S)
    try:
        yield
    finally:
        with suppress(OSError):  # another user's, or open elsewhere on Windows: it may stay
            lock.unlink()
        os.close(handle)


def _open_locked(lock: Path) -> int | None:
    """Return the handle of the locked file; None if another has locked it, or removed it."""
    handle = os.open(lock, os.O_CREAT | os.O_RDWR, 0o666)
    is_ours = False
    try:
        if _try_lock(handle):
            with suppress(FileNotFoundError):
                is_ours = os.path.samestat(os.fstat(handle), os.stat(lock))
    finally:
        if not is_ours:
            os.close(handle)
    return handle if is_ours else None


if sys.platform == "win32":
    import msvcrt

    def _try_lock(handle: int) -> bool:
        try:
            msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        return True

else:
    import fcntl

    def _try_lock(handle: int) -> bool:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:  # a file system without locks
            return True
        return True
