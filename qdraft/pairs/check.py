"""The check that two files can be target and draft, by their headers, before a pair names them."""

from __future__ import annotations

from pathlib import Path

from qdraft.errors import PairError
from qdraft.gguf.facts import read_facts
from qdraft.gguf.pairing import INCOMPATIBLE, compare


def require_pair(target: Path, draft: Path | None) -> None:
    """Raise PairError if a file is not a language model, or if the two do not belong together.

    Raises ModelFileError as ``read_facts`` does.
    """
    facts = [read_facts(path) for path in (target, draft) if path]
    for each in facts:
        if each.kind != "model":
            raise PairError(f"{each.path} is not a language model but a {each.kind}")
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
