"""Quantizing a GGUF with llama.cpp, in a child process so that it can be interrupted."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from qdraft.engine.child import command
from qdraft.errors import EngineError, UsageError
from qdraft.paths import new_file

Progress = Callable[[int, int], None]

_TENSOR_LINE = re.compile(r"\[\s*(\d+)/\s*(\d+)\]")
_FALLBACK_LINE = re.compile(r"WARNING: (\d+) of \d+ tensor\(s\) required fallback")


@dataclass(frozen=True, slots=True)
class Quantized:
    """What a quantization really gave: ``types`` counts the matrices by their true type."""

    path: Path
    file_type: str
    n_bytes: int
    n_fallback: int
    types: dict[str, int]


def file_types() -> dict[str, int]:
    """llama.cpp's file types by the names that its quantize tool uses."""
    import gguf

    names = {
        kind.name.removeprefix("MOSTLY_").removeprefix("ALL_"): kind for kind in gguf.LlamaFileType
    }
    return {name: int(kind) for name, kind in names.items() if name != "GUESSED"}


def quantize(
    source: Path, path: Path, file_type: str, *, threads: int, progress: Progress | None = None
) -> Quantized:
    """Write ``source`` to ``path`` as ``file_type``, under a temporary name until complete.

    ``progress`` is called with (tensors done, tensors in all). Raises UsageError for an
    unknown type and EngineError when llama.cpp fails; ``path`` is then as it was.
    """
    known = file_types()
    if file_type not in known:
        raise UsageError(f"unknown file type {file_type}", hint=f"known: {', '.join(known)}")
    with new_file(path) as part:
        args = (str(source), str(part), str(known[file_type]), str(threads))
        n_fallback = _run(command(__name__, *args), progress)
        types = _matrix_types(part)
    return Quantized(path, file_type, path.stat().st_size, n_fallback, types)


def _run(arguments: list[str], progress: Progress | None) -> int:
    """Run the child, pass its progress on, and return how many tensors fell back."""
    child = subprocess.Popen(
        arguments,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    assert child.stderr is not None
    last: dict[str, object] = {}
    try:
        for line in child.stdout:
            last = json.loads(line)
            if progress and "done" in last:
                progress(int(str(last["done"])), int(str(last["of"])))
        told = child.stderr.read()
        status = child.wait()
    finally:
        child.kill()
        child.wait()
        child.stdout.close()
        child.stderr.close()
    if status or "n_fallback" not in last:
        reason = last.get("error") or (told.strip().splitlines() or ["no reason given"])[-1]
        raise EngineError(f"llama.cpp could not quantize {arguments[3]}: {reason}")
    return int(str(last["n_fallback"]))


def _matrix_types(path: Path) -> dict[str, int]:
    """Counts of the true types of all matrices (vectors always stay F32)."""
    import gguf

    tensors = gguf.GGUFReader(path).tensors
    return dict(Counter(t.tensor_type.name for t in tensors if len(t.shape) > 1).most_common())


def main(args: list[str]) -> int:
    """The child, given source, path, file type and threads.

    One JSON line on stdout for each tensor, and one at the end.
    """
    import logging

    from qdraft.engine.library import log, native, native_error

    source, path, file_type, threads = args
    lib = native()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    n_fallback = 0

    def tell(record: logging.LogRecord) -> bool:
        nonlocal n_fallback
        message = record.getMessage()
        if found := _TENSOR_LINE.search(message):
            print(json.dumps({"done": int(found[1]), "of": int(found[2])}), flush=True)
        if found := _FALLBACK_LINE.search(message):
            n_fallback = int(found[1])
        return False

    log.setLevel(logging.DEBUG)
    log.addFilter(tell)
    params = lib.llama_model_quantize_default_params()
    params.ftype = int(file_type)
    params.nthread = int(threads)
    params.allow_requantize = True
    status = int(lib.llama_model_quantize(source.encode(), path.encode(), params))
    end = {"error": native_error()} if status else {"n_fallback": n_fallback}
    print(json.dumps(end), flush=True)
    return status
