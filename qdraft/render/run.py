"""One run: the summary for people, and the JSON object that docs/schema/run.json describes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from qdraft.decoding.records import FinishReason, Round, SamplingParams
from qdraft.decoding.summary import Summary
from qdraft.gguf.recommended import describe
from qdraft.llama.native import library_version
from qdraft.render.layout import line, wrapped
from qdraft.render.placed import placed_report
from qdraft.session.bit_identity import BitIdentity
from qdraft.session.check import Check
from qdraft.session.generation import Generation
from qdraft.session.pair import ModelInfo, Pair
from qdraft.session.text import TextVocab

_LEAST_LOGPROB = -9999.0  # as in OpenAI's API
_BAR = 24  # columns of the longest bar
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
    recommended: Mapping[str, float] | None = None,
) -> RenderableType:
    """A few lines that stay below 80 columns; ``seed`` is None if nothing was drawn.

    ``recommended`` are the values of the sampling that came from the file.
    """
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
        *_recommended_lines(recommended or {}),
        *_draft_lines(summary),
        line(
            "time",
            f"draft {summary.draft_s:.2f} s",
            f"verify {summary.verify_s:.2f} s",
            f"other {summary.other_s:.2f} s",
        ),
    ]
    if summary.n_dropped:
        lines.append(line("dropped", f"{summary.n_dropped} drafts with bad logits"))
    if bit_identity:
        lines += wrapped("exact", describe_bit_identity(bit_identity))
    if summary.conclusion:
        lines += wrapped("verdict", summary.conclusion)
    if doubts := summary.doubts:
        lines += wrapped("doubt", "; ".join(doubts))
    return Group(*lines)


def _recommended_lines(values: Mapping[str, float]) -> list[Text]:
    return wrapped("sampling", f"{describe(values)}, as the file recommends") if values else []


def _draft_lines(summary: Summary) -> list[Text]:
    """What was drafted and accepted; nothing if no token was drafted."""
    lines = []
    if summary.n_drafted:
        lines = [
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
    return lines


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


def describe_bit_identity(identity: BitIdentity) -> str:
    """Say how long drafts may be under --exact, and why not longer."""
    n = identity.n_draft
    if identity.depth is None or identity.difference is None:
        return f"drafts of up to {n} tokens are bit-identical to decoding one token at a time"
    differ = f"differ by {identity.difference:.2g} after {identity.depth} tokens of text"
    if n:
        return f"drafts of up to {n} tokens are bit-identical; rows of longer drafts {differ}"
    remedy = ""
    if identity.depth > 24:
        remedy = "; one thread (-t 1) or a q8_0 cache (-ctk, -ctv) may help"
    return f"the target runs alone: rows of any draft {differ}{remedy}"


def check_view(check: Check) -> RenderableType:
    """One line: the same text, or where it forks from the target alone, and why that may be."""
    noise = "" if check.noise is None else f"measured noise {check.noise:.2g}"
    if check.same:
        result = "same as the target alone"
        if not check.by_token:
            result = "every token is in the target's support"
        return line("check", result, noise)
    cause = "numerics explain it" if check.explained else "numerics do not explain it: a bug"
    return line(
        "check", f"forked at token {check.fork}", f"margin {check.margin:.2g}", noise, cause
    )


def run_report(pair: Pair, generation: Generation, check: Check | None) -> dict[str, Any]:
    """Everything about one text, ready for json.dumps."""
    summary = dataclasses.asdict(generation.summary)
    summary["verdict"] = summary.pop("conclusion")
    summary["v"] = {str(width): ratio for width, ratio in summary["v"].items()}
    return {
        "text": generation.text,
        "reasoning": generation.reasoning,
        "tokens": generation.tokens,
        "logprobs": _logprobs_report(generation, pair.vocab),
        "finish_reason": generation.finish_reason.value,
        "seed": generation.seed,
        "sampling": _sampling_report(generation.sampling),
        "constraint": None
        if generation.constraint is None
        else {"kind": generation.constraint.kind, "text": generation.constraint.text},
        "recommended": pair.recommended.used_in(generation.sampling),
        "rounds": [_round_report(each) for each in generation.rounds],
        "summary": summary,
        "check": None
        if check is None
        else {**dataclasses.asdict(check), "explained": check.explained},
        "target": _model_report(pair.target),
        "draft": _model_report(pair.draft) if pair.draft else None,
        "kv": dataclasses.asdict(pair.kv),
        "placed": placed_report(pair),
        "exact": None
        if generation.bit_identity is None
        else dataclasses.asdict(generation.bit_identity),
        "library": f"llama-cpp-python {library_version()}",
    }


def _logprobs_report(generation: Generation, vocab: TextVocab) -> list[dict[str, Any]] | None:
    """The log-probabilities of each token and of the likeliest ones; None if nobody asked."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        text = vocab.piece(token, special=True).decode("utf-8", "replace")
        # JSON has no infinity, which a token has that only a bias makes possible.
        return {"token": token, "text": text, "logprob": max(logprob, _LEAST_LOGPROB)}

    reports = [
        {**entry(token, logprobs.logprob), "top": [entry(*each) for each in logprobs.top]}
        for round in generation.rounds
        for token, logprobs in zip(round.tokens, round.logprobs, strict=False)
    ]
    return reports or None


def _sampling_report(sampling: SamplingParams) -> dict[str, Any]:
    """The sampling without biases, which may be infinite."""
    return {k: v for k, v in dataclasses.asdict(sampling).items() if k != "logit_bias"}


def _round_report(round: Round) -> dict[str, Any]:
    names = (
        *("source", "n_prompt", "n_draft", "n_forced"),
        *("n_tested", "n_accepted", "n_emitted", "n_reread"),
    )
    return {
        **{name: getattr(round, name) for name in names},
        "dropped": round.draft.dropped,
        **dataclasses.asdict(round.times),
    }


def _model_report(info: ModelInfo) -> dict[str, Any]:
    return {"path": str(info.path), "n_bytes": info.n_bytes, "file_type": info.file_type}


def _figure(value: float | None, form: str, unit: str = "") -> str:
    return "n/a" if value is None else f"{value:{form}}{unit}"
