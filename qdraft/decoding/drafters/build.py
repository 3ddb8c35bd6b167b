"""Builds a drafter of a kind."""

from __future__ import annotations

from collections.abc import Callable

from qdraft.decoding.drafters.hybrid import HybridDrafter
from qdraft.decoding.drafters.kinds import KINDS
from qdraft.decoding.drafters.model import ModelDrafter
from qdraft.decoding.drafters.ngram import NgramDrafter
from qdraft.decoding.drafters.protocol import Drafter, NoDrafter
from qdraft.errors import UsageError

_ALONE: dict[str, Callable[[], Drafter]] = {"ngram": NgramDrafter}
_WITH_MODEL: dict[str, Callable[[ModelDrafter], Drafter]] = {
    "model": lambda model: model,
    "hybrid": lambda model: HybridDrafter(NgramDrafter(), model),
}


def build_drafter(kind: str, model: ModelDrafter | None) -> Drafter:
    """Build a drafter of a kind of ``KINDS``; ``model`` is None if the pair has no draft.

    Raises UsageError if the kind requires a draft.
    """
    if not KINDS[kind].needs_draft:
        return _ALONE[kind]()
    if model is not None:
        return _WITH_MODEL[kind](model)
    if KINDS[kind].requires_draft:
        raise UsageError(f"the {kind} drafter needs a draft model in addition to the target")
    return NoDrafter()
