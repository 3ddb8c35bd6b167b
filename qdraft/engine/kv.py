"""The KV courier: the target's KV cells, copied into the draft's cache.

Target and draft of one model have caches of the same shape, and the target's cells are what
the draft's own would be without the loss of quantization. So the draft reads no prompt of its
own, and after each round gets the cells of the accepted tokens.

Sequence 0 is the text; sequence 1 carries a part of it, because llama.cpp saves and restores
whole sequences only (restoring wipes the destination).
"""

from __future__ import annotations

import ctypes
import time
from typing import Any

from qdraft.engine.library import forget_errors, native, native_error
from qdraft.engine.llama import LlamaEngine
from qdraft.errors import EngineError

_TEXT, _COURIER = 0, 1


class KvCourier:
    """Copies cells from ``source`` to ``destination``; the destination never reads a prompt.

    ``copy_s`` adds up the seconds that this took.
    """

    def __init__(self, source: LlamaEngine, destination: LlamaEngine) -> None:
        self._lib = native()
        self._source = source
        self._destination = destination
        self._buffer: Any = (ctypes.c_uint8 * 0)()
        self.copy_s = 0.0

    def copy(self, start: int) -> None:
        """Replace the destination's cells from position ``start`` on by the source's.

        The destination then holds exactly as many tokens as the source. Its cells before
        ``start`` must be the source's already. Raises EngineError when llama.cpp refuses.
        """
        started = time.perf_counter()
        n_past = self._source.n_past
        if start == 0:
            blob_size = self._read(_TEXT)
            self._write(blob_size, _TEXT)
            self._buffer = (ctypes.c_uint8 * 0)()  # a whole prompt's cells: not kept
        elif start < n_past:
            self._lib.llama_memory_seq_cp(self._source.memory, _TEXT, _COURIER, start, -1)
            try:
                blob_size = self._read(_COURIER)
            finally:
                self._lib.llama_memory_seq_rm(self._source.memory, _COURIER, -1, -1)
            memory = self._destination.memory
            self._lib.llama_memory_seq_rm(memory, _TEXT, start, -1)
            self._write(blob_size, _COURIER)
            self._lib.llama_memory_seq_cp(memory, _COURIER, _TEXT, start, -1)
            self._lib.llama_memory_seq_rm(memory, _COURIER, -1, -1)
        else:
            self._destination.truncate(n_past)
        self._destination.adopt(n_past)
        self.copy_s += time.perf_counter() - started

    def prove(self) -> None:
        """Copy a few real cells, whole and in part, and read them back bit for bit.

        Raises EngineError with the reason when the two caches do not take each other's
        cells. Both caches are empty afterwards. One small decode on each model, which also
        brings its weights into memory before the first prompt.
        """
        tokens = [0, 1, 2, 3]
        try:
            self._source.truncate(0)
            self._source.eval(tokens[:2], 0)
            self.copy(0)
            self._destination.eval(tokens[2:], 0)  # cells that the next copy must replace
            self._source.eval(tokens[2:], 0)
            self.copy(2)
            if self.state(self._source) != self.state(self._destination):
                raise EngineError("cells come back changed")
        finally:
            self._source.truncate(0)
            self._destination.truncate(0)

    def _read(self, sequence: int) -> int:
        """The source's cells of a sequence into the buffer; the number of bytes."""
        size = int(self._lib.llama_state_seq_get_size(self._source.context, sequence))
        if size > len(self._buffer):
            self._buffer = (ctypes.c_uint8 * size)()
        forget_errors()
        got = int(
            self._lib.llama_state_seq_get_data(self._source.context, self._buffer, size, sequence)
        )
        if not got:
            raise EngineError(f"the target's KV cells cannot be read: {native_error()}")
        return got

    def _write(self, size: int, sequence: int) -> None:
        forget_errors()
        if not self._lib.llama_state_seq_set_data(
            self._destination.context, self._buffer, size, sequence
        ):
            raise EngineError(f"the draft does not take the target's KV cells: {native_error()}")

    def state(self, engine: LlamaEngine) -> bytes:
        """All cells of an engine's text, as bytes."""
        size = int(self._lib.llama_state_seq_get_size(engine.context, _TEXT))
        buffer = (ctypes.c_uint8 * size)()
        got = int(self._lib.llama_state_seq_get_data(engine.context, buffer, size, _TEXT))
        return bytes(buffer[:got])
