"""The kinds of drafters: what each needs, and whose costs it shows."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DrafterKind:
    """One way of drafting; a new one is a row of ``KINDS`` and one of ``drafters.build``.

    ``source`` names the drafts whose costs a summary shows. ``needs_draft``: it drafts with a
    second model, so that options of a draft model make sense. ``may_run_alone``: without a draft
    model it lets the target run alone, or ``fallback``, another kind, draft in its place.
    ``reads_text``: it drafts repetitions in the text, which a recording of probabilities cannot
    replay.
    """

    source: str
    needs_draft: bool = False
    may_run_alone: bool = False
    fallback: str | None = None
    reads_text: bool = False

    @property
    def requires_draft(self) -> bool:
        """True if a pair without a draft model is an error."""
        return self.needs_draft and not self.may_run_alone


KINDS = {
    "model": DrafterKind("model", needs_draft=True, may_run_alone=True, fallback="ngram"),
    "ngram": DrafterKind("ngram", reads_text=True),
    "hybrid": DrafterKind("model", needs_draft=True, reads_text=True),
}


def only_repeats(source: str | None) -> bool:
    """True if drafts of ``source`` come from nothing but repetitions in the text."""
    return any(k.source == source and k.reads_text and not k.needs_draft for k in KINDS.values())
