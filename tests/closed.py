"""A folder that is closed to this user, who may be root."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import pytest


def close_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the system refuse to list a folder, and to follow paths through it."""
    real: dict[str, Any] = {
        name: getattr(os, name) for name in ("stat", "lstat", "access", "listdir", "scandir")
    }

    def guard(name: str, path: Any, *args: Any, **more: Any) -> Any:
        if isinstance(path, (str, os.PathLike)):
            through = _follow(str(path), real["lstat"])
            is_inside = through.startswith(f"{folder}{os.sep}")
            if name == "access" and (is_inside or through == str(folder)):
                return False
            if is_inside or (through == str(folder) and name in ("listdir", "scandir")):
                raise PermissionError(13, "Permission denied", str(path))
        return real[name](path, *args, **more)

    for name in real:
        monkeypatch.setattr(os, name, functools.partial(guard, name))


def _follow(path: str, lstat: Any) -> str:
    """Return where a link leads; the path itself if it is none."""
    try:
        return os.readlink(path)
    except OSError:
        return path
