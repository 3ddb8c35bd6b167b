"""The summary of a run, for people."""

from __future__ import annotations

import textwrap

from rich.console import Group, RenderableType
from rich.text import Text

from qdraft.decoding.records import FinishReason
from qdraft.decoding.summary import CIRCLES, NOISY, Summary
from qdraft.session.bit_identity import BitIdentity
from qdraft.session.check import Check

_BAR = 24
_ENDS = {
    FinishReason.END_OF_GENERATION: "end of text",
    FinishReason.STOP_STRING: "stop string",
    FinishReason.LENGTH: "length reached",
    FinishReason.CONTEXT_FULL: "context full",
    FinishReason.INTERRUPTED: "interrupted",
    FinishReason.ERROR: "ended by an error",
}


def summary_view(
    summary: Summary,
    reason: FinishReason,
    seed: int | None,
    bit_identity: BitIdentity | None = None,
) -> RenderableType:
    """A few lines that stay below 80 columns; ``seed`` None where nothing was drawn."""
    lines = [
        line(
            "text",
            f"{summary.n_tokens} tokens, {_ENDS[reason]}",
            f"prompt {summary.n_prompt} tokens",
            "" if seed is None else f"seed {seed}",
        ),
        line(
            "speed",
            _figure(summary.tokens_per_second, ".1f", " t/s"),
            f"first token after {_figure(summary.ttft_s, '.2f', ' s')}",
        ),
    ]
    if summary.n_drafted:
        lines += [
            line(
                "draft",
                f"alpha {_figure(summary.alpha, '.3f')}",
                f"draft yield {_figure(summary.draft_yield, '.3f')}",
                f"tau {_figure(summary.tau, '.2f')}",
                f"{sum(summary.accepted_histogram)} of {summary.n_rounds} rounds",
            ),
            *_histogram(summary.accepted_histogram),
        ]
    if len(summary.sources) > 1:
        parts = (f"{s} {n['n_accepted']} of {n['n_tested']}" for s, n in summary.sources.items())
        lines.append(line("sources", *parts))
    lines.append(
        line(
            "time",
            f"draft {summary.draft_s:.2f} s",
            f"verify {summary.verify_s:.2f} s",
            f"other {summary.other_s:.2f} s",
        )
    )
    if summary.n_dropped:
        lines.append(line("dropped", f"{summary.n_dropped} drafts with bad logits"))
    if bit_identity:
        lines += wrapped("exact", _exact(bit_identity))
    if summary.verdict:
        lines += wrapped("verdict", summary.verdict)
    if doubts := _doubts(summary):
        lines += wrapped("doubt", "; ".join(doubts))
    return Group(*lines)


def _doubts(summary: Summary) -> list[str]:
    """What makes the figures say less than they seem to."""
    doubts = []
    if summary.spread and summary.spread > NOISY:
        doubts.append(
            f"the slowest tenth of the target's decodes took {summary.spread:.1f} times their "
            "median: something else uses this machine, times are uncertain"
        )
    if summary.repetition and summary.repetition > CIRCLES:
        doubts.append(
            f"{summary.repetition:.0%} of this text repeats itself, which flatters any draft"
        )
    return doubts


def _exact(found: BitIdentity) -> str:
    """One sentence: how long drafts may be under --exact, and why not longer."""
    if found.depth is None or found.difference is None:
        return f"drafts of up to {found.n_draft} tokens equal one-token decoding, bit for bit"
    where = f"differ by {found.difference:.2g} after {found.depth} tokens of text"
    if found.n_draft:
        return f"drafts of up to {found.n_draft} tokens: rows of longer ones {where}"
    remedy = "; one thread (-t 1) or a q8_0 cache (-ctk, -ctv) may help" if found.depth > 24 else ""
    return f"the target runs alone: rows of any draft {where}{remedy}"


def check_view(check: Check, *, greedy: bool) -> RenderableType:
    """One line: same, or where the text forks from the target alone and why that may be."""
    noise = "" if check.noise is None else f"measured noise {check.noise:.2g}"
    if check.same:
        what = "same as the target alone" if greedy else "every token is in the target's support"
        return line("check", what, noise)
    cause = "numerics explain it" if check.explained else "numerics do not explain it: a bug"
    return line(
        "check", f"forked at token {check.fork}", f"margin {check.margin:.2g}", noise, cause
    )


def line(label: str, *parts: str) -> Text:
    """One line: a label, and the parts that are not empty."""
    text = Text(f"{label:<8} ", style="label")
    return text.append(", ".join(p for p in parts if p), style="default not dim")


def wrapped(label: str, sentence: str) -> list[Text]:
    """A sentence on lines of at most 79 columns."""
    first, *rest = textwrap.wrap(sentence, 79 - 9) or [""]
    return [line(label, first), *(line("", more) for more in rest)]


def _histogram(counts: tuple[int, ...]) -> list[Text]:
    """Rounds by number of accepted tokens, as bars."""
    most = max(counts)
    return [
        line(
            "accepted" if n == 0 else "",
            f"{n:>2} {'#' * round(_BAR * count / most):<{_BAR}} {count}",
        )
        for n, count in enumerate(counts)
    ]


def _figure(value: float | None, form: str, unit: str = "") -> str:
    return "n/a" if value is None else f"{value:{form}}{unit}"
