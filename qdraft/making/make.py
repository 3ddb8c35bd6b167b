"""Making a draft: quantized from its target, loaded with it as a pair, and compared with it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from qdraft.decoding.records import SamplingParams
from qdraft.errors import UsageError
from qdraft.gguf import imatrix
from qdraft.gguf.facts import require_model
from qdraft.host import default_threads
from qdraft.llama.params import EngineParams
from qdraft.llama.progress import Progress, no_progress, renamed
from qdraft.llama.quantize import Quantized, Recipe, preview, quantize
from qdraft.llama.spec import PairSpec
from qdraft.making.calibration import write_texts
from qdraft.making.overlap import Overlap, measure_overlap
from qdraft.making.try_recipes import (
    TriedRecipe,
    list_recipes,
    prunable_layers,
    require_prunable,
    try_recipes,
)
from qdraft.paths import scratch_folder
from qdraft.session.opening import open_spec

# Held out: the calibration text has none of these prompts.
_PROMPTS = (
    "Write a short Python program that finds the longest line of a file.",
    "Why do leaves change their colour in autumn?",
    "Tell me a story about a ship that is looking for its captain.",
)
N_CTX = 1024  # context of the models while a draft is made
_N_SEARCHED = 90  # tokens of held-out text to compare each recipe of a search over


@dataclass(frozen=True, slots=True)
class Quality:
    """How well one draft stands in for the target, with the target's KV cells and with its own.

    ``shared`` is None if the pair cannot share the cells.
    """

    shared: Overlap | None
    own: Overlap


@dataclass(frozen=True, slots=True)
class Made:
    """A draft that was made, the importance matrix it was made with, and how good it is.

    ``plain`` is the quality of the same recipe without an importance matrix; None if the draft
    itself has none, or if its type needs one. ``quality`` is None if nothing was compared.
    """

    draft: Quantized
    matrix: Path | None
    quality: Quality | None
    plain: Quality | None


def make_draft(  # noqa: PLR0913 (what is made of what, and how it is judged)
    target: Path,
    path: Path,
    recipe: Recipe,
    *,
    threads: int = 0,
    n_measured: int = 180,
    progress: Progress = no_progress,
    overwrite: bool = True,
) -> Made:
    """Quantize ``target`` to ``path`` by ``recipe``, load both as a pair, and compare them.

    ``n_measured`` is the number of tokens of held-out text to compare over; 0 compares nothing.
    ``overwrite`` False keeps a file that appears at ``path`` meanwhile. Raises UsageError if
    ``path`` is the target or a part of it, PairError if the result is not a draft of it, and what
    ``quantize`` raises.
    """
    facts = require_model(target)
    require_prunable(facts, recipe)
    target = facts.path
    if path.exists() and any(path.samefile(part) for part in facts.parts):
        raise UsageError(f"{path} is the target itself and would be overwritten")
    if recipe.imatrix:
        imatrix.load(recipe.imatrix)  # raises for a damaged matrix before anything is written
    n_threads = threads or default_threads()
    draft = quantize(
        target, path, recipe, threads=n_threads, progress=progress, overwrite=overwrite
    )
    params = EngineParams(n_ctx=N_CTX, n_threads=threads)
    if not n_measured:
        with open_spec(
            PairSpec.of(target, path, params, keep_draft=True)
        ):  # proves that it is a draft
            return Made(draft, recipe.imatrix, None, None)
    texts = write_held_out(target, params, n_measured, progress)
    quality = measure_quality(target, path, params, texts, progress)
    bare = replace(recipe, imatrix=None)
    if not recipe.imatrix or preview(target, bare).needs_matrix:
        return Made(draft, recipe.imatrix, quality, None)
    with scratch_folder(path.parent) as folder:
        other = folder / f"plain-{path.stem}"  # not .gguf: no scan should list it
        quantize(target, other, bare, threads=n_threads, progress=progress)
        plain = measure_quality(target, other, params, texts, progress)
    return Made(draft, recipe.imatrix, quality, plain)


def search_draft(
    target: Path,
    candidates: list[Recipe] | None,
    matrix: Path | None,
    *,
    folder: Path | None = None,
    threads: int = 0,
    progress: Progress = no_progress,
) -> list[TriedRecipe]:
    """Try ``candidates`` (None: ``list_recipes``) on this machine; the fastest first.

    The files are made in ``folder`` (None: beside the target) and removed again.
    """
    params = EngineParams(n_ctx=N_CTX, n_threads=threads)
    facts = require_model(target)
    candidates = candidates or list_recipes(matrix, prunable_layers(facts))
    texts = write_held_out(target, params, _N_SEARCHED, progress)
    with scratch_folder(folder or target.parent) as temporary:
        return try_recipes(
            target,
            candidates,
            texts,
            params,
            folder=temporary,
            progress=progress,
        )


def measure_quality(
    target: Path,
    draft: Path,
    params: EngineParams,
    texts: list[tuple[int, list[int]]],
    progress: Progress = no_progress,
) -> Quality:
    """Compare ``draft`` with the target over ``texts``, as ``measure_overlap`` takes them."""
    step = renamed(progress, f"measuring {draft.name}")
    spec = PairSpec.of(target, draft, params, keep_draft=True)
    with open_spec(spec) as pair, pair.sequences() as own:
        assert own.draft
        shared = None
        if own.kv_copy:
            shared = measure_overlap(own.target, own.draft, texts, own.kv_copy.copy, step)
        return Quality(shared, measure_overlap(own.target, own.draft, texts, progress=step))


def write_held_out(
    target: Path, params: EngineParams, n_tokens: int, progress: Progress = no_progress
) -> list[tuple[int, list[int]]]:
    """Let the target generate ``n_tokens`` tokens of held-out text at temperature 1.

    Returns the number of prompt tokens and all tokens of each text.
    """
    plain = SamplingParams(temperature=1, top_k=0, top_p=1, min_p=0)
    with open_spec(PairSpec.of(target, None, params)) as pair:
        step = renamed(progress, "writing held-out text")
        return write_texts(pair, _PROMPTS, n_tokens, plain, step)
