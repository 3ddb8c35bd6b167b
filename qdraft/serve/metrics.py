"""Counters of everything that the server has written, in Prometheus' text format."""

from __future__ import annotations

import threading
from collections import Counter

from qdraft.decoding.summary import Summary
from qdraft.session.generation import Generation

# Under llama-server's names, which dashboards know; what each counts is what it counts there.
_COUNTERS = {
    "prompt_tokens_total": "Prompt tokens read, without those from the cache",
    "prompt_tokens_cached_total": "Prompt tokens that were in the cache",
    "prompt_seconds_total": "Seconds spent reading prompts",
    "tokens_predicted_total": "Tokens written",
    "tokens_predicted_seconds_total": "Seconds spent writing tokens",
    "n_decode_total": "Rounds: decodes of the target after the prompt",
    "n_tokens_max": "Longest prompt and text together, in tokens",
    "spec_decode_num_draft_tokens_total": "Tokens drafted",
    "spec_decode_num_accepted_tokens_total": "Draft tokens accepted",
    "spec_decode_num_drafts_total": "Rounds with a draft",
}
_PER_PLACE = "spec_decode_num_accepted_tokens_per_pos_total"


class Metrics:
    """Adds up the figures of texts; any thread may add and read."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._totals: Counter[str] = Counter()
        self._per_place: Counter[int] = Counter()
        self._finishes: Counter[str] = Counter()
        self._speedup: float | None = None
        self._n_tested = 0

    def add(self, text: Generation, summary: Summary) -> None:
        """Add a text that has ended, whatever ended it."""
        histogram = summary.accepted_histogram
        writing_s = summary.draft_s + summary.verify_s + summary.other_s
        with self._lock:
            total = self._totals
            total["prompt_tokens_total"] += summary.n_prompt
            total["prompt_tokens_cached_total"] += text.n_reused.target
            total["prompt_seconds_total"] += summary.prompt_s  # type: ignore[assignment]
            total["tokens_predicted_total"] += summary.n_tokens
            total["tokens_predicted_seconds_total"] += writing_s  # type: ignore[assignment]
            total["n_decode_total"] += max(0, summary.n_rounds - 1)
            n_tokens = len(text.prompt) + summary.n_tokens
            total["n_tokens_max"] = max(total["n_tokens_max"], n_tokens)
            total["spec_decode_num_draft_tokens_total"] += summary.n_drafted
            total["spec_decode_num_accepted_tokens_total"] += summary.n_accepted
            total["spec_decode_num_drafts_total"] += sum(histogram)
            for place in range(1, len(histogram)):
                self._per_place[place - 1] += sum(histogram[place:])
            self._n_tested += summary.n_tested
            self._finishes[text.finish_reason.value] += 1
            if summary.speedup is not None:
                self._speedup = summary.speedup

    def render(self, *, n_busy: int, n_waiting: int) -> str:
        """Return all figures in Prometheus' text format, version 0.0.4."""
        with self._lock:
            total = self._totals
            lines: list[str] = []
            for name, what in _COUNTERS.items():
                lines += _metric(f"llamacpp:{name}", "counter", what, total[name])
            rates = {
                "prompt_tokens_seconds": ("prompt_tokens_total", "prompt_seconds_total"),
                "predicted_tokens_seconds": (
                    "tokens_predicted_total",
                    "tokens_predicted_seconds_total",
                ),
            }
            for name, (tokens, seconds) in rates.items():
                rate = total[tokens] / total[seconds] if total[seconds] else 0
                lines += _metric(f"llamacpp:{name}", "gauge", "Average tokens per second", rate)
            for name, what, n in (
                ("requests_processing", "Requests that the worker writes for", n_busy),
                ("requests_deferred", "Requests that wait", n_waiting),
            ):
                lines += _metric(f"llamacpp:{name}", "gauge", what, n)
            lines += _labelled(
                f"llamacpp:{_PER_PLACE}",
                "Accepted tokens by their place in the draft",
                "position",
                {str(place): n for place, n in sorted(self._per_place.items())},
            )
            lines += self._own()
        return "\n".join(lines) + "\n"

    def _own(self) -> list[str]:
        """Return the lines of figures that llama-server does not have."""
        total = self._totals
        n_rounds, n_accepted = "n_decode_total", "spec_decode_num_accepted_tokens_total"
        lines = _metric("qdraft_rounds_total", "counter", _COUNTERS[n_rounds], total[n_rounds])
        lines += _metric(
            "qdraft_tested_tokens_total", "counter", "Draft tokens judged", self._n_tested
        )
        if self._n_tested:
            alpha = total[n_accepted] / self._n_tested
            lines += _metric("qdraft_alpha", "gauge", "Acceptance rate of tested tokens", alpha)
        if self._speedup is not None:
            what = "Speed of the last text over that of the target alone"
            lines += _metric("qdraft_speedup", "gauge", what, self._speedup)
        return lines + _labelled(
            "qdraft_texts_total", "Texts by what ended them", "finish", dict(self._finishes)
        )


def _metric(name: str, kind: str, what: str, value: float) -> list[str]:
    return [f"# HELP {name} {what}", f"# TYPE {name} {kind}", f"{name} {value:.10g}"]


def _labelled(name: str, what: str, label: str, values: dict[str, int]) -> list[str]:
    if not values:
        return []
    lines = [f'{name}{{{label}="{key}"}} {value}' for key, value in values.items()]
    return [f"# HELP {name} {what}", f"# TYPE {name} counter", *lines]
