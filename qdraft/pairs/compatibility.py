"""A check, by their headers, that two files can be target and draft of a pair."""

from __future__ import annotations

from pathlib import Path

from qdraft.errors import PairError
from qdraft.gguf.facts import require_model
from qdraft.gguf.pairing import INCOMPATIBLE, relate


def require_pair(target: Path, draft: Path | None) -> None:
    """Raise PairError if the two files do not pair.

    Raises ModelFileError if a file is damaged, missing or not a language model.
    """
    facts = [require_model(path) for path in (target, draft) if path]
    if len(facts) < 2:
        return
    pairing = relate(*facts)
    if pairing.relation == INCOMPATIBLE:
        first = pairing.differences[0]
        raise PairError(
            f"these files do not pair: {first.what} is {first.first} in the target and "
            f"{first.second} in the draft",
            hint="list all differences with qdraft inspect",
        )
