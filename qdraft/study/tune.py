"""The best way to draft with a pair: replayed on a record of it, and confirmed live."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from qdraft.decoding.intervals import Ratio
from qdraft.decoding.policy.model import Costs
from qdraft.decoding.rates import draft_cost, target_seconds, verify_costs
from qdraft.decoding.records import DecodeParams, Round, SamplingParams
from qdraft.errors import UsageError
from qdraft.llama.progress import Progress
from qdraft.making.calibration import takes_a_chat
from qdraft.pairs.registry import EVIDENCE, Value
from qdraft.session.pair import Pair
from qdraft.study import bench
from qdraft.study.bench_rows import fold
from qdraft.study.prompts import WARM_UP, Task
from qdraft.study.recording import Recording, record
from qdraft.study.replay import Replayed, replay
from qdraft.study.settings import Setting

_LENGTHS = range(1, 9)
_CONFIDENCES = (0.3, 0.5, 0.7, 0.85)


@dataclass(frozen=True, slots=True)
class Tried:
    """One way to draft: what the replay makes of it, and what it did live, where that was tried."""

    params: DecodeParams
    replayed: Replayed
    live: Ratio | None = None
    live_alpha: float | None = None

    @property
    def name(self) -> str:
        """The way in a few words."""
        p = self.params
        how = {
            "auto": "auto",
            "fixed": f"fixed {p.n_draft}",
            "confidence": f"confidence {p.p_min:g}" if p.p_min is not None else "confidence",
        }[p.draft_policy]
        return how if p.verification == "block" else f"{how} (token)"


def ways(temperature: float) -> list[DecodeParams]:
    """All that is replayed: lengths, confidences, the measured policy; above 0 by both rules."""
    found = [DecodeParams()]
    found += [DecodeParams(draft_policy="fixed", n_draft=n) for n in _LENGTHS]
    found += [DecodeParams(draft_policy="confidence", n_draft=8, p_min=p) for p in _CONFIDENCES]
    if temperature > 0:
        found += [replace(way, verification="token") for way in found]
    return found


def record_pair(
    pair: Pair,
    tasks: Sequence[Task],
    temperatures: Sequence[float],
    sampling: SamplingParams,
    n_predict: int,
    about: dict[str, Any],
    progress: Progress | None = None,
) -> Recording:
    """Let the target write each task at each temperature, and record both models along it."""
    assert pair.draft_engine
    copy = pair.courier.copy if pair.courier else None
    texts = []
    raw = not takes_a_chat(pair, WARM_UP)
    n_all = len(tasks) * len(temperatures)
    for place, task in enumerate(tasks):
        for temperature in temperatures:
            written = pair.generate(
                task.prompt, replace(sampling, temperature=temperature),
                DecodeParams(n_predict=n_predict, n_draft=0, seed=place), raw=raw,
            )  # fmt: skip
            written.read()
            tokens = [*written.prompt, *written.tokens]
            if len(written.tokens) > 2:
                texts.append(
                    record(
                        pair.target_engine, pair.draft_engine, tokens, len(written.prompt),
                        kind=task.kind, temperature=temperature, copy=copy,
                    )
                )  # fmt: skip
            if progress:
                done = place * len(temperatures) + temperatures.index(temperature) + 1
                progress("recording", done, n_all)
    if not texts:
        raise UsageError("the target's texts are too short to record", hint="another target, or -n")
    costs = live_costs(pair, replace(sampling, temperature=temperatures[-1]), progress)
    told = {"c": costs.c["model"], "v": {str(n): x for n, x in costs.v.items()}}
    return Recording({**about, "costs": told}, tuple(texts))


def live_costs(pair: Pair, sampling: SamplingParams, progress: Progress | None = None) -> Costs:
    """c and v as rounds have them: with sampling, the courier and the loop's own time.

    From texts with drafts of each length, between texts without one.
    """
    raw = not takes_a_chat(pair, WARM_UP)
    rounds: list[Round] = []
    for i, n_draft in enumerate(_LENGTHS):
        for n in (0, n_draft):
            params = DecodeParams(n_predict=28, draft_policy="fixed", n_draft=n, seed=i)
            text = pair.generate(WARM_UP, sampling, params, raw=raw)
            text.read()
            rounds += text.rounds[2:]
        if progress:
            progress("measuring costs", i + 1, len(_LENGTHS))
    target_s = target_seconds(rounds)
    c, v = draft_cost(rounds, target_s), verify_costs(rounds, target_s)
    if c is None or not v:
        raise UsageError("the target's texts are too short to measure what a draft costs")
    return Costs({"model": c}, v)


def costs_of(recording: Recording) -> Costs | None:
    """The costs that were measured when a recording was recorded."""
    told = recording.about.get("costs")
    if not told:
        return None
    return Costs({"model": float(told["c"])}, {int(n): float(x) for n, x in told["v"].items()})


def replay_ways(
    recording: Recording,
    costs: Costs,
    sampling: SamplingParams,
    found: Sequence[DecodeParams],
    *,
    share_kv: bool,
    progress: Progress | None = None,
) -> list[Tried]:
    """Replay each way; the fastest first."""
    tried = []
    repeats = 1 if "alpha" in recording.about else 4  # a synthetic record is long enough
    for i, params in enumerate(found):
        made = replay(recording, costs, sampling, params, share_kv=share_kv, repeats=repeats)
        tried.append(Tried(params, made))
        if progress:
            progress("replaying", i + 1, len(found))
    return sorted(tried, key=lambda one: -one.replayed.speedup)


def confirm(
    pair: Pair,
    tasks: Sequence[Task],
    sampling: SamplingParams,
    tried: Sequence[Tried],
    n_predict: int,
    progress: Progress | None = None,
) -> Iterator[Tried]:
    """Run each of ``tried`` live on ``tasks``, beside the target alone."""
    for one in tried:
        params = replace(one.params, n_predict=n_predict, seed=1)

        def step(what: str, done: float, of: float, name: str = one.name) -> None:
            if progress and what == "measuring":
                progress(f"confirming {name}", done, of)

        samples = list(
            bench.measure(
                pair, tasks, [sampling.temperature], sampling=sampling, params=params, progress=step
            )
        )
        total = fold(samples, pair.learned.costs.medians()).total
        yield replace(one, live=total.speedup, live_alpha=total.alpha)


def choose_winner(tried: Sequence[Tried]) -> Tried:
    """Return the fastest way live, or the fastest by the replay if none was confirmed.

    If no way pays, the winner is auto: a fixed way that loses would lose on every text, and auto
    stops drafting.
    """

    def speed(way: Tried) -> float:
        return way.live.value if way.live else way.replayed.speedup

    known = [way for way in tried if way.live] or tried
    best = max(known, key=speed)
    return best if speed(best) > 1 else next((way for way in known if way.name == "auto"), best)


def conclude_tuning(best: Tried, setting: Setting | None, draft: Path) -> list[str]:
    """Say what to run, and how fast it was."""
    ratio = best.live
    if ratio is None:
        speed = f"{best.replayed.speedup:.2f} times the target alone by the replay, not confirmed"
    else:
        interval = "" if ratio.low is None else f" ({ratio.low:.2f} to {ratio.high:.2f})"
        speed = f"{ratio.value:.2f} times the target alone{interval} live"
    sentences = [f"{best.name} with {draft.name}: {speed}"]
    if setting:
        sentences.append(f"{setting.name}: {setting.per_second:.1f} t/s expected with the draft")
    return sentences


def tuned_settings(
    best: Tried, setting: Setting | None, evidence: str, day: str
) -> dict[str, Value | None]:
    """Return the settings under the keys of an entry of models.yaml; None removes a key."""
    params = best.params
    settings: dict[str, Value | None] = {
        "draft-policy": params.draft_policy,
        "n-draft": params.n_draft,
        "p-min": params.p_min,
        "verification": params.verification if params.verification != "block" else None,
        "drafter": None,
    }
    if setting:
        settings["threads"] = setting.params.n_threads
    return {**settings, EVIDENCE: f"{evidence}, {day}"}
