"""The directories that qdraft writes to, and files that are there complete or not at all."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import platformdirs

try:
    from fcntl import LOCK_EX, LOCK_NB, flock
except ImportError:  # Windows: nothing is locked there, so nothing is swept
    flock = None  # type: ignore[assignment]

_PART = ".qdraft.part"  # how the name of a file or folder ends that is not complete yet
_NO_ROOM = (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC), errno.EFBIG)


def cache_dir() -> Path:
    """Return the directory of built models and stored results.

    That is QDRAFT_CACHE_DIR, else the user's cache directory. Raises OSError if there is neither.
    """
    return _user_dir("QDRAFT_CACHE_DIR", platformdirs.user_cache_dir)


def config_dir() -> Path:
    """Return the directory of the user's models.yaml.

    That is QDRAFT_CONFIG_DIR, else the user's configuration directory. Raises OSError if there is
    neither.
    """
    return _user_dir("QDRAFT_CONFIG_DIR", platformdirs.user_config_dir)


def data_dir() -> Path:
    """Return the directory of the user's chats.

    That is QDRAFT_DATA_DIR, else the user's data directory. Raises OSError if there is neither.
    """
    return _user_dir("QDRAFT_DATA_DIR", platformdirs.user_data_dir)


def _user_dir(variable: str, find_usual: Callable[[str], str]) -> Path:
    """Return the directory that the variable names, else the usual one, which needs a home."""
    if given := os.environ.get(variable):
        return Path(given)
    usual = ""
    with suppress(RuntimeError):  # platformdirs of today, for a user without HOME and passwd entry
        usual = find_usual("qdraft")
    if not os.path.isabs(usual):  # earlier ones: "~/.cache/qdraft"
        raise OSError(errno.ENOENT, f"your home directory is unknown and {variable} is not set")
    return Path(usual)


def home_dir() -> Path | None:
    """Return the user's home directory; None if the system knows none."""
    home = os.path.expanduser("~")
    return Path(home) if os.path.isabs(home) else None


def is_missing(path: Path | str) -> bool:
    """Tell whether there is nothing at ``path``; False if that cannot be known."""
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return True
    except (OSError, ValueError):
        return False
    return False


def why_closed(path: Path | str) -> str | None:
    """Return why this user cannot read what is at ``path``; None if it is open, or missing."""
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    except OSError as error:
        return error.strerror or str(error)
    return None if os.access(path, os.R_OK) else os.strerror(errno.EACCES)


def is_same_file(first: Path | str, second: Path | str) -> bool:
    """Tell whether two paths lead to one file; False if either leads nowhere.

    Like the tests of ``os.path``, and unlike those of ``pathlib`` before Python 3.14, this never
    fails in a folder that is closed to this user.
    """
    try:
        return os.path.isfile(first) and os.path.samefile(first, second)
    except (OSError, ValueError):
        return False


@contextmanager
def new_file(path: Path, *, overwrite: bool = True) -> Iterator[Path]:
    """Give a temporary file beside ``path`` to write to, and rename it if the block succeeds.

    The content is on disk (fsync) before the rename. A file that it replaces hands down its mode
    and owner, and a link stays a link: the file that it leads to is replaced. If the block fails or
    is interrupted, the temporary file is removed and ``path`` stays as it was. Those of processes
    that were killed are removed too. Raises OSError if ``path`` is something else than a file, for
    example a device, and FileExistsError if it is there at the end although ``overwrite`` is False.
    """
    path = Path(os.path.realpath(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    old = _stat_file(path)
    sweep(path.parent)
    part, handle = _make_part(path)
    try:
        yield part
        with part.open("rb+") as file:
            os.fsync(file.fileno())
        if old is not None:
            _hand_down(old, part)
        if overwrite:
            part.replace(path)
        else:
            _rename_to_new(part, path)
        _sync_folder(path.parent)
    except OSError as error:
        if error.errno in _NO_ROOM and error.filename is None:  # writing does not name the file
            error.filename = str(path)
        raise
    finally:
        part.unlink(missing_ok=True)
        _close(handle)


@contextmanager
def scratch_folder(parent: Path) -> Iterator[Path]:
    """Give a new folder in ``parent``, and remove it with everything in it at the end.

    If this process is killed, a later ``new_file`` or ``scratch_folder`` in ``parent`` removes it.
    """
    sweep(parent)
    folder = parent / f".{secrets.token_hex(4)}{_PART}"
    folder.mkdir()
    handle = _lock(folder)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        _close(handle)


def sweep(folder: Path, *, below: bool = False) -> None:
    """Remove what killed processes have left in ``folder``, and with ``below`` in those in it.

    What a running process writes to stays: it holds a lock.
    """
    for part in folder.glob(f"**/.*{_PART}" if below else f".*{_PART}"):
        handle = _lock(part)
        if handle is None:
            continue
        with suppress(OSError):
            if part.is_dir():
                shutil.rmtree(part)
            else:
                part.unlink()
        _close(handle)


def _make_part(path: Path) -> tuple[Path, int | None]:
    """Create an empty temporary file for ``path``, and lock it; return both."""
    while True:
        # A long name would not leave room for what is added to it.
        part = path.with_name(f".{path.name[:40]}.{secrets.token_hex(4)}{_PART}")
        # An ordinary new file, which the umask limits; asking for the umask would change it for a
        # moment, for all threads.
        os.close(os.open(part, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
        handle = _lock(part, wait=True)
        if part.exists():  # another process may have swept it before it was locked
            return part, handle
        _close(handle)


def _lock(path: Path, *, wait: bool = False) -> int | None:
    """Lock a file or folder as long as the handle is open; None if it cannot be locked."""
    if flock is None:
        return None
    try:
        handle = os.open(path, os.O_RDONLY)
    except OSError:
        return None
    try:
        flock(handle, LOCK_EX if wait else LOCK_EX | LOCK_NB)
    except OSError:  # another process has it, or the file system has no locks
        os.close(handle)
        return None
    return handle


def _close(handle: int | None) -> None:
    if handle is not None:
        os.close(handle)


def _rename_to_new(part: Path, path: Path) -> None:
    """Rename ``part``, unless a file called ``path`` has appeared. Raises FileExistsError."""
    try:
        os.link(part, path)
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links
        if path.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path)) from None
        part.replace(path)


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
