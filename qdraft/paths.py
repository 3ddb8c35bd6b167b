"""The directories that qdraft writes to, and files that are there complete or not at all."""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import platformdirs


def cache_dir() -> Path:
    """Return the directory of built models and stored results.

    That is QDRAFT_CACHE_DIR, else the user's cache directory. Raises OSError if there is neither.
    """
    return _user_dir("QDRAFT_CACHE_DIR", platformdirs.user_cache_dir("qdraft"))


def config_dir() -> Path:
    """Return the directory of the user's models.yaml.

    That is QDRAFT_CONFIG_DIR, else the user's configuration directory. Raises OSError if there is
    neither.
    """
    return _user_dir("QDRAFT_CONFIG_DIR", platformdirs.user_config_dir("qdraft"))


def _user_dir(variable: str, usual: str) -> Path:
    """Return the directory that the variable names, else the usual one, which needs a home."""
    if given := os.environ.get(variable):
        return Path(given)
    if not os.path.isabs(usual):  # "~/..." of a user without HOME and without a passwd entry
        raise OSError(errno.ENOENT, f"your home directory is unknown and {variable} is not set")
    return Path(usual)


def home_dir() -> Path | None:
    """Return the user's home directory; None if the system knows none."""
    home = os.path.expanduser("~")
    return Path(home) if os.path.isabs(home) else None


@contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """Give a temporary file beside ``path`` to write to, and rename it if the block succeeds.

    The content is on disk (fsync) before the rename. A file that it replaces hands down its mode
    and owner, and a link stays a link: the file that it leads to is replaced. If the block fails or
    is interrupted, the temporary file is removed and ``path`` stays as it was. Raises OSError if
    ``path`` is something else than a file, for example a device.
    """
    path = Path(os.path.realpath(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    old = _stat_file(path)
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    # An ordinary new file, which the umask limits; asking for the umask would change it for a
    # moment, for all threads.
    os.close(os.open(part, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
    try:
        yield part
        with part.open("rb+") as file:
            os.fsync(file.fileno())
        if old is not None:
            _hand_down(old, part)
        part.replace(path)
        _sync_folder(path.parent)
    finally:
        part.unlink(missing_ok=True)


def _stat_file(path: Path) -> os.stat_result | None:
    """Return what the system knows of a file; None if there is none."""
    try:
        known = path.stat()
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(known.st_mode):
        raise OSError(errno.EINVAL, "not a file that can be replaced", str(path))
    return known


def _hand_down(old: os.stat_result, part: Path) -> None:
    """Give the new file the owner and the mode of the one that it replaces."""
    if hasattr(os, "chown"):
        with suppress(OSError):  # only root may give files away
            os.chown(part, old.st_uid, old.st_gid)
    part.chmod(stat.S_IMODE(old.st_mode))


def _sync_folder(folder: Path) -> None:
    """Bring the rename to disk, where the system can open folders."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
