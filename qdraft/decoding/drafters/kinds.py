"""The kinds of drafters: what each needs, and whose costs it shows."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DrafterKind:
    """One way of drafting; a new one is a row of ``KINDS`` and a line of ``drafters.build``.

    ``source`` names the drafts whose costs a summary shows. ``needs_draft``: drafts with a second
    model, so that options of a draft file make sense. ``needs_features``: drafts from the hidden
    states of the target's verified rows (``Verified.features``). ``may_run_alone``: without a
    draft file the target runs alone, where other kinds that need one are refused.
    ``only_repeats``: drafts nothing in a text that does not repeat itself.
    """

    source: str
    help: str
    needs_draft: bool = False
    needs_features: bool = False
    may_run_alone: bool = False
    only_repeats: bool = False


KINDS = {
    "model": DrafterKind("model", "the draft model", needs_draft=True, may_run_alone=True),
    "ngram": DrafterKind("ngram", "repetitions in the text", only_repeats=True),
    "hybrid": DrafterKind("model", "repetitions if they pay, else the model", needs_draft=True),
}


def only_repeats(source: str | None) -> bool:
    """True if drafts of ``source`` come from nothing but repetitions in the text."""
    return any(kind.source == source and kind.only_repeats for kind in KINDS.values())
