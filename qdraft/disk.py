"""The space that files need on a disk, checked before they are written."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

from qdraft.errors import DiskSpaceError


def free_bytes(folder: Path) -> int:
    """Return the bytes that this user may still write on the disk of ``folder``.

    The folder need not exist yet.
    """
    folder = folder.absolute()
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def require_space(folder: Path, n_bytes: int, what: str, hint: str) -> None:
    """Raise DiskSpaceError unless ``n_bytes`` are free for ``what`` on the disk of ``folder``."""
    free = free_bytes(folder)
    if n_bytes > free:
        raise DiskSpaceError(
            f"{what} needs {show_bytes(n_bytes)} in {folder}, but {show_bytes(free)} is free",
            hint=hint,
        )


def is_no_room(error: OSError) -> bool:
    """Tell whether a write failed because the disk, a quota or a limit of file sizes is full."""
    return error.errno in (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC), errno.EFBIG)


def show_bytes(n: int) -> str:
    """Return a number of bytes in MB or GB."""
    return f"{n / 1e9:.1f} GB" if n >= 1e9 else f"{n / 1e6:.0f} MB"
