"""Constraints on a text: what asks for one, and what the sampler and the drafters need of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from qdraft.errors import require

KINDS = ("json_schema", "json_object", "grammar", "regex")

# The source of draft tokens that a constraint forces, beside those of drafters.
FORCED = "constraint"


@dataclass(frozen=True, slots=True)
class ConstraintSpec:
    """What a text must match from its first token, or from the end of its reasoning, to its end.

    ``kind`` is "json_schema" (``text`` is the schema), "json_object" (any JSON object; no text),
    "grammar" (``text`` is GBNF, llama.cpp's format, with a rule ``root``) or "regex" (of the whole
    text). ``name`` is what errors call it, for example the option that gave it.
    """

    kind: str
    text: str = ""
    name: str = ""

    def __post_init__(self) -> None:
        require(self.kind in KINDS, "kind", self.kind, f"one of {', '.join(KINDS)}")

    @property
    def called(self) -> str:
        """What errors call the constraint."""
        return self.name or self.kind


class Constraint(Protocol):
    """The tokens that may follow a text.

    All answers depend on the tokens of the text alone: ``context``, which is the prompt and the
    emitted tokens, and ``drafted``, the draft tokens after it. Only emitted tokens move the state.
    """

    def prepare(self, context: Sequence[int], drafted: Sequence[int]) -> None:
        """Work out at once what ``allowed`` says after each of ``drafted`` and before them."""
        ...

    def allowed(
        self, context: Sequence[int], drafted: Sequence[int] = ()
    ) -> NDArray[np.bool_] | None:
        """The tokens that may follow, shape [n_vocab]; None if any may.

        Raises ConstraintError if none may.
        """
        ...

    def forced(self, context: Sequence[int], drafted: Sequence[int] = ()) -> Sequence[int]:
        """The tokens that follow whatever the model says, as many as are certain."""
        ...

    def n_allowed(self, context: Sequence[int], drafted: Sequence[int]) -> int:
        """How many of ``drafted`` may follow ``context``, one after another."""
        ...
