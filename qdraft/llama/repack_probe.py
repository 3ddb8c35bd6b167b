"""A probe of whether llama.cpp's repacked weights are safe on this machine.

llama.cpp calls them extra buffer types: weights in another order, or in AMX tiles. Some virtual
machines advertise AMX and kill a process with SIGILL if it runs a tile instruction. No program can
catch that, so a child process tries a tiny model once for each build and CPU, and qdraft stores the
answer.
"""

from __future__ import annotations

import json
import logging
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np

from qdraft.errors import EngineError
from qdraft.host import cpu_id
from qdraft.llama.child import command
from qdraft.llama.native import build_id, lib
from qdraft.paths import cache_dir, new_file

log = logging.getLogger(__name__)

Run = Callable[[Sequence[str]], int]

# Every weight type that some CPU build repacks or moves to tiles, one layer each.
_TYPES = [
    "F16",
    "BF16",
    "Q4_0",
    "Q4_1",
    "Q5_0",
    "Q5_1",
    "Q8_0",
    "Q2_K",
    "Q3_K",
    "Q4_K",
    "Q5_K",
    "Q6_K",
    "IQ4_NL",
    "IQ4_XS",
]
_WIDTH = 256
_N_VOCAB = 64


@lru_cache(maxsize=1)
def extra_buffers_are_safe() -> bool:
    """Return the stored answer for this build and CPU; if there is none, try in a child process."""
    return ask(cache_dir() / "extra-buffers.json", f"{build_id()} | {cpu_id()}", run_child)


def ask(store: Path, key: str, run: Run) -> bool:
    """Look ``key`` up in the JSON file ``store``; if it is not there, let ``run`` try and store it.

    ``run`` gets a command line and returns its exit status. If the child dies of a signal (or of
    the Windows code for an illegal instruction), repacked weights are not safe. If it fails in an
    ordinary way, they are not safe for now, and qdraft asks again next time.
    """
    answers = _read(store)
    if key in answers:
        return answers[key]
    with tempfile.TemporaryDirectory(prefix="qdraft-") as folder:
        model = Path(folder) / "probe.gguf"
        _write_tiny_model(model)
        status = run(command(__name__, str(model)))
    crashed = status < 0 or status in (0xC000001D, 128 + 4)
    if status and not crashed:
        log.warning(
            "the probe of repacked weights failed with status %d; they stay off in this run",
            status,
        )
        return False
    try:
        with new_file(store) as part:
            part.write_text(json.dumps({**answers, key: not crashed}, indent=1), encoding="utf-8")
    except OSError as error:
        log.warning(
            "the answer of the probe of repacked weights cannot be written to %s: %s; the next run "
            "probes again",
            store,
            error.strerror,
        )
    return not crashed


def _read(store: Path) -> dict[str, bool]:
    """Return the stored answers; none if the file is missing or damaged."""
    try:
        stored = json.loads(store.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    answers = stored.items() if isinstance(stored, dict) else ()
    return {key: value for key, value in answers if isinstance(value, bool)}


def run_child(command: Sequence[str]) -> int:
    """Run a command; return its exit status, or 1 if it takes more than two minutes."""
    try:
        return subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=120
        ).returncode
    except subprocess.TimeoutExpired:
        return 1


def _write_tiny_model(path: Path) -> None:
    """Write a llama model of zeros with one layer for each weight type."""
    import gguf

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(len(_TYPES))
    writer.add_context_length(128)
    writer.add_embedding_length(_WIDTH)
    writer.add_feed_forward_length(_WIDTH)
    writer.add_head_count(4)
    writer.add_head_count_kv(4)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(_WIDTH // 4)
    writer.add_vocab_size(_N_VOCAB)
    writer.add_tokenizer_model("no_vocab")

    def matrix(name: str, rows: int, type_name: str) -> None:
        kind = gguf.GGMLQuantizationType[type_name]
        block, n_bytes = gguf.GGML_QUANT_SIZES[kind]
        zeros = np.zeros((rows, _WIDTH // block * n_bytes), dtype=np.uint8)
        writer.add_tensor(name, zeros, raw_dtype=kind)

    norm = np.ones(_WIDTH, dtype=np.float32)
    matrix("token_embd.weight", _N_VOCAB, "F16")
    writer.add_tensor("output_norm.weight", norm)
    for i, kind in enumerate(_TYPES):
        for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
            matrix(f"blk.{i}.{name}.weight", _WIDTH, kind)
        writer.add_tensor(f"blk.{i}.attn_norm.weight", norm)
        writer.add_tensor(f"blk.{i}.ffn_norm.weight", norm)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main(args: list[str]) -> int:
    """Run the child: decode batches of several widths with a model whose weights are repacked."""
    llama = lib()
    model_params = llama.llama_model_default_params()
    model_params.n_gpu_layers = 0
    model_params.use_extra_bufts = True
    model = llama.llama_model_load_from_file(args[0].encode(), model_params)
    if not model:
        raise EngineError("the probe model does not load")
    context_params = llama.llama_context_default_params()
    context_params.n_ctx = 128
    context_params.n_threads = context_params.n_threads_batch = 1
    context = llama.llama_init_from_model(model, context_params)
    for width in (1, 2, 5, 8, 33):
        tokens = (llama.llama_token * width)(*range(width))
        if llama.llama_decode(context, llama.llama_batch_get_one(tokens, width)):
            raise EngineError("the probe model does not decode")
    return 0
