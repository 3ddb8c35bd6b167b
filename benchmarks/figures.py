"""From measured texts to ratios, bars, a table and a page."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any

from qdraft.decoding.intervals import Ratio, TimedText, speed_ratio
from qdraft.decoding.rates import Counts

Rows = Sequence[dict[str, Any]]
Q4, Q2 = "F16 + Q4_K_M", "F16 + Q2_K-im"
ALONE, OURS, SIMPLE, TUNED = (
    "target alone",
    "qdraft",
    "llama-speculative-simple",
    "llama-server, tuned",
)
NEWEST = "newest llama.cpp"
NEWEST_ALONE = f"{NEWEST}, target alone"
WANTED = {
    "t0_q4km_vs_llamacpp": ">= 1.25",
    "t0_q4km_vs_tuned": ">= 1.15",
    "t0_q2k_vs_llamacpp": ">= 1.8",
    "t0_q2k_vs_tuned": ">= 1.2",
    "t1_q4km_vs_llamacpp": ">= 1.9",
    "t1_q4km_vs_tuned": ">= 1.4",
    "t1_q4km_vs_newest": ">= 1.4",
    "t1_over_t0": ">= 0.95",
    "t0_q4km_vs_target": ">= 1.4",
    "t0_q2k_vs_target": ">= 1.2",
    "ttft_vs_target": "<= 1.1",
    "worst_vs_target": ">= 0.97",
    "outside_share": "<= 0.03",
    "achieved_over_predicted": "0.9 to 1.1",
}


def select(rows: Rows, **wanted: Any) -> list[dict[str, Any]]:
    return [r for r in rows if all(r[key] == x for key, x in wanted.items())]


def speed(rows: Rows) -> float:
    """Total tokens over total seconds."""
    return sum(r["n_tokens"] for r in rows) / sum(r["seconds"] for r in rows)


def ratio(ours: Rows, theirs: Rows) -> float:
    return speed(ours) / speed(theirs)


def interval(ours: Rows, theirs: Rows) -> Ratio:
    """``ratio`` with its interval over paired texts of the same prompt."""

    def key(r: dict[str, Any]) -> tuple[Any, ...]:
        return (r["pair"], r["kind"], r["prompt"], r["temperature"])

    other = {key(r): r for r in theirs}
    paired = speed_ratio([_timed(r) for r in ours], [_timed(other[key(r)]) for r in ours])
    assert paired
    return paired


def _timed(row: dict[str, Any]) -> TimedText:
    return TimedText(row["n_tokens"], row["seconds"])


def _counts(rows: Rows) -> Counts:
    """What became of the draft tokens; a round emits those accepted and the token after them."""
    names = ("n_rounds", "n_drafted", "n_tested", "n_accepted")
    n_rounds, n_drafted, n_tested, n_accepted = (sum(r[name] for r in rows) for name in names)
    return Counts(n_rounds, n_drafted, n_tested, n_accepted, n_emitted=n_accepted + n_rounds)


def of_kind(rows: Rows, pair: str, kind: str) -> float:
    """qdraft over the target alone for one kind of prompt, all temperatures together."""
    chosen = select(rows, pair=pair, kind=kind)
    return ratio(select(chosen, contender=OURS), select(chosen, contender=ALONE))


def bars(rows: Rows, firsts: Sequence[tuple[str, float]]) -> dict[str, float]:
    """The figures that the benchmark holds qdraft to."""

    def against(pair: str, temperature: float, contender: str) -> float:
        chosen = select(rows, pair=pair, temperature=temperature)
        return ratio(select(chosen, contender=OURS), select(chosen, contender=contender))

    figures = {
        "t0_q4km_vs_llamacpp": against(Q4, 0, SIMPLE),
        "t0_q4km_vs_tuned": against(Q4, 0, TUNED),
        "t0_q2k_vs_llamacpp": against(Q2, 0, SIMPLE),
        "t0_q2k_vs_tuned": against(Q2, 0, TUNED),
        "t1_q4km_vs_llamacpp": against(Q4, 1, SIMPLE),
        "t1_q4km_vs_tuned": against(Q4, 1, TUNED),
        "t1_over_t0": against(Q4, 1, ALONE) / against(Q4, 0, ALONE),
        "t0_q4km_vs_target": against(Q4, 0, ALONE),
        "t0_q2k_vs_target": against(Q2, 0, ALONE),
    }
    newest = {r["contender"] for r in rows if r["contender"].startswith(NEWEST)} - {NEWEST_ALONE}
    if newest:  # against its best setting, in t/s
        figures["t1_q4km_vs_newest"] = min(against(Q4, 1, name) for name in newest)
    times = {name: median(s for n, s in firsts if n == name) for name in (OURS, ALONE)}
    figures["ttft_vs_target"] = times[OURS] / times[ALONE]
    figures["worst_vs_target"] = min(
        of_kind(rows, pair, kind) for pair, kind in {(r["pair"], r["kind"]) for r in rows}
    )
    ours = select(rows, pair=Q4, contender=OURS)
    # A text in which nothing was drafted is expected to be as fast as the target alone.
    expected = sum(r["n_tokens"] for r in ours) / sum(
        r["n_tokens"] / (r["predicted"] or 1.0) for r in ours
    )
    achieved = ratio(ours, select(rows, pair=Q4, contender=ALONE))
    figures["achieved_over_predicted"] = achieved / expected
    figures["outside_share"] = sum(r["outside_s"] for r in ours) / sum(r["seconds"] for r in ours)
    return figures


def lines(report: dict[str, Any]) -> list[list[str]]:
    """One line for each pair, temperature and contender."""
    rows, out = report["texts"], []
    for pair in dict.fromkeys(r["pair"] for r in rows):
        for temperature in dict.fromkeys(r["temperature"] for r in rows if r["pair"] == pair):
            chosen = select(rows, pair=pair, temperature=temperature)
            alone = select(chosen, contender=ALONE)
            for name in dict.fromkeys(r["contender"] for r in chosen):
                own = select(chosen, contender=name)
                gain = interval(own, alone)
                counts = _counts(own)
                out.append(
                    [
                        pair,
                        f"{temperature:g}",
                        name,
                        f"{speed(own):.1f}",
                        f"{gain.value:.2f}",
                        "" if gain.low is None else f"{gain.low:.2f} to {gain.high:.2f}",
                        "" if counts.alpha is None else f"{counts.alpha:.3f}",
                        "" if counts.draft_yield is None else f"{counts.draft_yield:.3f}",
                        "" if counts.tau is None else f"{counts.tau:.2f}",
                    ]
                )
    return out


HEAD = ["pair", "T", "contender", "t/s", "x alone", "95 %", "alpha", "yield", "tau"]


def table(report: dict[str, Any]) -> str:
    """The report as text for a terminal."""
    body = [HEAD, *lines(report)]
    widths = [max(len(row[i]) for row in body) for i in range(len(HEAD))]
    padded = ([entry.ljust(w) for entry, w in zip(row, widths, strict=True)] for row in body)
    text = "\n".join("  ".join(row).rstrip() for row in padded)
    measured = "\n".join(
        f"{name:<26}{x:6.3f}  {WANTED[name]}" for name, x in report["bars"].items()
    )
    return f"{report['machine']}\n\n{text}\n\ntuned: {report['tuned']}\n\n{measured}"


def page(report: dict[str, Any]) -> str:
    """The page of a run, docs/benchmark.md."""
    rows, pairs = report["texts"], list(dict.fromkeys(r["pair"] for r in report["texts"]))
    parts = [
        "# qdraft against llama.cpp's own tools",
        _paragraph(
            "This is the last full run of `python benchmarks/versus.py --json FILE --page FILE`, "
            "which writes this page."
        ),
        _paragraph(_rivals(report.get("newest"))),
        _machine(report["machine"]),
        _paragraph(
            "Pairs: the large rig (`benchmarks/rig.py`) in F16 with a Q4_K_M draft, and with a "
            "Q2_K draft made with an importance matrix (Q2_K-im); the demo model (smollm2) as it "
            "is, F16 + Q2_K. No truncation. End-of-generation tokens are banned. *x alone* is "
            "total tokens over total time after the first token, divided by the same of the "
            "target alone in qdraft in the same run. Its 95 % interval is a bootstrap over paired "
            "texts."
        ),
        _markdown(HEAD, lines(report)),
        "llama-server's best settings, found on other prompts:",
        _markdown(
            ("pair", "T", "settings"),
            (
                (pair, temperature.removeprefix("T "), f"`{setting}`")
                for pair, settings in report["tuned"].items()
                for temperature, setting in settings.items()
            ),
        ),
        "## By kind of task",
        "qdraft over the target alone, all temperatures together:",
        _markdown(
            ("kind", *pairs),
            (
                (kind, *(f"{of_kind(rows, pair, kind):.2f}" for pair in pairs))
                for kind in dict.fromkeys(r["kind"] for r in rows)
            ),
        ),
        "## Costs",
        "Milliseconds of a target token, then c of the draft and v by number of rows, in target "
        "tokens:",
        _markdown(
            ("pair", "ms", "c", "v"),
            ((pair, *_costs(costs)) for pair, costs in report["costs"].items()),
        ),
        "## Bars",
        "The figures that the benchmark holds qdraft to:",
        _markdown(
            ("bar", "wanted", "here"),
            ((name, WANTED[name], f"{x:.3f}") for name, x in report["bars"].items()),
        ),
    ]
    return "\n\n".join(parts) + "\n"


def _paragraph(text: str) -> str:
    return "\n".join(textwrap.wrap(text, 100, break_long_words=False, break_on_hyphens=False))


def _machine(machine: dict[str, Any]) -> str:
    repacked = "with" if machine["extra_buffers"] else "without"
    crash = "" if machine["extra_buffers"] else ", which crash on this machine"
    return _paragraph(
        f"Machine: {machine['cpu']}, {machine['cores']} cores, {machine['threads']} threads, load "
        f"{machine['load']} before the run, {machine['date']}. {machine['library']} {repacked} "
        f"repacked weights{crash}. {machine['n_predict']} tokens per text, four times as many for "
        "the small model."
    )


def _rivals(newest: str | None) -> str:
    measured = (
        "qdraft is measured against the target alone and against llama-speculative-simple and "
        "llama-server, llama.cpp's own tools, built from the source that the installed "
        "llama-cpp-python was built from. "
    )
    if not newest:
        return f"{measured}The newest llama.cpp that installs as a wheel was not measured."
    return (
        f"{measured}*{NEWEST}* is {newest}, the newest that installs as a wheel: its in-process "
        "server, with sample-and-match and, at temperature 1, also with its probabilistic drafts "
        "(p/q: rejection sampling). Its wheel is built for many CPUs, so its target alone is a "
        "contender too."
    )


def _markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    out = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*out, *("| " + " | ".join(row) + " |" for row in rows)])


def _costs(costs: dict[str, Any]) -> tuple[str, str, str]:
    """Milliseconds of a target token, c and v, as texts."""
    c = costs["c"].get("model")
    v = ", ".join(f"v({n}) {x:.2f}" for n, x in costs["v"].items())
    return f"{1000 * (costs['target_s'] or 0):.0f}", "" if c is None else f"{c:.2f}", v
