"""A check, by their headers, that two files can be target and draft of a pair."""

from __future__ import annotations

from pathlib import Path

from qdraft.errors import PairError
from qdraft.gguf.facts import KINDS, read_facts
from qdraft.gguf.pairing import INCOMPATIBLE, compare


def require_pair(target: Path, draft: Path | None) -> None:
    """Raise PairError if a file is not a language model, or if the two files do not pair.

    Raises ModelFileError if a file is damaged or missing.
    """
    facts = [read_facts(path) for path in (target, draft) if path]
    for each in facts:
        if each.kind != "model":
            raise PairError(f"{each.path} is {KINDS[each.kind]}, not a language model")
    if len(facts) < 2:
        return
    pairing = compare(*facts)
    if pairing.relation == INCOMPATIBLE:
        first = pairing.differences[0]
        raise PairError(
            f"these files do not pair: {first.what} is {first.first} in the target and "
            f"{first.second} in the draft",
            hint="list all differences with qdraft inspect",
        )
