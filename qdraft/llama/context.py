"""llama.cpp as an Engine: a model, a context on it, and rows of logits without a copy."""

from __future__ import annotations

import ctypes
import os
import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qdraft.decoding.engine import n_common
from qdraft.decoding.records import MAX_N_DRAFT
from qdraft.errors import (
    ContextError,
    DeviceMemoryError,
    EngineError,
    ModelFileError,
    RollbackError,
)
from qdraft.host import default_threads
from qdraft.llama.devices import devices
from qdraft.llama.native import forget_errors, interruptible, listening, native_error
from qdraft.llama.params import EngineParams
from qdraft.llama.placed import Placed, place, read_back
from qdraft.llama.rpc import device_library, keep_alive
from qdraft.llama.vocab import LlamaVocab

LoadProgress = Callable[[float], None]

DEFAULT_N_CTX = 4096
_SHORT = re.compile(r"(unable|failed) to allocate|out of memory|alloc\w* failed", re.IGNORECASE)
_LESS = "fewer layers (-ngl, -ngld), a smaller context (-c) or cache type (-ctk, -ctv) take less"


class LlamaModel:
    """The weights of one GGUF file."""

    def __init__(
        self,
        path: Path,
        params: EngineParams,
        *,
        extra_buffers: bool = False,
        dry: bool = False,
        progress: LoadProgress | None = None,
    ) -> None:
        """Load ``path``; ``progress`` gets the share that is loaded, 0 to 1.

        ``dry`` loads and allocates no weights: contexts on it tell sizes, and decode nothing.
        Raises UsageError for devices that are not there, DeviceMemoryError where one has
        no room, and ModelFileError with llama.cpp's reason when loading fails otherwise.
        KeyboardInterrupt ends the loading.
        """
        self._lib = lib = device_library()
        self.path, self.params = path, params
        native_params = lib.llama_model_default_params()
        kept = place(native_params, params)
        native_params.use_extra_bufts = extra_buffers
        if dry:
            native_params.no_alloc, native_params.load_mode = True, lib.LLAMA_LOAD_MODE_NONE
        self.lines: list[str] = []  # what llama.cpp said while loading
        forget_errors()
        self._model = None
        try:
            with interruptible() as interrupted, listening(self.lines):

                def report(share: float, _user_data: object) -> bool:
                    if share == 0:
                        keep_alive()
                    if progress:
                        progress(share)
                    return not interrupted()

                callback = lib.llama_progress_callback(report)
                native_params.progress_callback = callback
                self._model = lib.llama_model_load_from_file(os.fsencode(path), native_params)
        except BaseException:  # an interrupt that came when it was loaded
            if self._model:
                lib.llama_model_free(self._model)
            raise
        del kept
        if not self._model:
            raise _load_error(f"{path} does not load: {native_error()}", self.lines)
        self.vocab = LlamaVocab(self._model)

    @property
    def native(self) -> Any:
        """The llama_model pointer."""
        if not self._model:
            raise EngineError(f"{self.path} is closed")
        return self._model

    @property
    def n_ctx_train(self) -> int:
        return int(self._lib.llama_model_n_ctx_train(self.native))

    @property
    def can_roll_back(self) -> bool:
        """False for recurrent and hybrid models, whose state cannot be cut to a length."""
        lib = self._lib
        return not (
            lib.llama_model_is_recurrent(self.native) or lib.llama_model_is_hybrid(self.native)
        )

    @property
    def shape(self) -> tuple[str, ...]:
        """What two quantizations of one model have in common: architecture and dimensions."""
        architecture = self._meta(b"general.architecture")
        keys = (
            "block_count", "embedding_length", "feed_forward_length", "attention.head_count",
            "attention.head_count_kv", "attention.key_length", "attention.value_length",
            "rope.freq_base",
        )  # fmt: skip
        return (architecture, *(self._meta(f"{architecture}.{key}".encode()) for key in keys))

    def _meta(self, key: bytes) -> str:
        buffer = ctypes.create_string_buffer(256)
        n = self._lib.llama_model_meta_val_str(self.native, key, buffer, len(buffer))
        return buffer.value.decode("utf-8", "replace") if n >= 0 else ""

    def close(self) -> None:
        if self._model:
            self.vocab.close()
            model, self._model = self._model, None
            with suppress(EngineError):  # the memory of a lost server is lost with it
                self._lib.llama_model_free(model)


class LlamaEngine:
    """One context on a model; ``decode_s`` adds up the seconds spent in llama_decode."""

    def __init__(
        self, model: LlamaModel, params: EngineParams, *, n_rows: int = MAX_N_DRAFT + 1
    ) -> None:
        """Make a context, of ``DEFAULT_N_CTX`` or the training context if ``n_ctx`` is None.

        ``n_rows`` is the most rows of logits of one eval. Raises EngineError on failure.
        """
        self._lib = lib = device_library()
        self.model = model
        self.vocab = model.vocab
        n_threads = params.n_threads or default_threads()
        native_params = lib.llama_context_default_params()
        n_ctx = params.n_ctx
        if n_ctx is None:
            n_ctx = min(DEFAULT_N_CTX, model.n_ctx_train)
        native_params.n_ctx = n_ctx
        native_params.n_batch = params.n_batch
        native_params.n_ubatch = params.n_ubatch
        native_params.n_outputs_max = n_rows  # else room for n_ubatch rows is reserved
        native_params.n_threads = n_threads
        native_params.n_threads_batch = params.n_threads_batch or n_threads
        native_params.type_k = getattr(lib, f"GGML_TYPE_{params.cache_type_k.upper()}")
        native_params.type_v = getattr(lib, f"GGML_TYPE_{params.cache_type_v.upper()}")
        native_params.flash_attn_type = {"auto": -1, "off": 0, "on": 1}[params.flash_attn]
        native_params.swa_full = True  # a windowed cache loses cells that a rollback needs
        native_params.n_seq_max = 2  # the text, and the courier of llama/kv_copy.py
        native_params.kv_unified = True
        native_params.offload_kqv = params.kv_offload
        native_params.no_perf = True
        lines: list[str] = []
        forget_errors()
        self._context = None
        try:
            with interruptible(), listening(lines):
                self._context = lib.llama_init_from_model(model.native, native_params)
        except BaseException:  # an interrupt that came when it was made
            if self._context:
                lib.llama_free(self._context)
            raise
        if not self._context:
            words = f"no context of {n_ctx} tokens for {model.path.name}: {native_error()}"
            raise DeviceMemoryError(words, hint=_LESS) if _is_short(lines) else EngineError(words)
        keep_alive()
        self.lines = [*model.lines, *lines]  # what llama.cpp said of the model and this context
        self.n_ctx = n_ctx or int(lib.llama_n_ctx(self._context))
        self.n_threads = n_threads
        self._step = params.n_ubatch if params.n_ubatch > MAX_N_DRAFT else params.n_batch
        self._make_batch(self._step)
        self._n_past = 0
        self.tokens: list[int] = []
        self.decode_s = 0.0

    def _make_batch(self, size: int) -> None:
        """One batch for all evals; positions and tokens are written through numpy views."""
        self._batch = batch = self._lib.llama_batch_init(size, 0, 1)
        for i in range(size):
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = 0
        self._tokens = np.ctypeslib.as_array(batch.token, shape=(size,))
        self._pos = np.ctypeslib.as_array(batch.pos, shape=(size,))
        self._wanted = np.ctypeslib.as_array(batch.logits, shape=(size,))

    @property
    def n_past(self) -> int:
        return self._n_past

    @property
    def context(self) -> Any:
        """The llama_context pointer. Raises EngineError once it is closed."""
        if not self._context:
            raise EngineError(f"the context of {self.model.path.name} is closed")
        return self._context

    @property
    def memory(self) -> Any:
        """The context's KV memory. Raises EngineError once it is closed."""
        return self._lib.llama_get_memory(self.context)

    def use_threads(self, n: int) -> None:
        """Decode with ``n`` threads from now on, batches too."""
        self._lib.llama_set_n_threads(self.context, n, n)
        self.n_threads = n

    def adopt(self, tokens: Sequence[int]) -> None:
        """The cache now holds ``tokens``, put there from outside."""
        self._n_past, self.tokens = len(tokens), list(tokens)

    def eval(self, tokens: Sequence[int], logits: int) -> NDArray[np.float32]:
        n = len(tokens)
        if self._n_past + n > self.n_ctx:
            raise ContextError(f"{self._n_past + n} tokens do not fit the context of {self.n_ctx}")
        start = 0
        while start < n:
            # Steps of one physical batch, so that Ctrl-C is heard in a long prompt; the rows
            # that are asked for all come from the last one.
            left = n - start
            size = left if left <= self._step else min(self._step, left - logits)
            self._decode(tokens[start : start + size], logits if size == left else 0)
            start += size
        if not logits:
            return np.empty((0, self.vocab.n_tokens), dtype=np.float32)
        pointer = self._lib.llama_get_logits(self._context)
        rows: NDArray[np.float32] = np.ctypeslib.as_array(
            pointer, shape=(logits, self.vocab.n_tokens)
        )
        return rows

    def _decode(self, tokens: Sequence[int], logits: int) -> None:
        n, context = len(tokens), self.context
        self._batch.n_tokens = n
        self._tokens[:n] = tokens
        self._pos[:n] = np.arange(self._n_past, self._n_past + n)
        self._wanted[:n] = 0
        self._wanted[n - logits : n] = 1
        forget_errors()
        with interruptible():  # llama.cpp may log, which is a callback
            started = time.perf_counter()
            status = self._lib.llama_decode(context, self._batch)
            self._lib.llama_synchronize(context)
            self.decode_s += time.perf_counter() - started
            if status:
                self._lib.llama_memory_seq_rm(self.memory, 0, self._n_past, -1)
                reason = native_error()
                raise EngineError(f"llama_decode returned {status} at {self._n_past}: {reason}")
            self._n_past += n
            self.tokens += tokens

    def truncate(self, n_past: int) -> None:
        if n_past == 0:
            self._lib.llama_memory_clear(self.memory, False)
        elif n_past >= self._n_past:
            return
        elif not self._lib.llama_memory_seq_rm(self.memory, 0, n_past, -1):
            name = self.model.path.name
            raise RollbackError(f"{name}: the cache cannot be cut to {n_past} tokens")
        self._n_past = n_past
        del self.tokens[n_past:]

    def keep(self, tokens: Sequence[int]) -> int:
        n = n_common(self.tokens, tokens)
        self.truncate(n if self.model.can_roll_back or n == self._n_past else 0)
        return self._n_past

    def close(self) -> None:
        if self._context:
            self._lib.llama_batch_free(self._batch)
            context, self._context = self._context, None
            with suppress(EngineError):  # the memory of a lost server is lost with it
                self._lib.llama_free(context)

    @property
    def placed(self) -> Placed:
        """Where the model and this context are, as llama.cpp told it."""
        return read_back(self.lines, devices())


def _load_error(words: str, lines: Sequence[str]) -> EngineError | ModelFileError:
    return DeviceMemoryError(words, hint=_LESS) if _is_short(lines) else ModelFileError(words)


def _is_short(lines: Sequence[str]) -> bool:
    """Did memory run out, by what llama.cpp said?"""
    return any(_SHORT.search(line) for line in lines)
