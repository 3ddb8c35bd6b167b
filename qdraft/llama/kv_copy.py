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
from dataclasses import dataclass
from typing import Any

from qdraft.errors import EngineError, PairError, ServerError
from qdraft.llama.context import LlamaEngine
from qdraft.llama.native import forget_errors, interruptible, native_error
from qdraft.llama.rpc import device_library

_TEXT, _COURIER = 0, 1
# A copy that takes more than this share of a decode costs about what shared cells gain. Over a slow
# link it does: each layer's cells are a message and an answer of their own.
_DEAR = 0.5


@dataclass(frozen=True, slots=True)
class KvSharing:
    """Whether the draft works on the target's KV cells, and if not, why."""

    shared: bool
    reason: str = ""


def couple(
    target: LlamaEngine, draft: LlamaEngine | None, share_kv: str, *, flash_attn: bool
) -> tuple[KvCourier | None, KvSharing]:
    """A courier that is proven to work and worth its time, or none and the reason.

    Raises PairError where ``share_kv`` is "on" and it does not.
    """
    if draft is None:
        if share_kv == "on":
            raise PairError("there is no draft to share the KV cells with")
        return None, KvSharing(False, "there is no draft")
    if share_kv == "off":
        return None, KvSharing(False, "switched off")
    courier = KvCourier(target, draft)
    try:
        if not flash_attn:
            # V is then stored transposed: a cell is thousands of tiny copies.
            raise EngineError("flash attention is off")
        if target.model.shape != draft.model.shape:
            raise EngineError("target and draft are different models")
        copy_s, decode_s = courier.prove()
        if share_kv == "auto" and copy_s > _DEAR * decode_s:
            raise EngineError(
                f"copying cells takes {1000 * copy_s:.0f} ms here, a decode {1000 * decode_s:.0f}"
            )
    except ServerError:
        raise
    except EngineError as error:
        if share_kv == "on":
            raise PairError(f"the KV cells cannot be shared: {error}") from error
        return None, KvSharing(False, str(error))
    return courier, KvSharing(True)


class KvCourier:
    """Copies cells from ``source`` to ``destination``; the destination never reads a prompt.

    ``copy_s`` adds up the seconds that this took.
    """

    def __init__(self, source: LlamaEngine, destination: LlamaEngine) -> None:
        self._lib = device_library()
        self._source = source
        self._destination = destination
        self._buffer: Any = (ctypes.c_uint8 * 0)()
        self.copy_s = 0.0

    def copy(self, start: int) -> None:
        """Replace the destination's cells from position ``start`` on by the source's.

        The destination then holds exactly as many tokens as the source. Its cells before
        ``start`` must be the source's already. Raises EngineError when llama.cpp refuses.
        """
        with interruptible():
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
            self._destination.adopt(self._source.tokens)
            self.copy_s += time.perf_counter() - started

    def prove(self) -> tuple[float, float]:
        """Copy a few real cells, whole and in part, and read them back bit for bit.

        Returns the seconds of a copy of two cells and those of the decode that made them, the
        lesser of two each. Raises EngineError with the reason when the two caches do not take each
        other's cells. Both caches are empty afterwards. The first decodes also bring the weights
        into memory before the first prompt.
        """
        copies, decodes = [], []
        try:
            self._source.truncate(0)
            self._source.eval([0, 1], 0)
            self.copy(0)
            self._destination.eval([2, 3], 0)  # cells that the next copy must replace
            for start in (2, 4):
                before = self._source.decode_s, self.copy_s
                self._source.eval(
                    [start, start + 1], 1
                )  # a server's work is waited for by its rows
                self.copy(start)
                decodes.append(self._source.decode_s - before[0])
                copies.append(self.copy_s - before[1])
            if self.state(self._source) != self.state(self._destination):
                raise EngineError("cells come back changed")
        finally:
            self._source.truncate(0)
            self._destination.truncate(0)
        return min(copies), min(decodes)

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
