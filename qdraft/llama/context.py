"""A llama.cpp context: the KV cache of several texts, and the decodes that fill it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qdraft.decoding.records import MAX_N_DRAFT
from qdraft.errors import CancelledError, ContextError, DeviceMemoryError, EngineError
from qdraft.host import bytes_read, default_threads
from qdraft.llama.devices import devices
from qdraft.llama.interrupts import interruptible
from qdraft.llama.lora import set_adapters
from qdraft.llama.model import LESS_MEMORY, LlamaModel, is_short_of_memory
from qdraft.llama.native import keep_freed_memory, lib, listening, native_errors
from qdraft.llama.params import EngineParams
from qdraft.llama.placed import Placed, read_back
from qdraft.llama.rpc import keep_alive
from qdraft.llama.sequence import LlamaSequence
from qdraft.llama.slow_pass import SlowPass
from qdraft.llama.state_sequence import StateSequence

# The ids of a context: the texts that one cache holds side by side, and one more, which the KV copy
# moves cells through. A model with a recurrent state has it in memory for each id, used or not, so
# it gets few: the texts, and a checkpoint for each.
N_IDS, N_TEXTS, N_TEXTS_OF_STATES = 8, 7, 2
_ABORTED = 2  # what llama_decode returns if the callback ended it


class LlamaContext:
    """One context of a model: a cache for the tokens of its sequences, and its threads.

    ``n_ctx`` is the number of tokens that all sequences together can hold. ``decode_s`` adds up the
    seconds spent in llama_decode, and ``copy_s`` those of KV copies into this context.
    Whoever sets ``is_cancelled`` ends an eval of several batches, and a slow decode, by True.
    ``n_decodes`` counts the decodes, and ``n_read`` the bytes that they read from the disk.
    ``lines`` are what llama.cpp logged about the model and this context.
    """

    def __init__(
        self, model: LlamaModel, params: EngineParams, *, n_rows: int = MAX_N_DRAFT + 1
    ) -> None:
        """Make a context of the size that ``params`` give.

        ``n_rows`` is the largest number of rows of logits that one eval returns. Raises
        DeviceMemoryError if memory runs out, and EngineError if llama.cpp fails otherwise.
        """
        self._lib = lib()
        self.model = model
        self.vocab = model.vocab
        self.n_threads = params.n_threads or default_threads()
        self.n_threads_batch = params.n_threads_batch or self.n_threads
        n_ctx = params.context_size(model.n_ctx_train)
        native_params = self._native_params(params, n_ctx, n_rows)
        lines: list[str] = []
        self._context = None
        try:
            with interruptible(), listening(lines), native_errors() as errors:
                self._context = self._lib.llama_init_from_model(model.native, native_params)
        except BaseException:  # an interrupt that came after llama.cpp had made it
            if self._context:
                self._lib.llama_free(self._context)
            raise
        if not self._context:
            what = f"a context of {n_ctx} tokens for {model.path.name}"
            problem = f"llama.cpp cannot make {what}: {errors}"
            if is_short_of_memory(lines):
                raise DeviceMemoryError(problem, hint=LESS_MEMORY)
            raise EngineError(problem)
        set_adapters(self._context, model.adapters)
        keep_alive()
        self.lines = [*model.lines, *lines]
        self.n_ctx = n_ctx or int(self._lib.llama_n_ctx(self._context))
        self.n_texts = N_TEXTS_OF_STATES if model.has_state else N_TEXTS
        # Tokens of the last decode that a recurrent state can take back, if its architecture can.
        self.n_back = int(self._lib.llama_n_rs_seq(self._context))
        # All rows of an eval come from one step.
        self.n_rows = n_rows
        n_ubatch = params.physical_batch
        self.step = max(n_rows, n_ubatch if n_ubatch > MAX_N_DRAFT else params.n_batch)
        self._make_batch(self.step)
        self._sequences: dict[int, LlamaSequence] = {}
        self.decode_s = 0.0
        self.n_decodes = self.n_read = 0
        self.slow_pass = SlowPass()
        self.copy_s = 0.0
        self.is_cancelled: Callable[[], bool] = lambda: False  # asked during long evals
        keep_freed_memory()

    def _native_params(self, params: EngineParams, n_ctx: int, n_rows: int) -> Any:
        """Return the llama_context_params that ``params`` describe."""
        from gguf import GGMLQuantizationType

        native_params = self._lib.llama_context_default_params()
        native_params.n_ctx = n_ctx
        native_params.n_batch = max(params.n_batch, n_rows)
        native_params.n_ubatch = params.physical_batch
        native_params.n_outputs_max = n_rows  # else llama.cpp reserves room for n_ubatch rows
        native_params.n_threads = self.n_threads
        native_params.n_threads_batch = self.n_threads_batch
        # By gguf, because llama-cpp-python has no name for BF16.
        native_params.type_k = int(GGMLQuantizationType[params.cache_type_k.upper()])
        native_params.type_v = int(GGMLQuantizationType[params.cache_type_v.upper()])
        native_params.flash_attn_type = {"auto": -1, "off": 0, "on": 1}[params.flash_attn]
        native_params.swa_full = True  # a windowed cache loses cells that a rollback needs
        native_params.n_seq_max = 2 * N_TEXTS_OF_STATES if self.model.has_state else N_IDS
        n_back = params.n_rs_seq or 0
        if self.model.has_state and n_back + 1 < params.physical_batch:  # llama.cpp asserts it
            native_params.n_rs_seq = n_back
        native_params.kv_unified = True  # one cache for all sequences, not an equal part for each
        native_params.offload_kqv = params.kv_offload
        native_params.no_perf = True
        native_params.held = self.model  # it lives as long as llama.cpp makes the context
        return native_params

    def _make_batch(self, size: int) -> None:
        """Make the one batch of all decodes; numpy owns its arrays.

        The tokens of a decode belong to one sequence, so they share one id.
        """
        self._tokens = np.zeros(size, dtype=np.int32)
        self._pos = np.zeros(size, dtype=np.int32)
        self._wanted = np.zeros(size, dtype=np.int8)
        self._id = np.zeros(1, dtype=np.int32)
        ids = np.full(size, self._id.ctypes.data, dtype=np.uintp)
        counts = np.ones(size, dtype=np.int32)
        self._batch = batch = self._lib.llama_batch()
        arrays: dict[str, NDArray[Any]] = {
            "token": self._tokens,
            "pos": self._pos,
            "logits": self._wanted,
            "n_seq_id": counts,
            "seq_id": ids,
        }
        kinds = dict(self._lib.llama_batch._fields_)
        for name, array in arrays.items():
            setattr(batch, name, array.ctypes.data_as(kinds[name]))
        # The batch points to these, also for a decode that nobody waits for any more.
        batch.held = arrays, self._id, self.model

    @property
    def native(self) -> Any:
        """The llama_context pointer. Raises EngineError once the context is closed."""
        if not self._context:
            raise EngineError(f"the context of {self.model.path.name} is closed")
        return self._context

    @property
    def memory(self) -> Any:
        """The context's KV memory. Raises EngineError once the context is closed."""
        return self._lib.llama_get_memory(self.native)

    @property
    def closed(self) -> bool:
        return self._context is None

    @property
    def spare_id(self) -> int:
        """The id that no sequence gets; the KV copy moves cells through it.

        Of a model with a recurrent state, each sequence has an id of its own for that.
        """
        return N_IDS - 1

    def sequence(self) -> LlamaSequence:
        """Open an empty sequence. Raises EngineError if there are ``n_texts`` already."""
        free = [i for i in range(self.n_texts) if i not in self._sequences]
        if self.closed or not free:
            name = self.model.path.name
            self.native  # noqa: B018 (raises if the context is closed)
            raise EngineError(
                f"the context of {name} holds {self.n_texts} sequences already",
                hint="close one of them first",
            )
        kind = StateSequence if self.model.has_state else LlamaSequence
        sequence = self._sequences[free[0]] = kind(self, free[0])
        return sequence

    def release(self, sequence: LlamaSequence) -> None:
        """Take back the id of a sequence that is closed."""
        self._sequences.pop(sequence.id, None)

    def room_of(self, sequence: LlamaSequence) -> int:
        """Return how many tokens a sequence may hold beside the others."""
        return self.n_ctx - sum(
            other.n_past for other in self._sequences.values() if other is not sequence
        )

    def use_threads(self, n: int, n_batch: int) -> None:
        """Decode one token with ``n`` threads from now on, and several with ``n_batch``."""
        self._lib.llama_set_n_threads(self.native, n, n_batch)
        self.n_threads, self.n_threads_batch = n, n_batch

    def decode(
        self,
        id: int,
        start: int,
        tokens: Sequence[int],
        logits: int,
        interrupted: Callable[[], bool] = lambda: False,
    ) -> None:
        """Decode at most ``step`` tokens of a sequence, which holds ``start`` tokens so far.

        ``rows`` then gives the logits of the last ``logits`` of them. A slow decode ends early once
        ``interrupted`` or ``is_cancelled`` returns True. Raises ContextError if the cache has no
        room, CancelledError, and EngineError if llama.cpp fails otherwise or was interrupted; KV
        cells are then what they were before, and a recurrent state is not.
        """
        n, context = len(tokens), self.native
        self._batch.n_tokens = n
        self._id[0] = id
        self._tokens[:n] = tokens
        self._pos[:n] = np.arange(start, start + n)
        self._wanted[:n] = 0
        self._wanted[n - logits : n] = 1
        with native_errors() as errors:
            started, n_read = time.perf_counter(), bytes_read()
            self.slow_pass.begin(context, lambda: interrupted() or self.is_cancelled())
            status = self._lib.llama_decode(context, self._batch)
            self._lib.llama_synchronize(context)
            seconds = time.perf_counter() - started
            self.slow_pass.end(seconds)
            self.decode_s += seconds
            self.n_decodes += 1
            self.n_read += bytes_read() - n_read
        if status:
            self._lib.llama_memory_seq_rm(self.memory, id, start, -1)
            if status == 1:
                raise ContextError(f"the context of {self.n_ctx} tokens has no room for {n} more")
            if status == _ABORTED and self.is_cancelled():
                raise CancelledError("the decode was cancelled")
            raise EngineError(f"llama_decode returned {status} at position {start}: {errors}")

    def rows(self, n: int) -> NDArray[np.float32]:
        """Return the logits of the last decode, shape [n, n_vocab], valid until the next one."""
        n_vocab = self.vocab.n_tokens
        if not n:
            return np.empty((0, n_vocab), dtype=np.float32)
        pointer = self._lib.llama_get_logits(self.native)
        rows: NDArray[np.float32] = np.ctypeslib.as_array(pointer, shape=(n, n_vocab))
        return rows

    def close(self) -> None:
        """Free the context and all of its sequences; harmless when repeated."""
        if self._context:
            context, self._context = self._context, None
            self._sequences.clear()
            with suppress(EngineError):  # the memory of a lost server is lost with it
                self._lib.llama_free(context)

    @property
    def placed(self) -> Placed:
        """Where the model and this context are, as llama.cpp logged it."""
        return read_back(self.lines, devices())
