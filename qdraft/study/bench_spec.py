"""The description of a bench, which can run it to the end or until an interrupt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from qdraft.decoding.records import DecodeParams, SamplingParams
from qdraft.errors import UsageError
from qdraft.llama.progress import Progress, no_progress
from qdraft.session.endless import ban_ends
from qdraft.session.pair import Pair
from qdraft.study.bench import Sample, at_temperatures, measure
from qdraft.study.bench_rows import Bench, fold
from qdraft.study.prompts import Task


@dataclass(frozen=True, slots=True)
class BenchSpec:
    """What a bench generates, and how.

    The texts of ``tasks`` are generated at each of ``temperatures``, ``repeats`` times. Under
    ``ignore_eos`` no text ends before ``params.n_predict`` tokens.
    """

    tasks: list[Task]
    temperatures: tuple[float, ...]
    repeats: int
    ignore_eos: bool
    sampling: SamplingParams
    params: DecodeParams

    def __post_init__(self) -> None:
        if self.params.n_predict < 2:
            raise UsageError("--n-predict must be at least 2 for a bench")
        if self.params.n_draft == 0:
            raise UsageError(
                "--n-draft is 0 but must be at least 1: a bench measures the target alone anyway"
            )

    def run(self, pair: Pair, progress: Progress = no_progress) -> Bench:
        """Measure every text. An interrupt ends the bench with the texts that are done.

        Raises KeyboardInterrupt if no text is done.
        """
        sampling = self.sampling
        if self.ignore_eos:
            sampling = ban_ends(sampling, pair.vocab)
        samples: list[Sample] = []
        complete = True
        try:
            for sample in measure(
                pair,
                self.tasks,
                at_temperatures(sampling, self.temperatures),
                self.params,
                repeats=self.repeats,
                progress=progress,
            ):
                samples.append(sample)  # noqa: PERF402 (an interrupt keeps these)
        except KeyboardInterrupt:
            complete = False
            if not samples:
                raise
        return fold(samples, pair.learned.costs.medians(), complete=complete)

    def describe(self) -> dict[str, Any]:
        """Return the settings for a report."""
        return {
            "n_prompts": len(self.tasks),
            "repeats": self.repeats,
            "n_predict": self.params.n_predict,
            "temperatures": self.temperatures,
            "top_k": self.sampling.top_k,
            "top_p": self.sampling.top_p,
            "min_p": self.sampling.min_p,
            "ignore_eos": self.ignore_eos,
            "drafter": self.params.drafter,
            "draft_policy": self.params.draft_policy,
            "n_draft": self.params.n_draft,
            "verify": self.params.verification,
        }
