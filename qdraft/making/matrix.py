"""The importance matrix of a target, collected from the target itself."""

from __future__ import annotations

import logging
from pathlib import Path

from qdraft.errors import ModelFileError
from qdraft.gguf.facts import Facts
from qdraft.gguf.header import read_header
from qdraft.gguf.imatrix import load
from qdraft.llama.imatrix import collect
from qdraft.llama.model import LlamaModel
from qdraft.llama.params import EngineParams
from qdraft.llama.progress import Progress, no_progress, renamed
from qdraft.llama.spec import ModelSpec, PairSpec
from qdraft.making.calibration import PROMPTS, built_in_text, to_chunks, write_texts
from qdraft.session.opening import fit, open_spec

log = logging.getLogger(__name__)


def check_matrix(path: Path, target: Facts) -> None:
    """Check that a file is an importance matrix of ``target``; warn of matrices without data.

    Raises ModelFileError if it is not one, or if its entries are not those of the target's tensors.
    """
    matrix = load(path)
    headers = [read_header(part) for part in target.parts]
    shapes = {tensor.name: tensor.shape for header in headers for tensor in header.tensors}
    try:
        matrix.require_shapes(shapes)
    except ValueError as error:
        raise ModelFileError(
            f"{path} is the importance matrix of another model than {target.path.name}: {error}",
            hint="give that of this model, or none: qdraft then collects it",
        ) from None
    n_gaps, n_all = matrix.count_gaps(shapes)
    if n_gaps:
        log.warning(
            "%s has no data for %d of the %d matrices of %s: qdraft quantizes them as if all "
            "columns mattered equally",
            path,
            n_gaps,
            n_all,
            target.path.name,
        )


def make_matrix(  # noqa: PLR0913 (where from, where to, and over what)
    target: Path,
    path: Path,
    params: EngineParams,
    *,
    text: str | None = None,
    parse_special: bool = False,
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
            texts = write_texts(pair, PROMPTS, n_written, pair.recommended.params(), step)
            written = [tokens for _, tokens in texts]
    params = fit(ModelSpec(target, params)).params
    model = LlamaModel(target, params)
    try:
        vocab = model.vocab
        given = vocab.tokenize(
            built_in_text() if text is None else text, parse_special=parse_special
        )
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
