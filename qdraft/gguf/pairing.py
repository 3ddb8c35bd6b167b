"""How two files relate: one model in two quantizations, one vocabulary, or nothing in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from qdraft.gguf.facts import Facts
from qdraft.gguf.header import Header, Tensor, read_header
from qdraft.gguf.vocabulary import compare_vocabularies, read_vocabulary

_T = TypeVar("_T")

SAME_MODEL, SAME_VOCABULARY, INCOMPATIBLE = "same-model", "same-vocabulary", "incompatible"

# The largest relative error of a row that quantizing explains, by bits per weight: about twice that
# of real weights, so that a larger error means another model.
_ERROR_BY_BITS = {
    1.9: 1.2,
    2.5: 0.9,
    3.0: 0.7,
    4.0: 0.4,
    5.0: 0.25,
    6.0: 0.12,
    7.0: 0.06,
    9.0: 0.02,
    17.0: 0.005,
    33.0: 0.0005,
}
_N_TENSORS, _N_ROWS = 6, 4
_NORM_ERROR = 1e-2  # vectors stay in F32 or F16, so they hardly change


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing in which two files differ."""

    what: str
    first: str
    second: str


@dataclass(frozen=True, slots=True)
class Pairing:
    """How two files relate: same-model, same-vocabulary or incompatible, and why.

    ``weights_error`` is the largest relative difference of the compared rows, None if the shapes
    already differ.
    """

    relation: str
    differences: tuple[Difference, ...]
    weights_error: float | None = None


def relate(first: Facts, second: Facts) -> Pairing:
    """Compare the metadata and, if it does not differ, a few rows of the weights."""
    vocabulary = _differences(
        first,
        second,
        {
            "vocabulary type": lambda f: f.vocabulary,
        },
    )
    tokens, special_tokens = _token_differences(first, second)
    vocabulary += tokens
    model = _differences(
        first,
        second,
        {
            "kind": lambda f: f.kind,
            "architecture": lambda f: f.architecture,
            "layers": lambda f: str(f.n_layers),
            "embedding width": lambda f: str(f.n_embd),
            "feed-forward width": lambda f: str(f.n_ff),
            "heads": lambda f: str(f.n_head),
            "KV heads": lambda f: str(f.n_head_kv),
            "sliding window": lambda f: str(f.sliding_window),
            "experts": lambda f: f"{f.n_experts_used} of {f.n_experts}",
            "rope base": lambda f: str(f.rope.get("rope.freq_base", 10000.0)),
        },
    )
    # These change how a text is written, not whether the two can pair.
    template = _differences(
        first,
        second,
        {
            "vocabulary size": lambda f: str(f.n_vocab),
            "special tokens": lambda f: _text(f.special),
            "pre-tokenizer": lambda f: f.pre_tokenizer,
            "add BOS": lambda f: str(f.add_bos),
            "add EOS": lambda f: str(bool(f.add_eos)),
            "rope": lambda f: _text({k: x for k, x in f.rope.items() if k != "rope.freq_base"}),
            "chat template": lambda f: f.chat_template[:60],
        },
    )
    template += special_tokens
    runs = not (first.refusal or second.refusal)
    if vocabulary or not runs:
        return Pairing(INCOMPATIBLE, (*vocabulary, *model, *template))
    if model:
        return Pairing(SAME_VOCABULARY, (*model, *template))
    error, tensor = weights_error(first.parts, second.parts)
    if tensor:
        differs = Difference(f"weights of {tensor}", "", f"off by {error:.0%}")
        return Pairing(SAME_VOCABULARY, (differs, *template), error)
    return Pairing(SAME_MODEL, template, error)


def _token_differences(
    first: Facts, second: Facts
) -> tuple[tuple[Difference, ...], tuple[Difference, ...]]:
    """Return the difference of tokens that text is made of, and that of the other tokens."""
    if first.tokens_sha256 == second.tokens_sha256:
        return (), ()
    vocabularies = [read_vocabulary(facts.path) for facts in (first, second)]
    differing = compare_vocabularies(*vocabularies)

    def difference(what: str, token: int) -> tuple[Difference]:
        texts = (v.show(token) if token < len(v.texts) else "" for v in vocabularies)
        return (Difference(what, *texts),)

    if differing.normal is not None:
        return difference(f"token {differing.normal}", differing.normal), ()
    n = len(differing.special)
    if not n:
        return (), ()
    return (), difference(
        f"control token {differing.special[0]}" + (f" and {n - 1} more" if n > 1 else ""),
        differing.special[0],
    )


def weights_error(first: Sequence[Path], second: Sequence[Path]) -> tuple[float | None, str]:
    """Return the largest relative difference of a few rows, and a tensor that differs too much.

    This compares the norms of some layers, which no quantization changes, and rows of some
    matrices, whose types explain a certain error. The name is empty if rounding explains every
    difference; the error is None if no row could be compared. ``first`` and ``second`` are all the
    parts of each model.
    """
    tables = [
        {t.name: (header, t) for header in map(read_header, parts) for t in header.tensors}
        for parts in (first, second)
    ]
    names = [name for name in tables[0] if name in tables[1]]
    dims = {name: len(tables[0][name][1].shape) for name in names}
    vectors = _spread([name for name in names if dims[name] == 1], 4 * _N_TENSORS)
    matrices = _spread([name for name in names if dims[name] == 2], _N_TENSORS)
    worst: float | None = None
    unexplained = ""
    for name in (*vectors, *matrices):
        pair = [table[name][1] for table in tables]
        if pair[0].shape != pair[1].shape:
            return 1.0, name
        rows = [_rows(*table[name]) for table in tables]
        if rows[0] is None or rows[1] is None:
            continue
        size = np.linalg.norm(rows[0]) or 1.0
        error = float(np.linalg.norm(rows[0] - rows[1]) / size)
        explained = (
            sum(_explained_error(t) for t in pair) if len(pair[0].shape) > 1 else _NORM_ERROR
        )
        worst = max(worst or 0.0, error)
        if not error <= explained and not unexplained:
            unexplained = name
    return worst, unexplained


def _rows(header: Header, tensor: Tensor) -> NDArray[np.float32] | None:
    """Return a few rows of a tensor, evenly spread, as floats; None for an unknown type."""
    from gguf import GGMLQuantizationType, dequantize

    if tensor.n_bytes is None:
        return None
    n_rows = tensor.n_elements // tensor.shape[0]
    row_bytes = tensor.n_bytes // max(1, n_rows)
    kind = GGMLQuantizationType[tensor.type]
    rows = []
    with header.path.open("rb") as file:
        for row in _spread(range(n_rows), _N_ROWS):
            file.seek(header.data_start + tensor.offset + row * row_bytes)
            data = np.frombuffer(file.read(row_bytes), dtype=np.uint8)
            plain = {"F32": np.float32, "F16": np.float16}.get(tensor.type)
            try:
                values = data.view(plain) if plain else dequantize(data[None], kind).ravel()
            except NotImplementedError:
                return None
            rows.append(values.astype(np.float32))
    return np.concatenate(rows)


def _explained_error(tensor: Tensor) -> float:
    """Return the relative error of a row that the type of a tensor explains."""
    assert tensor.n_bytes is not None
    bits = 8 * tensor.n_bytes / tensor.n_elements
    return next(error for limit, error in _ERROR_BY_BITS.items() if bits <= limit or limit > 32)


def _spread(items: Sequence[_T], n: int) -> list[_T]:
    """Return at most ``n`` of the items, evenly from the first to the last."""
    if len(items) <= n:
        return list(items)
    return [items[i * (len(items) - 1) // (n - 1)] for i in range(n)]


def _differences(
    first: Facts, second: Facts, of: dict[str, Callable[[Facts], str]]
) -> tuple[Difference, ...]:
    texts = ((what, text(first), text(second)) for what, text in of.items())
    return tuple(Difference(what, a, b) for what, a, b in texts if a != b)


def _text(values: Mapping[str, object]) -> str:
    return ", ".join(f"{key} {value}" for key, value in sorted(values.items()))
