"""The importance matrix of a target, collected from the target itself."""

from __future__ import annotations

from pathlib import Path

from qdraft.decoding.records import SamplingParams
from qdraft.llama.imatrix import collect
from qdraft.llama.model import LlamaModel
from qdraft.llama.params import EngineParams
from qdraft.llama.progress import Progress, no_progress, renamed
from qdraft.llama.spec import ModelSpec, PairSpec
from qdraft.making.calibration import PROMPTS, built_in_text, to_chunks, write_texts
from qdraft.session.opening import fit, open_spec


def make_matrix(  # noqa: PLR0913 (where from, where to, and over what)
    target: Path,
    path: Path,
    params: EngineParams,
    *,
    text: str | None = None,
    n_written: int = 0,
    progress: Progress = no_progress,
    overwrite: bool = True,
) -> Path:
    """Collect the importance matrix of ``target``, write it to ``path`` and return ``path``.

    It is collected over ``text`` (None: the built-in calibration text) and about ``n_written``
    tokens that the target generates. Raises UsageError if that is less than one chunk, and
    FileExistsError if ``overwrite`` is False and ``path`` exists at the end.
    """
    written: list[list[int]] = []
    if n_written:
        with open_spec(PairSpec.of(target, None, params)) as pair:
            step = renamed(progress, "writing calibration text")
            texts = write_texts(pair, PROMPTS, n_written, SamplingParams(), step)
            written = [tokens for _, tokens in texts]
    params = fit(ModelSpec(target, params)).params
    model = LlamaModel(target, params)
    try:
        vocab = model.vocab
        given = vocab.tokenize(built_in_text() if text is None else text)
        matrix = collect(
            model,
            to_chunks([given, *written], vocab.chunk_bos),
            params,
            progress=progress,
        )
    finally:
        model.close()
    matrix.datasets = ("built in" if text is None else "a file",)
    if written:
        matrix.datasets += ("written by the target",)
    matrix.save(path, overwrite=overwrite)
    return path
