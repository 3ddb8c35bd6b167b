"""When drafting pays and when it does not: the cost model with a situation filled in.

Every finding carries its formula with the numbers in it. alpha is the acceptance rate, c the time
of a draft token and v(n) that of a decode of n rows, both in target tokens; k tokens a round give
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

MOST = 16  # tokens of a draft that are looked at
BITS = {"F16": 16.0, "Q8_0": 8.5, "Q6_K": 6.56, "Q4_K_M": 4.85}  # of whole files of big models


@dataclass(frozen=True, slots=True)
class Figures:
    """What is known of a pair on a machine. ``alpha`` is by temperature.

    ``prompt_cost`` is the time of a prompt token in target tokens; bits are those of a weight.
    """

    c: float
    v: Mapping[int, float]
    alpha: Mapping[float, float]
    shares_kv: bool = True
    prompt_cost: float | None = None
    target_bits: float | None = None
    target_bytes: int | None = None
    draft_bytes: int | None = None
    experts: tuple[int, int] | None = None  # used for a token, and all


@dataclass(frozen=True, slots=True)
class Situation:
    """What is asked about; None where it is not."""

    temperature: float | None = None
    n_prompt: int | None = None
    n_predict: int | None = None
    n_users: int = 1
    memory: int | None = None


@dataclass(frozen=True, slots=True)
class Finding:
    """One answer: the speed-up there, the draft length that gives it (0: none pays), and why."""

    topic: str
    speedup: float | None
    n_draft: int | None
    words: str


def explain(figures: Figures, situation: Situation) -> list[Finding]:
    """Findings on the pair as it is, and on each thing that would change it."""
    alpha = alpha_at(figures.alpha, situation.temperature)
    found = [_as_it_is(figures, alpha, situation.temperature)]
    base = found[0].speedup or 1.0
    if len(figures.alpha) > 1:
        found += _by_temperature(figures)
    if situation.n_prompt is not None or situation.n_predict is not None:
        found.append(_lengths(figures, situation, base))
    found.append(_users(figures, alpha, max(2, situation.n_users)))
    if figures.experts:
        found.append(_experts(figures, alpha, figures.experts))
    if figures.target_bits:
        found += _precision(figures, alpha, figures.target_bits)
    if situation.memory and figures.target_bytes:
        found.append(_memory(figures, situation.memory, base))
    return found


def alpha_at(known: Mapping[float, float], temperature: float | None) -> float:
    """alpha between the temperatures that it is known at; the mean where none is asked."""
    if temperature is None:
        return sum(known.values()) / len(known)
    below = max((t for t in known if t <= temperature), default=min(known))
    above = min((t for t in known if t >= temperature), default=max(known))
    share = 0.0 if above == below else (temperature - below) / (above - below)
    return known[below] + share * (known[above] - known[below])


def best_length(
    alpha: float, c: float, v: Mapping[int, float], n_rows: int = 1
) -> tuple[int, float]:
    """The draft length with the highest speed-up, and that; (0, 1) where none pays.

    With ``n_rows`` texts decoded together, times are those of all of them.
    """
    one = interpolate_v(v, n_rows)
    costs = {k + 1: interpolate_v(v, n_rows * (k + 1)) / one for k in range(1, MOST + 1)}
    return best_n_draft(alpha, c, costs)


def _formula(alpha: float, c: float, v: float, k: int) -> str:
    tau, cost = expected_tokens(alpha, k), k * c + v
    return f"{tau:.2f} tokens / ({k} x {c:.2f} + {v:.2f}) = {tau / cost:.2f}"


def _as_it_is(figures: Figures, alpha: float, temperature: float | None) -> Finding:
    k, speed = best_length(alpha, figures.c, figures.v)
    at = "" if temperature is None else f" at temperature {temperature:g}"
    if k:
        told = _formula(alpha, figures.c, interpolate_v(figures.v, k + 1), k)
        return Finding("pair", speed, k, f"pays{at}: alpha {alpha:.2f} gives {told}")
    needed = {
        n: a for n in range(1, MOST + 1)
        if (a := break_even_alpha(n, figures.c, interpolate_v(figures.v, n + 1))) is not None
    }  # fmt: skip
    if not needed:
        return Finding(
            "pair", 1.0, 0,
            f"does not pay{at}: even if every token were accepted, "
            f"{_formula(1.0, figures.c, interpolate_v(figures.v, 2), 1)}; it takes a cheaper "
            "draft or a bigger target",
        )  # fmt: skip
    n = min(needed, key=lambda n: needed[n])
    return Finding(
        "pair", 1.0, 0,
        f"does not pay{at}: alpha is {alpha:.2f}, and {n} a round need {needed[n]:.2f}: "
        f"{_formula(alpha, figures.c, interpolate_v(figures.v, n + 1), n)}",
    )  # fmt: skip


def _by_temperature(figures: Figures) -> list[Finding]:
    found = []
    for t, alpha in sorted(figures.alpha.items()):
        k, speed = best_length(alpha, figures.c, figures.v)
        found.append(Finding(f"temperature {t:g}", speed, k, f"alpha {alpha:.2f}"))
    return found


def _lengths(figures: Figures, situation: Situation, speed: float) -> Finding:
    """Reading the prompt takes as long with a draft (or longer): only writing gets faster."""
    n_prompt, n_predict = situation.n_prompt or 0, situation.n_predict or 256
    each = figures.prompt_cost if figures.prompt_cost is not None else 0.1
    read = n_prompt * each
    extra = 0.0 if figures.shares_kv else read * figures.c
    alone, ours = read + n_predict, read + extra + n_predict / speed
    guess = "" if figures.prompt_cost is not None else " (taken as 0.1 of a target token each)"
    told = (
        f"{n_prompt} prompt tokens{guess} cost {read:.0f} target tokens, {n_predict} of text cost "
        f"{n_predict / speed:.0f} instead of {n_predict}: {alone:.0f} / {ours:.0f} in all"
    )
    if extra:
        told += f"; a draft without shared KV reads the prompt too ({extra:.0f} of them)"
    return Finding("prompt and output length", alone / ours, None, told)


def _users(figures: Figures, alpha: float, n_users: int) -> Finding:
    """B texts decoded together share the reading of the weights already, which drafting lives on.

    A draft row of B texts is taken to cost c of a target decode of B rows.
    """
    k, speed = best_length(alpha, figures.c, figures.v, n_users)
    widest = max([1, *figures.v])
    rows = n_users * ((k or 1) + 1)
    beyond = f" (v beyond {widest} rows is extrapolated)" if rows > widest else ""
    one, many = interpolate_v(figures.v, n_users), interpolate_v(figures.v, rows)
    told = (
        f"{n_users} texts at once: {n_users} rows a decode without a draft and {rows} with one, "
        f"v({n_users}) {one:.2f} and v({rows}) {many:.2f}, a step of {many / one:.2f} instead of "
        f"{interpolate_v(figures.v, (k or 1) + 1):.2f}{beyond}"
    )
    return Finding(f"{n_users} users", speed, k, told)


def _experts(figures: Figures, alpha: float, experts: tuple[int, int]) -> Finding:
    """n rows read the union of their experts: E (1 - (1 - e / E)^n) of E if they choose freely."""
    used, of = experts

    def v(n: int) -> float:
        return max(interpolate_v(figures.v, n), (1 - (1 - used / of) ** n) * of / used)

    table = {n: v(n) for n in range(2, MOST + 2)}
    k, speed = best_length(alpha, figures.c, table)
    read = of * (1 - (1 - used / of) ** 5)
    return Finding(
        "mixture of experts", speed, k,
        f"{used} of {of} experts a token, but 5 rows read about {read:.0f} of them, so v(5) tends "
        f"to {table[5]:.2f} where experts are most of the weights",
    )  # fmt: skip


def _precision(figures: Figures, alpha: float, bits: float) -> list[Finding]:
    """A smaller target is faster alone: the same draft then costs a larger share of a token."""
    found = []
    for name, other in BITS.items():
        if other < bits - 0.5:
            c = figures.c * bits / other
            k, speed = best_length(alpha, c, figures.v)
            found.append(
                Finding(
                    f"target in {name}", speed, k,
                    f"c would be about {figures.c:.2f} x {bits:.1f} / {other:g} bits = {c:.2f}; "
                    f"{name} alone is about {bits / other:.1f} times as fast as this target, but "
                    "another distribution",
                )
            )  # fmt: skip
    return found


def _memory(figures: Figures, memory: int, speed: float) -> Finding:
    target, draft = figures.target_bytes or 0, figures.draft_bytes or 0
    gib = 2**30
    told = f"target {target / gib:.1f} and draft {draft / gib:.1f} of {memory / gib:.1f} GiB"
    if target + draft <= memory:
        return Finding("memory", speed, None, f"{told}: both fit, beside their KV caches")
    if target <= memory:
        return Finding(
            "memory", None, None,
            f"{told}: the target fits alone; with the draft something is read from disk at every "
            "token, so leave the draft out, or make a smaller one",
        )  # fmt: skip
    return Finding(
        "memory", None, None,
        f"{told}: the target does not fit either; a draft that is held in memory pays all the more "
        "where the target is slow, if the rest of the memory is given to it",
    )  # fmt: skip
