"""Collecting an importance matrix: what flows into each weight while the model reads a text.

llama.cpp's scheduler asks a callback for every node of the graph whether it wants to see it. The
collector wants those that multiply a weight with activations. It reads the activations from the
CPU or the device that holds them, and sums their squares (see ``qdraft.gguf.imatrix``).
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qdraft.errors import EngineError
from qdraft.gguf.imatrix import ImportanceMatrix
from qdraft.host import default_threads
from qdraft.llama.interrupts import interruptible
from qdraft.llama.model import LlamaModel
from qdraft.llama.native import function, lib, native_errors
from qdraft.llama.params import EngineParams
from qdraft.llama.progress import Progress, no_progress

CHUNK = 512  # tokens that the model reads as one text
_STEP = 128  # tokens of a decode: each of them gets a row of logits, which takes memory
_F32, _I32 = 0, 26  # ggml_type


class GgmlTensor(ctypes.Structure):
    """struct ggml_tensor of ggml.h, which the binding leaves opaque."""


GgmlTensor._fields_ = [
    ("type", ctypes.c_int),
    ("buffer", ctypes.c_void_p),
    ("ne", ctypes.c_int64 * 4),
    ("nb", ctypes.c_size_t * 4),
    ("op", ctypes.c_int),
    ("op_params", ctypes.c_int32 * 16),
    ("flags", ctypes.c_int32),
    ("src", ctypes.POINTER(GgmlTensor) * 10),
    ("view_src", ctypes.c_void_p),
    ("view_offs", ctypes.c_size_t),
    ("data", ctypes.c_void_p),
    ("name", ctypes.c_char * 64),
    ("extra", ctypes.c_void_p),
    ("padding", ctypes.c_char * 8),
]


class _Ggml:
    """The few functions of ggml that the collector needs, bound once."""

    def __init__(self) -> None:
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        self.name = function("ggml_get_name", ctypes.c_char_p, pointer)
        self.n_bytes = function("ggml_nbytes", size, pointer)
        self.get = function("ggml_backend_tensor_get", None, pointer, pointer, size, size)
        op_name = function("ggml_op_name", ctypes.c_char_p, ctypes.c_int)
        ops = {op_name(op): op for op in range(80)}
        self.mul_mat, self.mul_mat_id = ops[b"MUL_MAT"], ops[b"MUL_MAT_ID"]

    def require_layout(self, address: int) -> None:
        """Raise EngineError if this build's ggml_tensor differs from the one bound here."""
        tensor = ctypes.cast(address, ctypes.POINTER(GgmlTensor)).contents
        if tensor.name != self.name(address) or _extent(tensor) != self.n_bytes(address):
            raise EngineError("this build of llama.cpp has a ggml_tensor that qdraft does not know")

    def read(self, tensor: Any) -> NDArray[Any]:
        """Copy the elements of an F32 or I32 tensor, shape ne[3], ne[2], ne[1], ne[0]."""
        kind = {_F32: np.float32, _I32: np.int32}.get(tensor.type)
        if kind is None:
            raise EngineError(f"qdraft cannot read activations of ggml type {tensor.type}")
        n = _extent(tensor)
        data = np.empty(n, dtype=np.uint8)
        self.get(ctypes.addressof(tensor), data.ctypes.data, 0, n)
        shape, strides = tuple(tensor.ne)[::-1], tuple(tensor.nb)[::-1]
        elements: NDArray[Any] = data.view(kind)
        copied: NDArray[Any] = np.lib.stride_tricks.as_strided(elements, shape, strides).copy()
        return copied


@lru_cache(maxsize=1)
def _ggml() -> _Ggml:
    return _Ggml()


def _extent(tensor: Any) -> int:
    """Return ggml_nbytes of a tensor whose elements are not in blocks."""
    strides = zip(tensor.ne, tensor.nb, strict=True)
    return int(tensor.nb[0] + sum((n - 1) * stride for n, stride in strides))


class _Collector:
    """The callback; it stores its error, because native code cannot raise it."""

    def __init__(self, matrix: ImportanceMatrix) -> None:
        self.matrix = matrix
        self.error: Exception | None = None
        self._ggml = _ggml()
        self._checked = False

    def __call__(self, address: int, ask: bool, _user_data: object) -> bool:
        if self.error:
            return False
        try:
            tensor = ctypes.cast(address, ctypes.POINTER(GgmlTensor)).contents
            if not self._checked and tensor.type == _F32:
                self._ggml.require_layout(address)
                self._checked = True
            name = self._weight(tensor)
            if ask or name is None:
                return name is not None or not ask
            self._take(tensor, name)
        except Exception as error:
            self.error = error
        return True

    def _weight(self, tensor: Any) -> str | None:
        """Return the weight of a layer that this node multiplies, by name; None for other nodes."""
        if tensor.op not in (self._ggml.mul_mat, self._ggml.mul_mat_id):
            return None
        name = tensor.src[0].contents.name.decode()
        if "#" in name:  # a copy of the scheduler: BACKEND#name#number
            name = name.split("#")[1]
        is_of_layer = name.startswith("blk.") and name.endswith(".weight")
        return name if is_of_layer and tensor.src[1].contents.type == _F32 else None

    def _take(self, tensor: Any, name: str) -> None:
        weight = tensor.src[0].contents
        rows = self._ggml.read(tensor.src[1].contents)
        n_columns = rows.shape[-1]
        if tensor.op == self._ggml.mul_mat_id:
            # [1, n_tokens, n_used or 1, columns]: row (token, slot) goes to expert ids[token, slot]
            ids = self._ggml.read(tensor.src[2].contents)[0, 0]
            rows = np.broadcast_to(rows[0], (*ids.shape, n_columns))
            for expert in np.unique(ids):
                self.matrix.add(name, int(expert), int(weight.ne[2]), rows[ids == expert])
            return
        n_matrices = int(weight.ne[2] * weight.ne[3])
        for i3, i2 in np.ndindex(rows.shape[:2]):
            matrix = (i3 % weight.ne[3]) * weight.ne[2] + i2 % weight.ne[2]
            self.matrix.add(name, int(matrix), n_matrices, rows[i3, i2])


def collect(
    model: LlamaModel,
    chunks: Sequence[Sequence[int]],
    params: EngineParams,
    *,
    progress: Progress = no_progress,
) -> ImportanceMatrix:
    """Return the importance matrix of a model over ``chunks``, each read as a text of its own.

    The model must be loaded without repacked weights, which hide their inputs. Raises EngineError
    if decoding fails. KeyboardInterrupt ends it within a step of 128 tokens.
    """
    matrix = ImportanceMatrix(chunk_size=CHUNK)
    collector = _Collector(matrix)
    action = "collecting the importance matrix"
    with _open_context(model, max(map(len, chunks)), params, collector) as context:
        for n_done, chunk in enumerate(chunks):
            progress(action, n_done, len(chunks))
            _read(context, chunk, collector)
            matrix.n_chunks += 1
        progress(action, len(chunks), len(chunks))
    return matrix


@contextmanager
def _open_context(
    model: LlamaModel, n_ctx: int, params: EngineParams, collector: _Collector
) -> Iterator[Any]:
    """Make a llama_context that calls the collector, and free it at the end."""
    native_params = lib().llama_context_default_params()
    native_params.n_ctx = n_ctx
    native_params.n_batch = native_params.n_ubatch = _STEP
    n_threads = params.n_threads or default_threads()
    native_params.n_threads = native_params.n_threads_batch = n_threads
    native_params.no_perf = True
    callback = lib().ggml_backend_sched_eval_callback(collector)
    native_params.cb_eval = callback
    native_params.held = model, callback
    with native_errors() as errors:
        context = lib().llama_init_from_model(model.native, native_params)
    if not context:
        raise EngineError(f"llama.cpp cannot make a context for {model.path.name}: {errors}")
    try:
        yield context
    finally:
        lib().llama_free(context)


def _read(context: Any, chunk: Sequence[int], collector: _Collector) -> None:
    """Decode a chunk from an empty cache; raise the collector's error if it has one."""
    lib().llama_memory_clear(lib().llama_get_memory(context), False)
    batch = lib().llama_batch_init(_STEP, 0, 1)
    try:
        for start in range(0, len(chunk), _STEP):
            _fill(batch, chunk[start : start + _STEP], start)
            with interruptible(), native_errors() as errors:
                status = lib().llama_decode(context, batch)
            if collector.error:
                raise collector.error
            if status:
                raise EngineError(f"llama_decode returned {status}: {errors}")
    finally:
        lib().llama_batch_free(batch)


def _fill(batch: Any, tokens: Sequence[int], start: int) -> None:
    """Fill the batch and ask for all rows: the last layer computes only those asked for."""
    batch.n_tokens = len(tokens)
    for i, token in enumerate(tokens):
        batch.token[i] = token
        batch.pos[i] = start + i
        batch.n_seq_id[i] = 1
        batch.seq_id[i][0] = 0
        batch.logits[i] = 1
