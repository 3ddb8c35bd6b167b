"""The reference's log-probabilities on disk: two bytes each, read back block by block.

The format follows llama.cpp's perplexity tool: a row is cut 16 below its largest logit, and the
rest is divided into 65535 steps, so a log-probability is off by at most 1.3e-4.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from qdraft.errors import UsageError

Rows = NDArray[np.float32]

_ROW_BYTES = 8  # of a row besides its entries: scale and lowest
DEPTH = 16.0  # how far below the largest logit a row is kept
_STEPS = 65535
_MAGIC = b"qdraft logits 1\n"


def row_bytes(n_vocab: int) -> int:
    """Return the size of one row in a file."""
    return _ROW_BYTES + 2 * n_vocab


class LogitsWriter:
    """Writes blocks of rows one after the other; ``close`` makes the file whole."""

    def __init__(self, out: BinaryIO, about: dict[str, Any]) -> None:
        """``about`` describes the rows; ``read_about`` returns it."""
        self._out = out
        self._blocks: list[tuple[int, int]] = []  # rows, and a checksum
        self._about = about
        out.write(_MAGIC)

    def write(self, logits: Rows) -> None:
        """Write one block of rows of logits, shape [n, n_vocab]."""
        scale, low, steps = pack(logits)
        data = scale.tobytes() + low.tobytes() + steps.tobytes()
        self._out.write(data)
        self._blocks.append((len(logits), zlib.crc32(data)))

    def close(self) -> None:
        """Write the list of blocks, without which the file cannot be read."""
        end = json.dumps({"about": self._about, "blocks": self._blocks}).encode()
        self._out.write(end)
        self._out.write(len(end).to_bytes(8, "little"))


def read_about(path: Path) -> dict[str, Any]:
    """The description of the rows in a complete file. Raises UsageError for any other file."""
    about: dict[str, Any] = _read_end(path)["about"]
    return about


def read_blocks(path: Path, n_vocab: int) -> Iterator[Rows]:
    """Log-probabilities block by block, float32, shape [n, n_vocab].

    Raises UsageError for a damaged file, at the damaged block at the latest.
    """
    blocks = _read_end(path)["blocks"]
    with path.open("rb") as file:
        file.seek(len(_MAGIC))
        for n, checksum in blocks:
            size = n * row_bytes(n_vocab)
            data = file.read(size)
            if len(data) != size or zlib.crc32(data) != checksum:
                raise UsageError(f"{path} is damaged", hint="remove it; qdraft writes it again")
            scale = np.frombuffer(data, np.float32, n)
            low = np.frombuffer(data, np.float32, n, 4 * n)
            steps = np.frombuffer(data, np.uint16, n * n_vocab, 8 * n).reshape(n, n_vocab)
            yield unpack(scale, low, steps)


def _read_end(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            if file.read(len(_MAGIC)) != _MAGIC:
                raise ValueError("another kind of file")
            file.seek(-8, 2)
            n = int.from_bytes(file.read(8), "little")
            file.seek(-8 - n, 2)
            end = json.loads(file.read(n))
            if not isinstance(end, dict) or not {"about", "blocks"} <= end.keys():
                raise ValueError("another end")
            return end
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{path} holds no logits", hint="remove it; qdraft writes it again"
        ) from error


def pack(logits: Rows) -> tuple[Rows, Rows, NDArray[np.uint16]]:
    """Step size and lowest log-probability of each row, and each entry's steps above the lowest."""
    top = logits.max(axis=1, keepdims=True)
    low = np.maximum(logits.min(axis=1, keepdims=True), top - DEPTH)
    total = np.log(np.exp(logits - top, dtype=np.float32).sum(axis=1, keepdims=True, dtype=float))
    scale = np.maximum((top - low) / _STEPS, np.finfo(np.float32).tiny)
    steps = np.rint((np.maximum(logits, low) - low) / scale).astype(np.uint16)
    return (
        scale[:, 0].astype(np.float32),
        (low - top - total)[:, 0].astype(np.float32),
        steps,
    )


def unpack(scale: Rows, low: Rows, steps: NDArray[np.uint16]) -> Rows:
    """Log-probabilities from what ``pack`` returns, float32, shape [n, n_vocab]."""
    rows: Rows = steps.astype(np.float32)
    rows *= scale[:, None]
    rows += low[:, None]
    return rows


def log_softmax(logits: Rows) -> Rows:
    """Log-probabilities of rows of logits, float32 with float64 sums."""
    top = logits.max(axis=1, keepdims=True)
    shifted: Rows = logits - top
    total = np.log(np.exp(shifted).sum(axis=1, keepdims=True, dtype=float))
    shifted -= total.astype(np.float32)
    return shifted
