"""How a file recommends to sample: its keys ``general.sampling.*``, read as llama.cpp does."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from qdraft.decoding.records import SamplingParams
from qdraft.errors import ParameterError
from qdraft.gguf.header import Value

_KEY = "general.sampling."
# The parameter of each key, and whether it is a whole number.
_PARAMETERS = {
    "temp": ("temperature", False),
    "top_k": ("top_k", True),
    "top_p": ("top_p", False),
    "min_p": ("min_p", False),
    "penalty_last_n": ("repeat_last_n", True),
    "penalty_repeat": ("repeat_penalty", False),
    "xtc_probability": ("xtc_probability", False),
    "xtc_threshold": ("xtc_threshold", False),
}
# Values out of their range that mean what the end of the range means: off, or greedy.
_OFF_BELOW_ZERO = ("temperature", "top_k", "min_p", "xtc_probability")
_OFF_ABOVE_ONE = ("top_p", "xtc_probability", "xtc_threshold")
# llama.cpp's default order, and what switches off the ones that qdraft has.
_CHAIN: dict[str, dict[str, float]] = {
    "penalties": {"repeat_penalty": 1.0},
    "dry": {},
    "top_n_sigma": {},
    "top_k": {"top_k": 0},
    "typ_p": {"typical_p": 1.0},
    "top_p": {"top_p": 1.0},
    "min_p": {"min_p": 0.0},
    "xtc": {"xtc_probability": 0.0},
    "temperature": {"temperature": 1.0},
}
_ALIASES = {"nucleus": "top_p", "temp": "temperature", "typ": "typ_p"}
_NUMBER = re.compile(r"\s*[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Recommended:
    """What a file recommends: ``values`` by the names of ``SamplingParams``.

    ``ignored`` says in words what it recommends and qdraft cannot follow.
    """

    values: Mapping[str, float] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()

    def params(self) -> SamplingParams:
        """Return the defaults with the recommended values in their place."""
        return apply(SamplingParams(), self.values)

    def used_in(self, sampling: SamplingParams) -> dict[str, float]:
        """Return the recommended values that ``sampling`` has."""
        return {k: value for k, value in self.values.items() if getattr(sampling, k) == value}


def apply(sampling: SamplingParams, values: Mapping[str, float]) -> SamplingParams:
    """Return ``sampling`` with other values, by the names of its fields."""
    changes: dict[str, object] = dict(values)
    return replace(sampling, **changes)  # type: ignore[arg-type]


def describe(values: Mapping[str, float]) -> str:
    """Say recommended values in the words of options, for example "temp 0.6, top-k 20"."""
    words = ((k.removesuffix("erature").replace("_", "-"), value) for k, value in values.items())
    return ", ".join(f"{name} {value:g}" for name, value in words)


def read_recommended(metadata: Mapping[str, Value]) -> Recommended:
    """Read what the metadata of a file recommend; never fails."""
    numbers = {
        key.removeprefix(_KEY): number
        for key, value in metadata.items()
        if key.startswith(_KEY) and (number := _as_number(value)) is not None
    }
    values, ignored = _values_of(numbers)
    if int(numbers.get("mirostat", 0)) in (1, 2):
        ignored.append(f"mirostat {numbers['mirostat']:g}")
    sequence = metadata.get(f"{_KEY}sequence")
    if isinstance(sequence, str) and sequence:
        switched_off = _left_out_of(sequence)
        if switched_off is None:
            ignored.append(f"the order {sequence[:80]}")
        else:
            values |= switched_off
    return Recommended(values, tuple(ignored))


def _values_of(numbers: Mapping[str, float]) -> tuple[dict[str, float], list[str]]:
    """Return the values that qdraft can follow, and those that it cannot, in words."""
    values: dict[str, float] = {}
    ignored = []
    for key, (name, is_whole) in _PARAMETERS.items():
        if key not in numbers:
            continue
        value = min(int(numbers[key]), 2**31 - 1) if is_whole else numbers[key]
        if name in _OFF_BELOW_ZERO:
            value = max(0, value)
        if name in _OFF_ABOVE_ONE:
            value = min(1.0, value)
        try:
            apply(SamplingParams(), {name: value})
        except ParameterError:
            ignored.append(f"{key.replace('_', '-')} {value:g}")
        else:
            values[name] = value
    return values, ignored


def _left_out_of(sequence: str) -> dict[str, float] | None:
    """Return what switches off the samplers that are not in a sequence such as top_k;temperature.

    None if the samplers come in another order than qdraft's, or if qdraft lacks one of them.
    """
    others = {"infill", "adaptive_p"}
    known = {name.replace("_", ""): name for name in (*_CHAIN, *others)} | _ALIASES
    words = [word.lower() for word in sequence.split(";")]
    names = [known[key] for word in words if (key := re.sub("[-_]", "", word)) in known]
    if others & set(names) or names != [name for name in _CHAIN if name in names]:
        return None
    off: dict[str, float] = {}
    for name, values in _CHAIN.items():
        off |= {} if name in names else values
    return off


def _as_number(value: Value) -> float | None:
    """Return what llama.cpp reads from the text of a value, which has six decimals at most."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    match = _NUMBER.match(value if isinstance(value, str) else f"{value:f}")
    return float(match[0]) if match else None
