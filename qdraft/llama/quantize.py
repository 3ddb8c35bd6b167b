"""Quantizing a GGUF with llama.cpp, in a child process so that it can be interrupted."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from qdraft.errors import EngineError, UsageError
from qdraft.gguf.imatrix import load as load_imatrix
from qdraft.llama.child import command
from qdraft.paths import new_file

Progress = Callable[[int, int], None]  # steps done, of

_TENSOR_LINE = re.compile(r"\[\s*(\d+)/\s*(\d+)\]")
_FALLBACK_LINE = re.compile(r"WARNING: (\d+) of \d+ tensor\(s\) required fallback")
_SIZE_LINE = re.compile(r"quant size\s*=\s*([\d.]+) MiB \(([\d.]+) BPW\)")
_NEEDS_LINE = "will require an imatrix"


@dataclass(frozen=True, slots=True)
class Recipe:
    """What to quantize to.

    ``file_type`` is llama.cpp's, such as Q2_K. ``imatrix`` is the file of an importance matrix,
    ``tensor_types`` maps patterns of tensor names to types such as q6_k, as do
    ``output_tensor_type`` and ``token_embedding_type`` for those two. ``prune_layers`` are left
    out.
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
            raise UsageError("the layers to prune are numbers from 0 on")

    def _tensor_types(self) -> list[str]:
        named = [kind for _, kind in self.tensor_types]
        return [k for k in (*named, self.output_tensor_type, self.token_embedding_type) if k]


@dataclass(frozen=True, slots=True)
class Quantized:
    """What a quantization really gave: ``types`` counts the matrices by their true type."""

    path: Path
    file_type: str
    n_bytes: int
    bits_per_weight: float
    n_fallback: int
    types: dict[str, int]


@dataclass(frozen=True, slots=True)
class Planned:
    """What a quantization would give: bytes of weights, and whether it needs a matrix."""

    file_type: str
    n_bytes: int
    bits_per_weight: float
    n_fallback: int
    needs_matrix: bool


def file_types() -> dict[str, int]:
    """llama.cpp's file types by the names that its quantize tool uses."""
    import gguf

    names = {
        kind.name.removeprefix("MOSTLY_").removeprefix("ALL_"): kind for kind in gguf.LlamaFileType
    }
    return {name: int(kind) for name, kind in names.items() if name != "GUESSED"}


def tensor_types() -> dict[str, int]:
    """ggml's tensor types by name, in lower case as llama-quantize has them."""
    import gguf

    return {kind.name.lower(): int(kind) for kind in gguf.GGMLQuantizationType}


def quantize(
    source: Path, path: Path, recipe: Recipe, *, threads: int, progress: Progress | None = None
) -> Quantized:
    """Write ``source`` to ``path`` by ``recipe``, under a temporary name until complete.

    ``progress`` is called with (tensors done, tensors in all). Raises EngineError when llama.cpp
    fails; ``path`` is then as it was.
    """
    with new_file(path) as part:
        end = _run(source, part, recipe, threads, progress)
        types = _matrix_types(part)
    size = path.stat().st_size
    bits = float(end["bits_per_weight"])
    return Quantized(path, recipe.file_type, size, bits, int(end["n_fallback"]), types)


def plan(source: Path, recipe: Recipe) -> Planned:
    """What ``quantize`` would give, without writing anything. Raises EngineError likewise."""
    with tempfile.TemporaryDirectory(prefix="qdraft-") as folder:
        end = _run(source, Path(folder) / "none.gguf", recipe, 1, None, dry_run=True)
    return Planned(
        recipe.file_type,
        round(float(end["mib"]) * 2**20),
        float(end["bits_per_weight"]),
        int(end["n_fallback"]),
        bool(end["needs_matrix"]),
    )


def _run(
    source: Path,
    path: Path,
    recipe: Recipe,
    threads: int,
    progress: Progress | None,
    *,
    dry_run: bool = False,
) -> dict[str, Any]:
    """Run the child, pass its progress on, and return what it told at the end."""
    told = json.dumps({**asdict(recipe), "dry_run": dry_run}, default=str)
    child = subprocess.Popen(
        command(__name__, str(source), str(path), str(threads), told),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    assert child.stderr is not None
    last: dict[str, Any] = {}
    try:
        for line in child.stdout:
            last = json.loads(line)
            if progress and "done" in last:
                progress(last["done"], last["of"])
        said = child.stderr.read()
        status = child.wait()
    finally:
        child.kill()
        child.wait()
        child.stdout.close()
        child.stderr.close()
    if status or "n_fallback" not in last:
        reason = last.get("error") or (said.strip().splitlines() or ["no reason given"])[-1]
        raise EngineError(f"llama.cpp could not quantize {source}: {reason}")
    return last


def _matrix_types(path: Path) -> dict[str, int]:
    """Counts of the true types of all matrices (vectors always stay F32)."""
    import gguf

    tensors = gguf.GGUFReader(path).tensors
    return dict(Counter(t.tensor_type.name for t in tensors if len(t.shape) > 1).most_common())


def main(args: list[str]) -> int:
    """The child, given source, path, threads and the recipe as JSON.

    One JSON line on stdout for each tensor, and one at the end.
    """
    import logging

    from qdraft.llama.native import log, native, native_error

    source, path, threads, told = args
    recipe = json.loads(told)
    lib = native()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    end: dict[str, Any] = {"n_fallback": 0, "needs_matrix": False}

    def tell(record: logging.LogRecord) -> bool:
        message = record.getMessage()
        if found := _TENSOR_LINE.search(message):
            print(json.dumps({"done": int(found[1]), "of": int(found[2])}), flush=True)
        if found := _FALLBACK_LINE.search(message):
            end["n_fallback"] = int(found[1])
        if found := _SIZE_LINE.search(message):
            end["mib"], end["bits_per_weight"] = found[1], found[2]
        end["needs_matrix"] |= _NEEDS_LINE in message
        return False

    log.setLevel(logging.DEBUG)
    log.addFilter(tell)
    params = lib.llama_model_quantize_default_params()
    params.nthread = int(threads)
    params.allow_requantize = True
    params.dry_run = recipe["dry_run"]
    _keep = _fill(params, recipe, lib)
    status = int(lib.llama_model_quantize(source.encode(), path.encode(), params))
    print(json.dumps({"error": native_error()} if status else end), flush=True)
    return status


def _fill(params: Any, recipe: dict[str, Any], lib: Any) -> list[Any]:
    """The recipe in llama.cpp's terms; returns what has to stay alive while it runs."""
    import ctypes

    params.ftype = file_types()[recipe["file_type"]]
    known = tensor_types()
    if recipe["output_tensor_type"]:
        params.output_tensor_type = known[recipe["output_tensor_type"]]
    if recipe["token_embedding_type"]:
        params.token_embedding_type = known[recipe["token_embedding_type"]]
    keep: list[Any] = []
    # Each list is closed by an empty entry (or -1).
    if recipe["tensor_types"]:
        types = (lib.llama_model_tensor_override * (len(recipe["tensor_types"]) + 1))()
        for entry, (pattern, kind) in zip(types, recipe["tensor_types"], strict=False):
            entry.pattern, entry.type = pattern.encode(), known[kind]
        params.tt_overrides = types
        keep.append(types)
    if recipe["prune_layers"]:
        layers = (ctypes.c_int32 * (len(recipe["prune_layers"]) + 1))(*recipe["prune_layers"], -1)
        params.prune_layers = layers
        keep.append(layers)
    if recipe["imatrix"]:
        matrix = load_imatrix(Path(recipe["imatrix"]))
        entries = (lib.llama_model_imatrix_data * (len(matrix.sums) + 1))()
        for entry, name in zip(entries, matrix.sums, strict=False):
            means = matrix.means(name)
            entry.name, entry.size = name.encode(), means.size
            entry.data = means.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
            keep.append(means)
        params.imatrix = entries
        keep.append(entries)
    return keep
