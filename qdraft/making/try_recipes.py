"""Which draft of a target is the fastest on this machine: recipes tried, measured and ranked."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from qdraft.decoding.engine import Engine
from qdraft.decoding.policy.model import best_n_draft
from qdraft.errors import QDraftError
from qdraft.llama.params import EngineParams
from qdraft.llama.quantize import Recipe, quantize
from qdraft.llama.spec import PairSpec
from qdraft.making.overlap import Overlap, overlap
from qdraft.pairs.packages import Progress
from qdraft.session.opening import open_spec

log = logging.getLogger(__name__)

Clock = Callable[[], float]

WIDTHS = range(2, 10)  # rows of a verify batch: drafts of 1 to 8 tokens
_REPEATS = 7
_DEPTH = 64  # tokens before the rows that are timed


@dataclass(frozen=True, slots=True)
class Rung:
    """One recipe that was tried: what it costs, what it is worth, and what that makes.

    ``alpha`` is sum min(p, q) at temperature 1, of the first draft token. ``predicted`` is the
    cost model's best speed-up, with ``n_draft`` tokens a round; 1 and 0 where none pays.
    """

    recipe: Recipe
    n_bytes: int
    overlap: Overlap
    shares_kv: bool
    c: float
    n_draft: int
    predicted: float

    @property
    def alpha(self) -> float:
        return self.overlap.sum_min


def recipes(matrix: Path | None, n_layers: int | None) -> list[Recipe]:
    """What is worth trying: types, Q2_K with attention kept higher, and with layers left out."""
    two = Recipe("Q2_K", matrix)
    found = [Recipe(kind, matrix) for kind in ("Q4_K_M", "Q4_0", "Q3_K_M")]
    if matrix:
        found += [Recipe(kind, matrix) for kind in ("IQ3_XXS", "IQ2_S")]
    found += [two, replace(two, tensor_types=(("attn_", "q4_k"),))]
    if n_layers and n_layers >= 8:
        # Every eighth layer but the first and the last ones, which matter most.
        found.append(replace(two, prune_layers=tuple(range(4, n_layers - 2, 8))))
    return found


def try_recipes(
    target: Path,
    candidates: Sequence[Recipe],
    texts: Sequence[tuple[int, Sequence[int]]],
    params: EngineParams,
    folder: Path,
    *,
    threads: int,
    clock: Clock,
    progress: Progress | None = None,
) -> list[Rung]:
    """Quantize, load and measure each of ``candidates`` in turn; the fastest first.

    The files are made in ``folder`` and removed again. v is measured once, c for each.
    """
    rungs: list[Rung] = []
    v: dict[int, float] = {}
    failed: QDraftError | None = None
    for i, recipe in enumerate(candidates):
        if progress:
            progress("trying recipes", i, len(candidates))
        path = folder / f"try-{i}.gguf"
        try:
            made = quantize(target, path, recipe, threads=threads)
            with open_spec(PairSpec.of(target, path, params, keep_draft=True)) as pair:
                assert pair.draft_engine
                engines = (pair.target_engine, pair.draft_engine)
                copy = pair.courier.copy if pair.courier else None
                found = overlap(*engines, texts, copy)
                c, v = measure_costs(*engines, clock, v)
                n_draft, predicted = best_n_draft(found.sum_min, c, v)
                rungs.append(
                    Rung(recipe, made.n_bytes, found, copy is not None, c, n_draft, predicted)
                )
        except QDraftError as error:  # rows that do not fit, a matrix that lacks a tensor
            log.warning("%s cannot be tried: %s", recipe.file_type, error)
            failed = error
        finally:
            path.unlink(missing_ok=True)
    if progress:
        progress("trying recipes", len(candidates), len(candidates))
    if not rungs and failed:
        raise failed
    return sorted(rungs, key=lambda rung: -rung.predicted)


def measure_costs(
    target: Engine, draft: Engine, clock: Clock, v: dict[int, float] | None = None
) -> tuple[float, dict[int, float]]:
    """c, and v by number of rows (as given, where it is known): medians of interleaved repeats."""
    tokens = [i % target.vocab.n_tokens for i in range(1, _DEPTH + max(WIDTHS) + 1)]

    def seconds(engine: Engine, n: int) -> float:
        engine.truncate(_DEPTH)
        started = clock()
        engine.eval(tokens[_DEPTH : _DEPTH + n], n)
        return clock() - started

    for engine in (target, draft):
        engine.truncate(0)
        engine.eval(tokens[:_DEPTH], 0)
        seconds(engine, 1)  # warm
    wanted = [] if v else list(WIDTHS)
    times: dict[int, list[float]] = {n: [] for n in (0, 1, *wanted)}
    for _ in range(_REPEATS):
        times[0].append(seconds(draft, 1))
        for n in (1, *wanted):
            times[n].append(seconds(target, n))
    for engine in (target, draft):
        engine.truncate(0)
    one = median(times[1])
    return median(times[0]) / one, v or {n: median(times[n]) / one for n in wanted}
