"""Weights that stay in memory although their file does not fit: pages that are mapped and locked.

llama.cpp maps the file too, and the two mappings share their pages. Without this, a file that is
read in a circle pushes out each page shortly before it is needed again.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

_BLOCK = 16 * 2**20  # bytes to lock in one call, during which Ctrl-C waits


@dataclass(frozen=True, slots=True)
class Stretch:
    """Neighbouring bytes of a file."""

    path: Path
    start: int
    n_bytes: int


class HeldPages:
    """Locks as much of some stretches as it is told to, from the first one on.

    ``size`` is the bytes of all stretches, and ``n_bytes`` what is locked now. ``refusal`` is the
    system's reason if it has refused to lock more, else empty.
    """

    def __init__(self, stretches: Sequence[Stretch]) -> None:
        """``stretches`` are in the order in which they are to be held."""
        self._blocks = list(_split(stretches))
        self.size = sum(block.n_bytes for block in self._blocks)
        self._n_locked = 0  # blocks, from the first one on
        self._maps: dict[Path, _Map] = {}
        self.n_bytes = 0
        self.refusal = ""

    def hold(self, n_bytes: int) -> None:
        """Lock or unlock blocks until at most ``n_bytes`` are locked."""
        while self._n_locked and self.n_bytes > n_bytes:
            self._n_locked -= 1
            block = self._blocks[self._n_locked]
            self._map(block.path).unlock(block)
            self.n_bytes -= block.n_bytes
        while not self.refusal and self._n_locked < len(self._blocks):
            block = self._blocks[self._n_locked]
            if self.n_bytes + block.n_bytes > n_bytes:
                return
            try:
                self._map(block.path).lock(block)
            except OSError as error:
                self.refusal = error.strerror or str(error)
                return
            self._n_locked += 1
            self.n_bytes += block.n_bytes

    def close(self) -> None:
        """Unlock everything; harmless when repeated."""
        self.hold(0)
        for each in self._maps.values():
            each.close()
        self._maps.clear()

    def _map(self, path: Path) -> _Map:
        if path not in self._maps:
            self._maps[path] = _Map(path)
        return self._maps[path]


def can_hold() -> bool:
    """Tell whether this system has mlock."""
    return os.name == "posix"


class _Map:
    """A mapping of a whole file, whose pages can be locked."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._bytes = np.frombuffer(self._map, dtype=np.uint8)
        self._libc = ctypes.CDLL(None, use_errno=True)

    def lock(self, stretch: Stretch) -> None:
        """Read a stretch and lock it. Raises OSError if the system refuses."""
        self._call("mlock", stretch)

    def unlock(self, stretch: Stretch) -> None:
        self._call("munlock", stretch)

    def _call(self, name: str, stretch: Stretch) -> None:
        address = ctypes.c_void_p(self._bytes.ctypes.data + stretch.start)
        if getattr(self._libc, name)(address, ctypes.c_size_t(stretch.n_bytes)):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))

    def close(self) -> None:
        del self._bytes
        self._map.close()


def _split(stretches: Sequence[Stretch]) -> Iterator[Stretch]:
    """Give blocks of whole pages, without those that two stretches share."""
    page = mmap.PAGESIZE
    for stretch in stretches:
        start = -(-stretch.start // page) * page
        end = (stretch.start + stretch.n_bytes) // page * page
        for at in range(start, end, _BLOCK):
            yield Stretch(stretch.path, at, min(_BLOCK, end - at))
