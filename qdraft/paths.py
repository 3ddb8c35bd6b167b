"""The directories that qdraft writes to, and files that are there complete or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import platformdirs


def cache_dir() -> Path:
    """Return the directory of built models and stored results.

    That is QDRAFT_CACHE_DIR, else the user's cache directory.
    """
    return Path(os.environ.get("QDRAFT_CACHE_DIR") or platformdirs.user_cache_dir("qdraft"))


def config_dir() -> Path:
    """Return the directory of the user's models.yaml.

    That is QDRAFT_CONFIG_DIR, else the user's configuration directory.
    """
    return Path(os.environ.get("QDRAFT_CONFIG_DIR") or platformdirs.user_config_dir("qdraft"))


@contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """Give a temporary file beside ``path`` to write to, and rename it if the block succeeds.

    The content is on disk (fsync) before the rename. If the block fails or is interrupted, the
    temporary file is removed and ``path`` stays as it was.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
    os.close(handle)
    part = Path(name)
    try:
        yield part
        with part.open("rb+") as file:
            os.fsync(file.fileno())
        part.chmod(0o666 & ~_umask())  # mkstemp lets only the owner read the file
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
