"""Making a draft: an importance matrix from the target itself, quantized, and proven."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from qdraft.decoding.records import SamplingParams
from qdraft.errors import UsageError
from qdraft.gguf import imatrix
from qdraft.gguf.facts import read_facts, require_model
from qdraft.host import default_threads
from qdraft.llama.context import LlamaModel
from qdraft.llama.imatrix import collect
from qdraft.llama.params import EngineParams
from qdraft.llama.quantize import Quantized, Recipe, plan, quantize
from qdraft.llama.spec import ModelSpec, PairSpec
from qdraft.making.calibration import PROMPTS, built_in_text, to_chunks, write_texts
from qdraft.making.overlap import Overlap, overlap
from qdraft.making.try_recipes import Rung, recipes, try_recipes
from qdraft.pairs.packages import Progress
from qdraft.session.opening import fit, open_spec

# Held out: none of these stands in the calibration text.
_PROMPTS = (
    "Write a short Python program that finds the longest line of a file.",
    "Why do leaves change their colour in autumn?",
    "Tell me a story about a ship that is looking for its captain.",
)
_N_CTX = 1024


@dataclass(frozen=True, slots=True)
class Quality:
    """How well one draft stands in for the target, with the target's KV cells and with its own.

    ``shared`` is None where the cells cannot be shared.
    """

    shared: Overlap | None
    own: Overlap


@dataclass(frozen=True, slots=True)
class Made:
    """A draft that was made: what it is, the matrix it was made with, and how good it is.

    ``plain`` is a quantization of the same recipe without an importance matrix; None where the
    draft itself is one. ``quality`` is None where it was not measured.
    """

    draft: Quantized
    matrix: Path | None
    quality: Quality | None
    plain: Quality | None


def make_matrix(
    target: Path,
    path: Path,
    *,
    text: str | None = None,
    n_written: int = 2048,
    threads: int = 0,
    progress: Progress | None = None,
) -> Path:
    """Collect the importance matrix of ``target`` and write it to ``path``.

    It is taken over ``text`` (None: the built-in one) and about ``n_written`` tokens that the
    target writes itself. Raises UsageError for a text of less than one chunk.
    """
    params = EngineParams(n_ctx=_N_CTX, n_threads=threads)
    with open_spec(PairSpec.of(target, None, params)) as pair:
        vocab = pair.target_engine.vocab
        texts = [vocab.tokenize(built_in_text() if text is None else text)]
        step = _step(progress, "writing calibration text")
        written = write_texts(pair, PROMPTS, n_written, SamplingParams(), step)
        texts += [tokens for _, tokens in written]
        chunks = to_chunks(texts, vocab.chunk_bos)
    params = fit(ModelSpec(target, params)).params
    model = LlamaModel(target, params)
    try:
        what = "collecting the importance matrix"
        found = collect(model, chunks, params, progress=_step(progress, what))
    finally:
        model.close()
    found.datasets = ("built in" if text is None else "a file", "written by the target")
    found.save(path)
    return path


def make_draft(
    target: Path,
    path: Path,
    recipe: Recipe,
    *,
    threads: int = 0,
    n_places: int = 180,
    progress: Progress | None = None,
) -> Made:
    """Quantize ``target`` to ``path`` by ``recipe``, load both as a pair, and measure.

    ``n_places`` is the number of tokens of held-out text that the draft is compared over, 0 for
    no comparison. Raises UsageError where ``path`` is the target, PairError where the result is
    no draft of it, and what ``quantize`` raises.
    """
    target = require_model(target).path
    if path.exists() and path.samefile(target):
        raise UsageError(f"{path} is the target itself: it would be overwritten")
    if recipe.imatrix:
        imatrix.load(recipe.imatrix)  # names what is wrong before anything is written
    n_threads = threads or default_threads()
    made = quantize(
        target, path, recipe, threads=n_threads, progress=_step(progress, f"building {path.name}")
    )
    params = EngineParams(n_ctx=_N_CTX, n_threads=threads)
    if not n_places:
        with open_spec(PairSpec.of(target, path, params, keep_draft=True)):
            return Made(made, recipe.imatrix, None, None)
    texts = held_out(target, params, n_places, progress)
    quality = measure(target, path, params, texts, progress)
    bare = replace(recipe, imatrix=None)
    if not recipe.imatrix or plan(target, bare).needs_matrix:
        return Made(made, recipe.imatrix, quality, None)
    with tempfile.TemporaryDirectory(prefix="qdraft-", dir=path.parent) as folder:
        other = Path(folder) / f"plain-{path.name}"
        step = _step(progress, f"building {other.name}")
        quantize(target, other, bare, threads=n_threads, progress=step)
        plain = measure(target, other, params, texts, progress)
    return Made(made, recipe.imatrix, quality, plain)


def search_draft(
    target: Path,
    candidates: list[Recipe] | None,
    matrix: Path | None,
    *,
    folder: Path | None = None,
    threads: int = 0,
    n_places: int = 90,
    progress: Progress | None = None,
) -> list[Rung]:
    """Try ``candidates`` (None: what is worth trying) on this machine; the fastest first.

    The files are made in ``folder`` (None: beside the target) and removed again.
    """
    params = EngineParams(n_ctx=_N_CTX, n_threads=threads)
    candidates = candidates or recipes(matrix, read_facts(target).n_layers)
    texts = held_out(target, params, n_places, progress)
    with tempfile.TemporaryDirectory(prefix="qdraft-", dir=folder or target.parent) as work:
        return try_recipes(
            target, candidates, texts, params, Path(work),
            threads=threads or default_threads(), clock=time.perf_counter, progress=progress,
        )  # fmt: skip


def measure(
    target: Path,
    draft: Path,
    params: EngineParams,
    texts: list[tuple[int, list[int]]],
    progress: Progress | None = None,
) -> Quality:
    """How well ``draft`` stands in for ``target`` over ``texts``, as ``overlap`` takes them."""
    step = _step(progress, f"measuring {draft.name}")
    with open_spec(PairSpec.of(target, draft, params, keep_draft=True)) as pair:
        assert pair.draft_engine
        engines = (pair.target_engine, pair.draft_engine)
        shared = overlap(*engines, texts, pair.courier.copy, step) if pair.courier else None
        return Quality(shared, overlap(*engines, texts, progress=step))


def held_out(
    target: Path, params: EngineParams, n_places: int, progress: Progress | None
) -> list[tuple[int, list[int]]]:
    """Texts that the target writes at temperature 1, and how much of each is prompt."""
    plain = SamplingParams(temperature=1, top_k=0, top_p=1, min_p=0)
    with open_spec(PairSpec.of(target, None, params)) as pair:
        step = _step(progress, "writing held-out text")
        return write_texts(pair, _PROMPTS, n_places, plain, step)


def _step(progress: Progress | None, what: str) -> Callable[[int, int], None] | None:
    return None if progress is None else lambda done, of: progress(what, done, of)
