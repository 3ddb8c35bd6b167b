"""What a comparison measures of one file, typed, and its JSON form.

A child job returns this JSON, the cache keeps it, and ``qdraft compare --json`` prints it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from qdraft.decoding.intervals import Mean, Ratio
from qdraft.study.perplexity import Divergence, Perplexity

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class AsDraft:
    """A rung as a draft of the reference at one temperature.

    ``alpha_own`` is its acceptance rate with its own KV cells, ``alpha_shared`` the one with the
    target's (None if the pair cannot share them). ``n_draft`` and ``predicted`` are the draft
    length that the cost model prefers and its speed-up; ``measured`` and ``alpha_live`` are what a
    short bench gave.
    """

    temperature: float
    alpha_own: Mean
    alpha_shared: Mean | None
    n_draft: int
    predicted: float
    measured: Ratio | None
    alpha_live: float | None

    @property
    def alpha(self) -> Mean:
        """The acceptance rate as the pair runs: with shared cells if it can share them."""
        return self.alpha_shared or self.alpha_own

    @classmethod
    def of_json(cls, data: Json) -> AsDraft:
        shared, measured = data["alpha_shared"], data["measured"]
        return cls(
            **{
                **data,
                "alpha_own": Mean(**data["alpha_own"]),
                "alpha_shared": Mean(**shared) if shared else None,
                "measured": Ratio(**measured) if measured else None,
            }
        )


@dataclass(frozen=True, slots=True)
class ReferenceResult:
    """The reference alone: perplexity, prompt tokens per second, and bytes of memory.

    ``memory`` is None if the system does not report it. ``measured`` describes the machine and the
    day.
    """

    quality: Perplexity
    prompt_per_second: float
    memory: int | None
    measured: Json

    def as_json(self) -> Json:
        return asdict(self)

    @classmethod
    def of_json(cls, data: Json) -> ReferenceResult:
        return cls(**{**data, "quality": Perplexity(**_with_means(data["quality"]))})


@dataclass(frozen=True, slots=True)
class RungResult:
    """One rung: how far it is from the reference, its speed alone, and its worth as a draft.

    ``per_second`` and ``target_per_second`` are tokens per second of the rung and of the reference
    alone. ``c`` and ``v`` (by number of rows) are in reference tokens. ``no_sharing`` says why the
    KV cells are not shared. ``as_draft`` has one record for each temperature, in their order.
    """

    quality: Divergence
    prompt_per_second: float
    per_second: float
    memory: int | None
    c: float
    v: Mapping[int, float]
    target_per_second: float
    shares_kv: bool
    no_sharing: str
    as_draft: tuple[AsDraft, ...]
    doubts: tuple[str, ...]
    measured: Json

    @property
    def speedup_alone(self) -> float:
        """Speed of the rung alone over that of the reference alone."""
        return self.per_second / self.target_per_second

    def as_json(self) -> Json:
        return {**asdict(self), "v": {str(n): x for n, x in self.v.items()}}

    @classmethod
    def of_json(cls, data: Json) -> RungResult:
        return cls(
            **{
                **data,
                "quality": Divergence(**_with_means(data["quality"])),
                "v": {int(n): x for n, x in data["v"].items()},
                "as_draft": tuple(map(AsDraft.of_json, data["as_draft"])),
                "doubts": tuple(data["doubts"]),
            }
        )


def _with_means(data: Json) -> Json:
    """Fields of a record, with the means among them made ``Mean`` again."""
    return {name: Mean(**x) if isinstance(x, dict) else x for name, x in data.items()}
