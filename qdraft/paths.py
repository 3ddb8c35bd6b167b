"""Where qdraft keeps things on disk, and how a file gets there without ever being half there."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import platformdirs


def cache_dir() -> Path:
    """Built models and probe results: QDRAFT_CACHE_DIR, else the user's cache directory."""
    return Path(os.environ.get("QDRAFT_CACHE_DIR") or platformdirs.user_cache_dir("qdraft"))


def config_dir() -> Path:
    """The user's models.yaml: QDRAFT_CONFIG_DIR, else the user's configuration directory."""
    return Path(os.environ.get("QDRAFT_CONFIG_DIR") or platformdirs.user_config_dir("qdraft"))


@contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """A temporary name beside ``path`` to write to; renamed to it when the block succeeds.

    The content is on disk (fsync) before the rename. When the block fails or is
    interrupted the temporary file is removed and ``path`` is as it was.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
    os.close(handle)
    part = Path(name)
    try:
        yield part
        with part.open("rb+") as written:
            os.fsync(written.fileno())
        part.chmod(0o666 & ~_umask())  # mkstemp keeps files to their owner
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
