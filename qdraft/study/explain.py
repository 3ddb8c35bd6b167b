"""When drafting pays off and when it does not: the cost model with a situation filled in.

Every finding has its formula with the numbers in it. alpha is the acceptance rate, c the time of a
draft token and v(n) that of a decode of n rows, both in target tokens; k tokens a round give
S = tau / (k c + v(k + 1)) with tau = 1 + alpha + ... + alpha^k.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from qdraft.decoding.policy.model import (
    best_n_draft,
    break_even_alpha,
    expected_tokens,
    interpolate_v,
)
from qdraft.decoding.policy.model import speedup as expected_speedup
from qdraft.placement.outlook import Outlook
from qdraft.placement.residency import Residency

MOST = 16  # tokens of a draft that are tried
BITS = {"F16": 16.0, "Q8_0": 8.5, "Q6_K": 6.56, "Q4_K_M": 4.85}  # of whole files of big models
_PROMPT_COST = 0.1  # target tokens that a prompt token is assumed to cost
_N_PREDICT = 256  # tokens of a text of unknown length
_GIB = 2**30
_DISK_SPEED = 1e9  # bytes a second that a disk is assumed to give


@dataclass(frozen=True, slots=True)
class Figures:
    """What is known about a pair on a machine. ``alpha`` is by temperature.

    ``prompt_cost`` is the time of a prompt token in target tokens, ``target_bits`` the bits of a
    weight. ``experts`` are the numbers of experts per token and of all experts.
    """

    c: float
    v: Mapping[int, float]
    alpha: Mapping[float, float]
    shares_kv: bool = True
    prompt_cost: float | None = None
    target_bits: float | None = None
    target_bytes: int | None = None
    draft_bytes: int | None = None
    experts: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Situation:
    """The situation to explain; None leaves a question out. ``memory`` is in bytes."""

    temperature: float | None = None
    n_prompt: int | None = None
    n_predict: int | None = None
    n_users: int = 1
    memory: int | None = None


@dataclass(frozen=True, slots=True)
class Finding:
    """One answer: the speed-up, the draft length that gives it (0: none pays off), and why."""

    topic: str
    speedup: float | None
    n_draft: int | None
    words: str


def explain(figures: Figures, situation: Situation) -> list[Finding]:
    """Return findings on the pair as it is, and on each thing that would change it."""
    alpha = alpha_at(figures.alpha, situation.temperature)
    pair = _as_it_is(figures, alpha, situation.temperature)
    findings = [pair]
    if len(figures.alpha) > 1:
        findings += _by_temperature(figures)
    if situation.n_prompt is not None or situation.n_predict is not None:
        findings.append(_lengths(figures, situation, pair.speedup or 1.0))
    findings.append(_users(figures, alpha, max(2, situation.n_users)))
    if figures.experts:
        findings.append(_experts(figures, alpha, figures.experts))
    if figures.target_bits:
        findings += _precision(figures, alpha, figures.target_bits)
    if situation.memory and figures.target_bytes:
        findings.append(_memory(figures, situation.memory, alpha, pair.speedup or 1.0))
    return findings


def alpha_at(known: Mapping[float, float], temperature: float | None) -> float:
    """alpha at ``temperature``, between the known ones; None gives the mean of all."""
    if temperature is None:
        return sum(known.values()) / len(known)
    below = max((t for t in known if t <= temperature), default=min(known))
    above = min((t for t in known if t >= temperature), default=max(known))
    share = 0.0 if above == below else (temperature - below) / (above - below)
    return known[below] + share * (known[above] - known[below])


def best_length(
    alpha: float, c: float, v: Mapping[int, float], n_texts: int = 1
) -> tuple[int, float]:
    """The draft length with the highest speed-up, and that speed-up; (0, 1) if none pays off.

    If ``n_texts`` texts are decoded together, the times are those of all of them.
    """
    alone = interpolate_v(v, n_texts)
    costs = {k + 1: interpolate_v(v, n_texts * (k + 1)) / alone for k in range(1, MOST + 1)}
    return best_n_draft(alpha, c, costs)


def _formula(alpha: float, c: float, v: float, k: int) -> str:
    tau, gain = expected_tokens(alpha, k), expected_speedup(alpha, k, c, v)
    return f"{tau:.2f} tokens / ({k} x {c:.2f} + {v:.2f}) = {gain:.2f}"


def _as_it_is(figures: Figures, alpha: float, temperature: float | None) -> Finding:
    c, v = figures.c, figures.v
    k, speedup = best_length(alpha, c, v)
    at = "" if temperature is None else f" at temperature {temperature:g}"
    if k:
        formula = _formula(alpha, c, interpolate_v(v, k + 1), k)
        return Finding("pair", speedup, k, f"pays off{at}: alpha {alpha:.2f} gives {formula}")
    needed = {
        n: least
        for n in range(1, MOST + 1)
        if (least := break_even_alpha(n, c, interpolate_v(v, n + 1))) is not None
    }
    if not needed:
        formula = _formula(1.0, c, interpolate_v(v, 2), 1)
        why = (
            f"even if every token were accepted, {formula}; it takes a cheaper draft or a bigger "
            "target"
        )
    else:
        n = min(needed, key=lambda n: needed[n])
        formula = _formula(alpha, c, interpolate_v(v, n + 1), n)
        why = f"alpha is {alpha:.2f}, but n_draft {n} needs {needed[n]:.2f}: {formula}"
    return Finding("pair", 1.0, 0, f"does not pay off{at}: {why}")


def _by_temperature(figures: Figures) -> list[Finding]:
    findings = []
    for t, alpha in sorted(figures.alpha.items()):
        k, speedup = best_length(alpha, figures.c, figures.v)
        findings.append(Finding(f"temperature {t:g}", speedup, k, f"alpha {alpha:.2f}"))
    return findings


def _lengths(figures: Figures, situation: Situation, speedup: float) -> Finding:
    """Reading the prompt takes as long with a draft, or longer: only generating gets faster."""
    n_prompt, n_predict = situation.n_prompt or 0, situation.n_predict or _N_PREDICT
    is_known = figures.prompt_cost is not None
    read = n_prompt * (figures.prompt_cost if figures.prompt_cost is not None else _PROMPT_COST)
    extra = 0.0 if figures.shares_kv else read * figures.c
    alone, ours = read + n_predict, read + extra + n_predict / speedup
    assumed = "" if is_known else f" (assumed to cost {_PROMPT_COST} target tokens each)"
    words = (
        f"{n_prompt} prompt tokens{assumed} cost {read:.0f} target tokens, {n_predict} of text "
        f"cost {n_predict / speedup:.0f} instead of {n_predict}: {alone:.0f} / {ours:.0f} in all"
    )
    if extra:
        words += f"; a draft without shared KV reads the prompt too, for {extra:.0f} target tokens"
    return Finding("prompt and output length", alone / ours, None, words)


def _users(figures: Figures, alpha: float, n_users: int) -> Finding:
    """Texts that are decoded together already share the reading of weights that drafting saves.

    Assumes that a draft row of B texts costs c of a target decode of B rows.
    """
    k, speedup = best_length(alpha, figures.c, figures.v, n_users)
    widest = max([1, *figures.v])
    rows = n_users * ((k or 1) + 1)
    beyond = f" (v beyond {widest} rows is extrapolated)" if rows > widest else ""
    narrow, wide = interpolate_v(figures.v, n_users), interpolate_v(figures.v, rows)
    words = (
        f"{n_users} texts at once: {n_users} rows a decode without a draft and {rows} with one; "
        f"v({n_users}) is {narrow:.2f} and v({rows}) {wide:.2f}, a step of {wide / narrow:.2f} "
        f"instead of {interpolate_v(figures.v, (k or 1) + 1):.2f}{beyond}"
    )
    return Finding(f"{n_users} users", speedup, k, words)


def _experts(figures: Figures, alpha: float, experts: tuple[int, int]) -> Finding:
    """n rows read the union of their experts: E (1 - (1 - e / E)^n) of E if they choose freely."""
    n_used, n_all = experts

    def read_share(n: int) -> float:
        return 1 - (1 - n_used / n_all) ** n

    def v(n: int) -> float:
        return max(interpolate_v(figures.v, n), read_share(n) * n_all / n_used)

    table = {n: v(n) for n in range(2, MOST + 2)}
    k, speedup = best_length(alpha, figures.c, table)
    n_read = n_all * read_share(5)
    words = (
        f"{n_used} of {n_all} experts per token, but 5 rows read about {n_read:.0f} of them, so "
        f"v(5) approaches {table[5]:.2f} if experts are most of the weights"
    )
    return Finding("mixture of experts", speedup, k, words)


def _precision(figures: Figures, alpha: float, bits: float) -> list[Finding]:
    """A smaller target is faster alone: the same draft then costs a larger share of a token."""
    findings = []
    for name, other in BITS.items():
        if other >= bits - 0.5:
            continue
        c = figures.c * bits / other
        k, speedup = best_length(alpha, c, figures.v)
        words = (
            f"c would be about {figures.c:.2f} x {bits:.1f} / {other:g} bits = {c:.2f}; {name} "
            f"alone is about {bits / other:.1f} times as fast as this target, but has another "
            "distribution"
        )
        findings.append(Finding(f"target in {name}", speedup, k, words))
    return findings


def _memory(figures: Figures, memory: int, alpha: float, speedup: float) -> Finding:
    target, draft = figures.target_bytes or 0, figures.draft_bytes or 0
    residency = Residency(memory, target, draft)
    room = f"{memory / _GIB:.1f} GiB"
    sizes = f"target {target / _GIB:.1f} GiB and draft {draft / _GIB:.1f} GiB of {room}"
    if residency.fits:
        return Finding("memory", speedup, None, f"{sizes}: both fit, KV caches not included")
    if Residency(memory, target, 0).fits:
        why = (
            "the target fits alone; with the draft, each pass reads a part of it from the disk: "
            "leave the draft out, or make a smaller one"
        )
        return Finding("memory", None, None, f"{sizes}: {why}")
    if not residency.draft_fits:
        why = "neither fits: a draft must stay in memory to pay off, so make a smaller one"
        return Finding("memory", None, None, f"{sizes}: {why}")
    outlook = Outlook(residency, _DISK_SPEED, alpha)
    why = (
        f"each pass over the target reads {residency.n_streamed / _GIB:.1f} GiB from the disk "
        f"(assumed at {_DISK_SPEED / 1e9:g} GB/s), whatever its number of rows; the draft stays in "
        "memory"
    )
    return Finding("memory", outlook.speedup, outlook.n_draft, f"{sizes}: {why}")
