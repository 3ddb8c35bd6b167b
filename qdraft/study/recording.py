"""p and q of a pair along real texts, recorded once, so that drafting can be replayed offline.

At each position of a text the recording keeps the target's and the draft's log-probabilities of
the likeliest tokens, and the mass of the rest. The draft has one set with its own KV cells, and
one on the target's cells when it is 1 to ``BLOCK`` tokens into a draft.

Rows are decoded as a round decodes them, the draft's one by one and the target's a few at a time:
quantized weights round differently in wide batches (a Q4_K_M draft's rows of a batch of 8
differed by 1.8 in the largest logit), which costs acceptance that a round does not lose.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qdraft.decoding.engine import TokenSequence
from qdraft.errors import UsageError
from qdraft.paths import new_file
from qdraft.study.logit_store import log_softmax

Logs = NDArray[np.float16]
CopyCells = Callable[[int], None]
"""Copies the target's KV cells from a position on into the draft."""

BLOCK = 4  # tokens drafted on from the target's cells
SHIFTS = range(BLOCK)  # where blocks start: each position comes at every depth
KEPT = 1024  # tokens of a position
_FEW = 4  # rows of a target decode
_VERSION = 1


@dataclass(frozen=True, slots=True)
class RecordedTokens:
    """A text to record: its tokens, of which the first ``n_prompt`` are the prompt."""

    tokens: Sequence[int]
    n_prompt: int
    kind: str
    temperature: float

    @property
    def first(self) -> int:
        """The index of the token whose row predicts the first token after the prompt."""
        return self.n_prompt - 1

    @property
    def last(self) -> int:
        """The index of the last token, which nothing follows."""
        return len(self.tokens) - 1


@dataclass(frozen=True, slots=True)
class TextRecording:
    """One text: ``n`` positions, the first of which predicts the token after the prompt.

    ``target[i, j]`` is ln p of the j-th kept token at position i, ``own[i, j]`` ln q of it with the
    draft's own cells, ``shared[s, i, j]`` ln q with the target's cells up to ``depth[s, i] - 1``
    tokens before. The last column is the logarithm of the mass of the ``n_rest`` tokens that are
    not kept.
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
    """Texts of one pair. ``about`` describes the pair, the machine and the costs."""

    about: dict[str, Any]
    texts: tuple[TextRecording, ...]

    @property
    def is_synthetic(self) -> bool:
        """Is this the work of ``replay.make_synthetic``, and of no pair?"""
        return "alpha" in self.about

    @property
    def temperatures(self) -> tuple[float, ...]:
        return tuple(sorted({text.temperature for text in self.texts}))


def record(
    target: TokenSequence,
    draft: TokenSequence,
    text: RecordedTokens,
    copy: CopyCells | None = None,
) -> TextRecording:
    """Record both models along a text. ``copy`` None: the pair does not share KV cells.

    Both sequences end empty.
    """
    n_vocab = min(target.vocab.n_tokens, draft.vocab.n_tokens)
    p = _rows(target, text, _FEW)[:, :n_vocab]
    own = _rows(draft, text, 1)[:, :n_vocab]
    shared: list[NDArray[np.float32]] = []
    depth: list[list[int]] = []
    if copy:
        for shift in SHIFTS:
            rows, depths = _rows_on_shared(target, draft, text, copy, shift)
            shared.append(rows[:, :n_vocab])
            depth.append(depths)
    for sequence in (target, draft):
        sequence.truncate(0)
    n_kept = min(KEPT, n_vocab)
    highest = np.maximum.reduce([p, own, *shared])
    ids = np.argpartition(highest, -n_kept, axis=1)[:, -n_kept:]
    return TextRecording(
        kind=text.kind,
        temperature=text.temperature,
        n_prompt=text.n_prompt,
        n_rest=n_vocab - n_kept,
        target=_keep(p, ids),
        own=_keep(own, ids),
        shared=np.stack([_keep(rows, ids) for rows in shared]) if shared else None,
        depth=np.array(depth, np.int8) if shared else None,
    )


def _rows(sequence: TokenSequence, text: RecordedTokens, n_rows: int) -> NDArray[np.float32]:
    """Log-probabilities of what follows each token from ``first`` to the one before ``last``."""
    sequence.truncate(0)
    sequence.eval(text.tokens[: text.first], 0)
    out = []
    for start in range(text.first, text.last, n_rows):
        part = text.tokens[start : min(start + n_rows, text.last)]
        out.append(log_softmax(sequence.eval(part, len(part))))
    return np.concatenate(out)


def _rows_on_shared(
    target: TokenSequence,
    draft: TokenSequence,
    text: RecordedTokens,
    copy: CopyCells,
    shift: int,
) -> tuple[NDArray[np.float32], list[int]]:
    """The draft's rows, drafting on from the target's cells from block to block; and the depths.

    The first block has ``shift`` tokens (0: ``BLOCK``).
    """
    target.truncate(0)
    draft.truncate(0)
    tokens, first, last = text.tokens, text.first, text.last
    out: list[NDArray[np.float32]] = []
    depths: list[int] = []
    n_copied, start = 0, first
    stop = min(first + (shift or BLOCK), last)
    while start < last:
        while target.n_past < start:
            n_rows = _FEW if target.n_past >= first else first
            target.eval(tokens[target.n_past : min(target.n_past + n_rows, start)], 0)
        copy(n_copied)
        n_copied = start
        out += [log_softmax(draft.eval([token], 1)) for token in tokens[start:stop]]
        depths += range(1, stop - start + 1)
        start, stop = stop, min(stop + BLOCK, last)
    return np.concatenate(out), depths


def _keep(rows: NDArray[np.float32], ids: NDArray[np.intp]) -> Logs:
    """The kept columns, and the logarithm of the rest's mass."""
    kept = np.take_along_axis(rows, ids, axis=1).astype(np.float64)
    rest = np.log(np.maximum(1 - np.exp(kept).sum(axis=1), 1e-7))
    return np.concatenate([kept, rest[:, None]], axis=1).astype(np.float16)


def most_bytes(n_positions: int) -> int:
    """Return the size of the recording of so many positions before it is compressed."""
    n_sets = 2 + len(SHIFTS)  # target, own, and one for each shift
    return n_positions * (n_sets * (KEPT + 1) * np.dtype(np.float16).itemsize + len(SHIFTS))


def save(recording: Recording, path: Path) -> None:
    """Write a recording; the file is either complete or does not exist."""
    arrays: dict[str, NDArray[Any]] = {}
    texts = []
    for i, text in enumerate(recording.texts):
        arrays[f"target{i}"], arrays[f"own{i}"] = text.target, text.own
        if text.shared is not None and text.depth is not None:
            arrays[f"shared{i}"], arrays[f"depth{i}"] = text.shared, text.depth
        texts.append([text.kind, text.temperature, text.n_prompt, text.n_rest])
    facts = {"version": _VERSION, "about": recording.about, "texts": texts, "n_arrays": len(arrays)}
    head = json.dumps(facts, default=str)
    # "told" is the key of version 1.
    with new_file(path) as part, part.open("wb") as out:
        np.savez_compressed(out, told=np.array(head), **arrays)  # type: ignore[arg-type]


def load(path: Path) -> Recording:
    """Read a recording. Raises UsageError for another kind of file, or another version."""
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as data:
            head = json.loads(str(data["told"]))
            if head["version"] != _VERSION:
                raise UsageError(
                    f"{path} was recorded by another version of qdraft",
                    hint="record the pair again with qdraft tune --record FILE",
                )
            texts = tuple(_read_text(data, i, facts) for i, facts in enumerate(head["texts"]))
            arrays = [x for t in texts for x in (t.target, t.own, t.shared, t.depth)]
            n_arrays = sum(x is not None for x in arrays)
            # A damaged table of contents hides arrays; earlier versions did not count them.
            if not len(data.files) - 1 == n_arrays == head.get("n_arrays", n_arrays):
                raise ValueError("an array is missing, or belongs to no text")
            return Recording(dict(head["about"]), texts)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}") from error
    except UsageError:
        raise
    except Exception as error:  # the readers of zip and npy fail in a dozen ways on damaged bytes
        raise UsageError(
            f"{path} is not a recording of a pair",
            hint="record one with qdraft tune --record FILE",
        ) from error


def _read_text(data: Any, index: int, facts: Sequence[Any]) -> TextRecording:
    """One text of the archive. Raises ValueError or KeyError if its arrays do not fit together."""
    kind, temperature, n_prompt, n_rest = facts
    text = TextRecording(
        kind=str(kind),
        temperature=float(temperature),
        n_prompt=int(n_prompt),
        n_rest=int(n_rest),
        target=data[f"target{index}"],
        own=data[f"own{index}"],
        shared=data.get(f"shared{index}"),
        depth=data.get(f"depth{index}"),
    )
    shape = text.target.shape
    if len(shape) != 2 or text.own.shape != shape or (text.shared is None) != (text.depth is None):
        raise ValueError("the rows of a text do not fit together")
    if text.shared is not None and text.depth is not None:
        n_shifts = len(text.shared)
        if text.shared.shape != (n_shifts, *shape) or text.depth.shape != (n_shifts, shape[0]):
            raise ValueError("the shared rows of a text do not fit its own")
    return text
