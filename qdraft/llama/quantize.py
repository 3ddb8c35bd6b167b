"""Quantizing a GGUF with llama.cpp, in a child process so that it can be interrupted."""

from __future__ import annotations

import ctypes
import logging
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from qdraft.disk import require_space
from qdraft.errors import DiskSpaceError, EngineError, ParameterError, UsageError
from qdraft.gguf.header import read_header
from qdraft.gguf.imatrix import load as load_imatrix
from qdraft.llama import logs
from qdraft.llama.child import run_job
from qdraft.llama.progress import Progress, no_progress, renamed
from qdraft.paths import new_file

MOST_BYTES = 4  # of a weight in any type: F32


@dataclass(frozen=True, slots=True)
class Recipe:
    """What to quantize to.

    ``file_type`` is llama.cpp's, for example Q2_K. ``imatrix`` is the file of an importance matrix.
    ``tensor_types`` pairs patterns of tensor names with types, for example q6_k;
    ``output_tensor_type`` and ``token_embedding_type`` set the types of these two tensors.
    ``prune_layers`` are the layers to leave out.
    """

    file_type: str
    imatrix: Path | None = None
    tensor_types: tuple[tuple[str, str], ...] = ()
    output_tensor_type: str | None = None
    token_embedding_type: str | None = None
    prune_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.file_type not in file_types():
            known = ", ".join(file_types())
            raise UsageError(f"unknown file type {self.file_type}", hint=f"known: {known}")
        for kind in self._tensor_types():
            if kind not in tensor_types():
                known = ", ".join(tensor_types())
                raise UsageError(f"unknown tensor type {kind}", hint=f"known: {known}")
        if any(layer < 0 for layer in self.prune_layers):
            raise ParameterError(
                f"prune_layers is {self.prune_layers} but must be numbers from 0 on"
            )

    @property
    def label(self) -> str:
        """The recipe in a few words."""
        parts = [self.file_type, *(f"{name}={kind}" for name, kind in self.tensor_types)]
        if self.prune_layers:
            parts.append(f"without {len(self.prune_layers)} layers")
        return " ".join(parts)

    def _tensor_types(self) -> list[str]:
        by_pattern = [kind for _, kind in self.tensor_types]
        kinds = (*by_pattern, self.output_tensor_type, self.token_embedding_type)
        return [kind for kind in kinds if kind]


@dataclass(frozen=True, slots=True)
class Quantized:
    """The result of a quantization; ``types`` counts the matrices by their true type."""

    path: Path
    file_type: str
    n_bytes: int
    bits_per_weight: float
    n_fallback: int
    types: dict[str, int]


@dataclass(frozen=True, slots=True)
class QuantizePreview:
    """The result that a quantization would have, and whether it needs an importance matrix."""

    file_type: str
    n_bytes: int
    bits_per_weight: float
    n_fallback: int
    needs_matrix: bool


def file_types() -> dict[str, int]:
    """Return llama.cpp's file types by the names that its quantize tool uses."""
    import gguf

    names = {
        kind.name.removeprefix("MOSTLY_").removeprefix("ALL_"): kind for kind in gguf.LlamaFileType
    }
    return {name: int(kind) for name, kind in names.items() if name != "GUESSED"}


def tensor_types() -> dict[str, int]:
    """Return ggml's tensor types by name, in lower case as llama-quantize writes them."""
    import gguf

    return {kind.name.lower(): int(kind) for kind in gguf.GGMLQuantizationType}


def quantize(
    source: Path,
    path: Path,
    recipe: Recipe,
    *,
    threads: int,
    progress: Progress = no_progress,
    overwrite: bool = True,
) -> Quantized:
    """Write ``source`` to ``path`` by ``recipe``, under a temporary name until it is complete.

    ``progress`` gets the number of tensors that are done, and that of all. Raises EngineError if
    llama.cpp fails, DiskSpaceError if the result does not fit the disk, and FileExistsError if
    ``overwrite`` is False and ``path`` exists at the end; ``path`` then stays as it was.
    """
    progress = renamed(progress, f"building {path.name}")
    with new_file(path, overwrite=overwrite) as part:
        result = _run(source, part, recipe, threads, progress)
        types = _matrix_types(part)
    size = path.stat().st_size
    bits = float(result["bits_per_weight"])
    return Quantized(path, recipe.file_type, size, bits, int(result["n_fallback"]), types)


def preview(source: Path, recipe: Recipe) -> QuantizePreview:
    """Return what ``quantize`` would give, and write nothing. Raises EngineError as it does."""
    result = _run(source, None, recipe, 1, no_progress)
    return QuantizePreview(
        recipe.file_type,
        int(result["n_bytes"]),
        float(result["bits_per_weight"]),
        int(result["n_fallback"]),
        bool(result["needs_matrix"]),
    )


def _run(
    source: Path, path: Path | None, recipe: Recipe, threads: int, progress: Progress
) -> dict[str, Any]:
    """Return what llama.cpp reports of a quantization in a child; ``path`` None only tries."""
    request = {"source": source, "path": path, "threads": threads, "recipe": asdict(recipe)}
    what = f"llama.cpp cannot quantize {source}: the child process"
    return run_job(__name__, request, progress, what=what)


def _matrix_types(path: Path) -> dict[str, int]:
    """Count the true types of all matrices (vectors always stay F32)."""
    tensors = read_header(path).tensors
    return dict(Counter(t.type for t in tensors if len(t.shape) > 1).most_common())


class _LogReader:
    """Reports each tensor in the log, and collects what the last lines say of all."""

    def __init__(self) -> None:
        self.end: dict[str, Any] = {"n_fallback": 0, "needs_matrix": False}
        self.progress: Progress = no_progress

    def filter(self, record: logging.LogRecord) -> bool:
        """Read a line of the log; this is a filter that lets no line through."""
        message = record.getMessage()
        if tensor := logs.QUANTIZED_TENSOR.search(message):
            self.progress("quantizing", int(tensor[1]), int(tensor[2]))
        if fallbacks := logs.FALLBACKS.search(message):
            self.end["n_fallback"] = int(fallbacks[1])
        if size := logs.QUANTIZED_SIZE.search(message):
            self.end["n_bytes"] = round(float(size[1]) * 2**20)
            self.end["bits_per_weight"] = size[2]
        if logs.NEEDS_MATRIX.search(message):
            self.end["needs_matrix"] = True
        return False


def job(request: dict[str, Any], progress: Progress) -> dict[str, Any]:
    """Quantize in this process, as ``_run`` asks; a trial that writes nothing comes first.

    Raises EngineError with llama.cpp's reason, and DiskSpaceError.
    """
    from qdraft.llama.native import lib, log

    source, path = request["source"], request["path"]
    llama = lib()
    reader = _LogReader()
    log.setLevel(logging.DEBUG)
    log.addFilter(reader.filter)
    params = llama.llama_model_quantize_default_params()
    params.nthread = request["threads"]
    params.allow_requantize = True
    params.dry_run = True
    _held = _fill(params, request["recipe"], llama)
    _quantize(source, path or "none.gguf", params)
    if path:
        folder = Path(path).parent
        hint = "free some space, or choose another folder"
        require_space(folder, reader.end["n_bytes"], "the quantized file", hint)
        params.dry_run = False
        reader.progress = progress
        _quantize(source, path, params)
    return reader.end


def _quantize(source: str, path: str, params: Any) -> None:
    from qdraft.llama.native import lib, native_errors

    with native_errors() as errors:
        status = lib().llama_model_quantize(source.encode(), path.encode(), params)
    if status and "iostream" in str(errors):  # how C++ says that it cannot write
        raise DiskSpaceError(
            f"the quantized file cannot be written to {Path(path).parent}",
            hint="the disk is full, or a limit is reached: choose another folder",
        )
    if status:
        raise EngineError(f"llama.cpp cannot quantize {source}: {errors}")


def _fill(params: Any, recipe: dict[str, Any], llama: Any) -> list[Any]:
    """Write the recipe into llama.cpp's params; return what to keep alive meanwhile."""
    params.ftype = file_types()[recipe["file_type"]]
    known = tensor_types()
    if recipe["output_tensor_type"]:
        params.output_tensor_type = known[recipe["output_tensor_type"]]
    if recipe["token_embedding_type"]:
        params.token_embedding_type = known[recipe["token_embedding_type"]]
    held: list[Any] = []
    # An empty entry, or -1, ends each list.
    if recipe["tensor_types"]:
        types = (llama.llama_model_tensor_override * (len(recipe["tensor_types"]) + 1))()
        for entry, (pattern, kind) in zip(types, recipe["tensor_types"], strict=False):
            entry.pattern, entry.type = pattern.encode(), known[kind]
        params.tt_overrides = types
        held.append(types)
    if recipe["prune_layers"]:
        layers = (ctypes.c_int32 * (len(recipe["prune_layers"]) + 1))(*recipe["prune_layers"], -1)
        params.prune_layers = layers
        held.append(layers)
    if recipe["imatrix"]:
        matrix = load_imatrix(Path(recipe["imatrix"]))
        entries = (llama.llama_model_imatrix_data * (len(matrix.sums) + 1))()
        for entry, name in zip(entries, matrix.sums, strict=False):
            means = matrix.means(name)
            entry.name, entry.size = name.encode(), means.size
            entry.data = means.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
            held.append(means)
        params.imatrix = entries
        held.append(entries)
    return held
