"""p and q of a pair along real texts, recorded once, so that drafting can be replayed offline.

At every place of a text the target's and the draft's log-probabilities of the likeliest tokens
are kept, and the mass of the rest. The draft's are those that it has with its own KV cells, and
those on the target's cells when it is 1 to ``BLOCK`` tokens into a draft.

Rows are decoded as a round decodes them, the draft's one by one and the target's a few at a time:
quantized weights give other roundings in wide batches (a Q4_K_M draft's rows of a batch of 8
differed by 1.8 in the largest logit), which costs acceptance that no round loses.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from qdraft.decoding.engine import TokenSequence
from qdraft.errors import UsageError
from qdraft.paths import new_file
from qdraft.study.logit_store import log_softmax

Logs = NDArray[np.float16]

BLOCK = 4  # tokens drafted on from the target's cells
SHIFTS = range(BLOCK)  # where blocks start: each place is seen at every depth
KEPT = 1024  # tokens of a place
_FEW = 4  # rows of a target decode
_VERSION = 1


@dataclass(frozen=True, slots=True)
class TextRecording:
    """One text: ``n`` places, the first of which predicts the token after the prompt.

    ``target[i, j]`` is ln p of the j-th kept token at place i, ``own[i, j]`` ln q of it with the
    draft's own cells, ``shared[s, i, j]`` with the target's cells up to ``depth[s, i] - 1`` tokens
    before. The last column is the logarithm of the mass of the ``n_rest`` tokens that are not
    kept.
    """

    kind: str
    temperature: float
    n_prompt: int
    n_rest: int
    target: Logs
    own: Logs
    shared: Logs | None
    depth: NDArray[np.int8] | None

    @property
    def n(self) -> int:
        return len(self.target)


@dataclass(frozen=True, slots=True)
class Recording:
    """Texts of one pair, and what is known of the pair and its costs."""

    about: dict[str, Any]
    texts: tuple[TextRecording, ...]

    @property
    def temperatures(self) -> tuple[float, ...]:
        return tuple(sorted({text.temperature for text in self.texts}))


def record(
    target: TokenSequence,
    draft: TokenSequence,
    tokens: Sequence[int],
    n_prompt: int,
    *,
    kind: str,
    temperature: float,
    copy: Callable[[int], None] | None,
) -> TextRecording:
    """Record a text of ``tokens``, of which the first ``n_prompt`` are the prompt.

    ``copy`` is the courier's, None where cells are not shared. Both caches are empty afterwards.
    """
    first, last = n_prompt - 1, len(tokens) - 1
    n_vocab = min(target.vocab.n_tokens, draft.vocab.n_tokens)
    p = _rows(target, tokens, first, last, _FEW)[:, :n_vocab]
    own = _rows(draft, tokens, first, last, 1)[:, :n_vocab]
    shared: list[NDArray[np.float32]] = []
    depth: list[list[int]] = []
    if copy:
        for shift in SHIFTS:
            target.truncate(0)
            draft.truncate(0)
            rows, depths = _on_shared(target, draft, tokens, first, last, copy, shift)
            shared.append(rows[:, :n_vocab])
            depth.append(depths)
    for engine in (target, draft):
        engine.truncate(0)
    n_kept = min(KEPT, n_vocab)
    likeliest = np.maximum.reduce([p, own, *shared])
    ids = np.argpartition(likeliest, -n_kept, axis=1)[:, -n_kept:]
    return TextRecording(
        kind, temperature, n_prompt, n_vocab - n_kept, _kept(p, ids), _kept(own, ids),
        np.stack([_kept(rows, ids) for rows in shared]) if shared else None,
        np.array(depth, np.int8) if shared else None,
    )  # fmt: skip


def _rows(
    engine: TokenSequence, tokens: Sequence[int], first: int, last: int, n_rows: int
) -> NDArray[np.float32]:
    """Log-probabilities of what follows tokens[first] to tokens[last - 1]."""
    engine.truncate(0)
    engine.eval(tokens[:first], 0)
    out = []
    for start in range(first, last, n_rows):
        part = tokens[start : min(start + n_rows, last)]
        out.append(log_softmax(engine.eval(part, len(part))))
    return np.concatenate(out)


def _on_shared(
    target: TokenSequence,
    draft: TokenSequence,
    tokens: Sequence[int],
    first: int,
    last: int,
    copy: Callable[[int], None],
    shift: int,
) -> tuple[NDArray[np.float32], list[int]]:
    """The draft's rows, drafting on from the target's cells from block to block; and the depths."""
    out: list[NDArray[np.float32]] = []
    depths: list[int] = []
    n_copied, start = 0, first
    stop = min(first + shift, last) if shift else min(first + BLOCK, last)
    while start < last:
        while target.n_past < start:
            few = _FEW if target.n_past >= first else first
            target.eval(tokens[target.n_past : min(target.n_past + few, start)], 0)
        copy(n_copied)
        n_copied = start
        out += [log_softmax(draft.eval([token], 1)) for token in tokens[start:stop]]
        depths += range(1, stop - start + 1)
        start, stop = stop, min(stop + BLOCK, last)
    return np.concatenate(out), depths


def _kept(rows: NDArray[np.float32], ids: NDArray[np.intp]) -> Logs:
    """The kept columns, and the logarithm of the rest's mass."""
    kept = np.take_along_axis(rows, ids, axis=1).astype(np.float64)
    rest = np.log(np.maximum(1 - np.exp(kept).sum(axis=1), 1e-7))
    return np.concatenate([kept, rest[:, None]], axis=1).astype(np.float16)


def save(recording: Recording, path: Path) -> None:
    """Write a recording; the file is whole or not there."""
    arrays: dict[str, NDArray[Any]] = {}
    texts = []
    for i, text in enumerate(recording.texts):
        arrays[f"target{i}"], arrays[f"own{i}"] = text.target, text.own
        if text.shared is not None and text.depth is not None:
            arrays[f"shared{i}"], arrays[f"depth{i}"] = text.shared, text.depth
        texts.append([text.kind, text.temperature, text.n_prompt, text.n_rest])
    told = json.dumps({"version": _VERSION, "about": recording.about, "texts": texts}, default=str)
    with new_file(path) as part, part.open("wb") as out:
        np.savez_compressed(out, told=np.array(told), **arrays)  # type: ignore[arg-type]


def load(path: Path) -> Recording:
    """Read a recording. Raises UsageError for a file that is none, or of another version."""
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as data:
            told = json.loads(str(data["told"]))
            if told["version"] != _VERSION:
                raise UsageError(f"{path} was recorded by another version: record it again")
            texts = tuple(
                TextRecording(
                    kind, temperature, n_prompt, n_rest, data[f"target{i}"], data[f"own{i}"],
                    data.get(f"shared{i}"),
                    data.get(f"depth{i}"),
                )
                for i, (kind, temperature, n_prompt, n_rest) in enumerate(told["texts"])
            )  # fmt: skip
            return Recording(told["about"], texts)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}") from error
    except (
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        EOFError,
        BadZipFile,
        zlib.error,
    ) as error:
        raise UsageError(
            f"{path} is no record of a pair", hint="qdraft tune --record FILE writes one"
        ) from error
