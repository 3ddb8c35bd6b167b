"""The best way to draft with a pair: replayed on a recording of it, and confirmed live."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from qdraft.decoding.intervals import Ratio, TimedText, speed_ratio
from qdraft.decoding.policy.model import Costs
from qdraft.decoding.records import DecodeParams, SamplingParams
from qdraft.errors import UsageError
from qdraft.llama.progress import Progress, no_progress
from qdraft.making.calibration import takes_a_chat
from qdraft.making.costs import LENGTHS, measure_live_costs
from qdraft.pairs.registry import EVIDENCE, Value
from qdraft.session.pair import Pair
from qdraft.study import bench
from qdraft.study.bench import Sample
from qdraft.study.bench_rows import fold
from qdraft.study.prompts import WARM_UP, Task
from qdraft.study.recording import RecordedTokens, Recording, TextRecording, record
from qdraft.study.replay import Replayed, ReplayOptions, replay
from qdraft.study.settings import Setting

_CONFIDENCES = (0.3, 0.5, 0.7, 0.85)
AUTO = "auto"  # the name of the way that never loses much
_FEWEST = 3  # tokens of a text that is recorded


@dataclass(frozen=True, slots=True)
class Tried:
    """One way to draft: what the replay gave, and what it did live if it was confirmed.

    ``live`` is its speed over that of the target alone, ``over_auto`` over that of auto. Both are
    None if the way was not confirmed.
    """

    params: DecodeParams
    replayed: Replayed
    live: Ratio | None = None
    live_alpha: float | None = None
    over_auto: Ratio | None = None

    @property
    def name(self) -> str:
        """The way in a few words."""
        params = self.params
        name = params.draft_policy
        if name == "fixed":
            name += f" {params.n_draft}"
        if name == "confidence" and params.p_min is not None:
            name += f" {params.p_min:g}"
        rule = params.verification
        return name if rule == "block" else f"{name} ({rule})"


def list_ways(temperature: float) -> list[DecodeParams]:
    """The ways to replay: auto, fixed lengths and confidences.

    Above temperature 0, each comes under both rules of rejection. The rule "coupled" is there for
    its texts: block verification accepts more.
    """
    params = [DecodeParams()]
    params += [DecodeParams(draft_policy="fixed", n_draft=n) for n in LENGTHS]
    params += [DecodeParams(draft_policy="confidence", n_draft=8, p_min=p) for p in _CONFIDENCES]
    if temperature > 0:
        params += [replace(way, verification="token") for way in params]
    return params


def choose_ways(
    policy: str | None, n_draft: int | None, p_min: float | None, verification: str
) -> list[DecodeParams]:
    """The one way to draft that is described, or every way under ``verification`` if none is.

    A draft length without a policy is fixed.
    """
    if not policy and n_draft is None and p_min is None:
        return [replace(way, verification=verification) for way in list_ways(0.0)]
    policy = policy or ("auto" if n_draft is None else "fixed")
    return [
        DecodeParams(draft_policy=policy, n_draft=n_draft, p_min=p_min, verification=verification)
    ]


def record_pair(
    pair: Pair,
    tasks: Sequence[Task],
    temperatures: Sequence[float],
    sampling: SamplingParams,
    n_predict: int,
    progress: Progress = no_progress,
) -> Recording:
    """Let the target generate each task at each temperature, and record both models along it.

    ``n_predict`` is the number of tokens of each text. ``about`` of the recording has the costs of
    the pair. Raises UsageError if the texts are too short.
    """
    texts: list[TextRecording] = []
    raw = not takes_a_chat(pair, WARM_UP)
    n_all = len(tasks) * len(temperatures)
    n_done = 0
    for i, task in enumerate(tasks):
        alone = DecodeParams(n_predict=n_predict, n_draft=0, seed=i)
        for temperature in temperatures:
            at_temperature = replace(sampling, temperature=temperature)
            written = pair.generate(task.prompt, at_temperature, alone, raw=raw)
            written.read()
            if len(written.tokens) >= _FEWEST:
                tokens = [*written.prompt, *written.tokens]
                text = RecordedTokens(tokens, len(written.prompt), task.kind, temperature)
                texts.append(_record_text(pair, text))
            n_done += 1
            progress("recording", n_done, n_all)
    if not texts:
        raise UsageError(
            "the target's texts are too short to record",
            hint="record longer texts with --n-predict, or choose another target",
        )
    at_temperature = replace(sampling, temperature=temperatures[-1])
    costs = measure_live_costs(pair, WARM_UP, at_temperature, progress)
    about = {"costs": {"c": costs.of_model, "v": {str(n): x for n, x in costs.v.items()}}}
    return Recording(about, tuple(texts))


def _record_text(pair: Pair, text: RecordedTokens) -> TextRecording:
    with pair.sequences() as own:
        assert own.draft
        copy = own.kv_copy.copy if own.kv_copy else None
        return record(own.target, own.draft, text, copy)


def read_costs(recording: Recording) -> Costs | None:
    """The costs that were measured with a recording; None for a synthetic one."""
    costs = recording.about.get("costs")
    if not costs:
        return None
    return Costs({"model": float(costs["c"])}, {int(n): float(x) for n, x in costs["v"].items()})


def replay_ways(
    recording: Recording,
    costs: Costs,
    sampling: SamplingParams,
    params: Sequence[DecodeParams],
    *,
    share_kv: bool,
    progress: Progress = no_progress,
) -> list[Tried]:
    """Replay each way; the fastest first."""
    tried = []
    # A synthetic recording is long enough to replay it once.
    options = ReplayOptions(share_kv, repeats=1 if recording.is_synthetic else 4)
    for i, way in enumerate(params):
        tried.append(Tried(way, replay(recording, costs, sampling, way, options)))
        progress("replaying", i + 1, len(params))
    return sorted(tried, key=lambda way: -way.replayed.speedup)


def confirm(
    pair: Pair,
    tasks: Sequence[Task],
    sampling: SamplingParams,
    tried: Sequence[Tried],
    n_predict: int,
    progress: Progress = no_progress,
) -> Iterator[Tried]:
    """Run each of ``tried`` live on ``tasks``, beside the target alone; auto comes first."""
    of_auto: list[Sample] = []
    tried = sorted(tried, key=lambda way: way.name != AUTO)
    for way in tried:
        params = replace(way.params, n_predict=n_predict, seed=1)

        def step(what: str, done: float, of: float, name: str = way.name) -> None:
            if what == bench.MEASURING:
                progress(f"confirming {name}", done, of)

        samples = list(bench.measure(pair, tasks, [sampling], params, progress=step))
        total = fold(samples, pair.learned.costs.medians()).total
        of_auto = of_auto or samples
        over_auto = compare_with_auto(samples, of_auto)
        yield replace(way, live=total.speedup, live_alpha=total.alpha, over_auto=over_auto)


def compare_with_auto(samples: Sequence[Sample], of_auto: Sequence[Sample]) -> Ratio | None:
    """Return the speed of a way over that of auto on the same tasks, with its interval.

    The ways ran one after the other. So each text counts in the tokens that the target alone wrote
    per second beside it, which takes out that the machine was faster or slower in those minutes.
    """

    def settled(sample: Sample) -> TimedText:
        alone = sample.alone
        per_second = alone.n_tokens / alone.seconds if alone.seconds else 0.0
        return TimedText(sample.ours.n_tokens, sample.ours.seconds * per_second)

    return speed_ratio([settled(s) for s in samples], [settled(s) for s in of_auto])


def choose_winner(tried: Sequence[Tried]) -> Tried:
    """Return auto, or the fastest way live that is certainly faster than auto.

    Certainly: the whole interval of its speed over that of auto is above 1. Only auto stops
    drafting if drafts do not pay off, so a replay or the luck of a few texts is not enough.
    """
    certain = [way for way in tried if way.over_auto and (way.over_auto.low or 0.0) > 1]
    auto = next(way for way in tried if way.name == AUTO)
    return max(certain, key=lambda way: way.over_auto.value if way.over_auto else 0.0, default=auto)


def list_fixed(tried: Sequence[Tried]) -> list[Tried]:
    """The ways with a fixed draft length that verify drafts as a whole, as they come."""
    return [
        way
        for way in tried
        if way.params.draft_policy == "fixed" and way.params.verification == "block"
    ]


def choose_n_draft(tried: Sequence[Tried]) -> int | None:
    """The draft length of the fastest of ``list_fixed`` by the replay; None if none pays off."""
    best = max(list_fixed(tried), key=lambda way: way.replayed.speedup, default=None)
    return best.params.n_draft if best and best.replayed.speedup > 1 else None


def conclude_replay(tried: Sequence[Tried]) -> str:
    """Say which way is the fastest by the replay."""
    best = max(tried, key=lambda way: way.replayed.speedup)
    if best.replayed.speedup <= 1:
        return "no way to draft pays off at these costs: the target alone is the fastest"
    alpha = "" if best.replayed.alpha is None else f" at alpha {best.replayed.alpha:.3f}"
    return f"{best.name} is the fastest: {best.replayed.speedup:.2f} times the target alone{alpha}"


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
