"""Which draft of a target is the fastest on this machine: recipes tried, measured and ranked."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from qdraft.decoding.policy.model import Costs, best_n_draft
from qdraft.errors import ParameterError, QDraftError
from qdraft.gguf.facts import Facts
from qdraft.host import default_threads
from qdraft.llama.params import EngineParams
from qdraft.llama.progress import Progress, no_progress
from qdraft.llama.quantize import Recipe, quantize
from qdraft.llama.spec import PairSpec
from qdraft.making.costs import measure_costs
from qdraft.making.overlap import Overlap, measure_overlap
from qdraft.session.opening import open_spec
from qdraft.session.pair import Pair

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TriedRecipe:
    """One recipe that was tried: what its draft costs, how well it agrees, and what follows.

    ``predicted`` is the cost model's best speed-up, with ``n_draft`` tokens a round; 1 and 0 if
    no draft length pays off.
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
        """sum min(p, q) at temperature 1, of the first draft token."""
        return self.overlap.sum_min

    @property
    def pays_off(self) -> bool:
        """True if the draft is expected to pay off with any draft length."""
        return self.n_draft > 0


def list_recipes(matrix: Path | None, n_layers: int | None) -> list[Recipe]:
    """The recipes worth trying: types, Q2_K with attention kept higher, and layers left out."""
    two_bits = Recipe("Q2_K", matrix)
    recipes = [Recipe(kind, matrix) for kind in ("Q4_K_M", "Q4_0", "Q3_K_M")]
    if matrix:
        recipes += [Recipe(kind, matrix) for kind in ("IQ3_XXS", "IQ2_S")]
    recipes += [two_bits, replace(two_bits, tensor_types=(("attn_", "q4_k"),))]
    if n_layers and n_layers >= 8:
        # Every eighth layer, but not the first and the last ones, which matter most.
        recipes.append(replace(two_bits, prune_layers=tuple(range(4, n_layers - 2, 8))))
    return recipes


def prunable_layers(facts: Facts) -> int:
    """Return the number of layers from which some can be left out; 0 for a hybrid.

    llama.cpp numbers the layers that stay anew. It does not change the file's lists and periods
    that say which layers are recurrent.
    """
    alike = facts.n_recurrent_layers in (0, facts.n_layers)
    return (facts.n_layers or 0) if alike else 0


def require_prunable(facts: Facts, recipe: Recipe) -> None:
    """Raise ParameterError if ``recipe`` leaves out layers of a hybrid."""
    if recipe.prune_layers and not prunable_layers(facts):
        raise ParameterError(
            f"prune_layers does not work with {facts.path.name}, a hybrid: llama.cpp would take "
            "the layers that stay for others, recurrent ones for attention",
            hint="leave it out",
        )


def try_recipes(
    target: Path,
    candidates: Sequence[Recipe],
    texts: Sequence[tuple[int, Sequence[int]]],
    params: EngineParams,
    *,
    folder: Path,
    progress: Progress = no_progress,
) -> list[TriedRecipe]:
    """Quantize, load and measure each of ``candidates`` in turn; the fastest first.

    The files are made in ``folder`` and removed again. v is measured once, c for each candidate.
    A candidate that fails is left out with a warning. Raises its QDraftError if all of them fail.
    """
    tried: list[TriedRecipe] = []
    v: Mapping[int, float] = {}
    failure: QDraftError | None = None
    threads = params.n_threads or default_threads()
    for i, recipe in enumerate(candidates):
        progress("trying recipes", i, len(candidates))
        path = folder / f"try-{i}"  # not .gguf: no scan should list it
        try:
            n_bytes = quantize(target, path, recipe, threads=threads).n_bytes
            with open_spec(PairSpec.of(target, path, params, keep_draft=True)) as pair:
                agreement, costs = _measure(pair, texts, v)
                v = costs.v
                tried.append(_predict(recipe, n_bytes, agreement, costs, pair.kv.shared))
        except QDraftError as error:  # rows that do not fit, a matrix that lacks a tensor
            log.warning("%s cannot be tried: %s", recipe.file_type, error)
            failure = error
        finally:
            path.unlink(missing_ok=True)
    progress("trying recipes", len(candidates), len(candidates))
    if not tried and failure:
        raise failure
    return sorted(tried, key=lambda recipe: -recipe.predicted)


def conclude_search(ladder: Sequence[TriedRecipe]) -> str:
    """Say which recipe wins, and why; ``ladder`` has the fastest first."""
    first = ladder[0]
    if not first.pays_off:
        return "no recipe is expected to pay off on this machine: choose a bigger target"
    why = f"{first.recipe.label}: {first.predicted:.2f} times the target alone is predicted"
    if len(ladder) > 1:
        other = ladder[1]
        why += (
            f"; {other.recipe.label} is predicted at {other.predicted:.2f}, with alpha "
            f"{other.alpha:.3f} and c {other.c:.2f} against {first.alpha:.3f} and {first.c:.2f}"
        )
    return why


def _measure(
    pair: Pair,
    texts: Sequence[tuple[int, Sequence[int]]],
    v: Mapping[int, float],
) -> tuple[Overlap, Costs]:
    """How well the draft agrees with the target, and what both cost."""
    with pair.sequences() as own:
        assert own.draft
        copy = own.kv_copy.copy if own.kv_copy else None
        agreement = measure_overlap(own.target, own.draft, texts, copy)
        return agreement, measure_costs(own.target, own.draft, time.perf_counter, v)


def _predict(
    recipe: Recipe, n_bytes: int, agreement: Overlap, costs: Costs, shares_kv: bool
) -> TriedRecipe:
    c = costs.of_model
    n_draft, predicted = best_n_draft(agreement.sum_min, c, costs.v)
    return TriedRecipe(recipe, n_bytes, agreement, shares_kv, c, n_draft, predicted)
