"""The KV copy: the target's KV cells, copied into the draft's cache.

Target and draft of one model have caches of the same shape, and the target's cells are what the
draft's own would be without the loss of quantization. So the draft never reads a prompt: it gets
the target's cells, and after each round those of the accepted tokens.

llama.cpp saves and restores whole sequences only, and restoring wipes the destination. So a part of
a sequence travels under an id that each context reserves for this, ``LlamaContext.spare_id``.
"""

from __future__ import annotations

import ctypes
import time
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from typing import Any

from qdraft.errors import EngineError, PairError, ServerError
from qdraft.llama.context import LlamaContext
from qdraft.llama.interrupts import interruptible
from qdraft.llama.native import lib, native_errors
from qdraft.llama.sequence import LlamaSequence

# A copy that takes more than this share of a decode costs about as much as shared cells gain. It
# takes more over a slow link, where each layer's cells are a message and an answer.
_MAX_COPY = 0.5
_SLOW_S = 1.0  # seconds of a decode beside which a second trial of a copy is not worth its wait


@dataclass(frozen=True, slots=True)
class KvSharing:
    """Whether the draft works on the target's KV cells, and if not, why."""

    shared: bool
    reason: str = ""


def couple(
    target: LlamaContext, draft: LlamaContext | None, share_kv: str, *, flash_attn: bool
) -> KvSharing:
    """Try whether the target's cells can be copied into the draft, and whether that pays off.

    The trial takes sequences of its own in both contexts and closes them. Raises PairError if
    ``share_kv`` is "on" and the cells cannot be shared.
    """
    if draft is None:
        if share_kv == "on":
            raise PairError("there is no draft to share the KV cells with")
        return KvSharing(False, "there is no draft")
    if share_kv == "off":
        return KvSharing(False, "switched off")
    try:
        if not flash_attn:
            # V is then stored transposed, so that one cell takes thousands of tiny copies.
            raise EngineError("flash attention is off")
        if target.model.shape != draft.model.shape:
            raise EngineError("target and draft are different models")
        copy_s, decode_s = prove(target, draft)
        if share_kv == "auto" and copy_s > _MAX_COPY * decode_s:
            raise EngineError(
                f"copying cells takes {1000 * copy_s:.0f} ms, a decode {1000 * decode_s:.0f} ms"
            )
    except ServerError:
        raise
    except EngineError as error:
        if share_kv == "on":
            raise PairError(f"the KV cells cannot be shared: {error}") from error
        return KvSharing(False, str(error))
    return KvSharing(True)


def prove(target: LlamaContext, draft: LlamaContext) -> tuple[float, float]:
    """Copy a few real cells, whole and in part, and compare both caches bit for bit.

    Returns the seconds of a copy of two cells and those of the decode that made them: of both, the
    lesser of two measurements, or the only one if a decode takes long. Raises EngineError with the
    reason if the draft's cache does not take the target's cells. The decodes also bring the weights
    into memory before the first prompt.
    """
    copies, decodes = [], []
    with ExitStack() as stack:
        source = stack.enter_context(closing(target.sequence()))
        destination = stack.enter_context(closing(draft.sequence()))
        kv_copy = KvCopy(source, destination)
        started = target.decode_s
        source.eval([0, 1], 0)
        kv_copy.copy(0)
        destination.eval([2, 3], 0)  # cells that the next copy must replace
        is_slow = target.decode_s - started > _SLOW_S
        for start in (2,) if is_slow else (2, 4):
            before = target.decode_s, draft.copy_s
            # One row, because only a row waits for what a server computes.
            source.eval([start, start + 1], 1)
            kv_copy.copy(start)
            decodes.append(target.decode_s - before[0])
            copies.append(draft.copy_s - before[1])
        if read_state(source) != read_state(destination):
            raise EngineError("copied cells differ from the target's")
    return min(copies), min(decodes)


class KvCopy:
    """Copies cells from ``source`` to ``destination``, which never reads a prompt.

    The destination's context adds up the seconds that this takes, in ``copy_s``.
    """

    def __init__(self, source: LlamaSequence, destination: LlamaSequence) -> None:
        self._lib = lib()
        self._source = source
        self._destination = destination
        self._buffer: Any = (ctypes.c_uint8 * 0)()

    def copy(self, start: int) -> None:
        """Replace the destination's cells from position ``start`` on by the source's.

        The destination then holds exactly as many tokens as the source. Its cells before
        ``start`` must be the source's already. Raises EngineError if llama.cpp refuses.
        """
        source, destination = self._source, self._destination
        with interruptible():
            started = time.perf_counter()
            try:
                self._copy_cells(start)
                destination.take_over(source.tokens)
            except EngineError:  # the destination may hold a part of the cells
                with suppress(EngineError):
                    destination.truncate(0)
                raise
            destination.context.copy_s += time.perf_counter() - started

    def _copy_cells(self, start: int) -> None:
        if start == 0:
            n_bytes = self._read(self._source.id)
            self._write(n_bytes, self._destination.id)
            self._buffer = (ctypes.c_uint8 * 0)()  # free the memory of a whole prompt's cells
        elif start < self._source.n_past:
            self._copy_part(start)
        else:
            self._destination.truncate(self._source.n_past)

    def _copy_part(self, start: int) -> None:
        """Copy the cells from ``start`` on through the spare id of both contexts."""
        source, destination = self._source, self._destination
        spare, memory = source.context.spare_id, source.context.memory
        self._lib.llama_memory_seq_cp(memory, source.id, spare, start, -1)
        try:
            n_bytes = self._read(spare)
        finally:
            self._lib.llama_memory_seq_rm(memory, spare, -1, -1, later=True)
        spare, memory = destination.context.spare_id, destination.context.memory
        self._lib.llama_memory_seq_rm(memory, destination.id, start, -1)
        self._write(n_bytes, spare)
        self._lib.llama_memory_seq_cp(memory, spare, destination.id, start, -1)
        self._lib.llama_memory_seq_rm(memory, spare, -1, -1)

    def _read(self, id: int) -> int:
        """Read the cells of an id of the source into the buffer; return the number of bytes."""
        context = self._source.context.native
        size = int(self._lib.llama_state_seq_get_size(context, id))
        if size > len(self._buffer):
            self._buffer = (ctypes.c_uint8 * size)()
        with native_errors() as errors:
            n_bytes = int(self._lib.llama_state_seq_get_data(context, self._buffer, size, id))
        if not n_bytes:
            raise EngineError(f"the target's KV cells cannot be read: {errors}")
        return n_bytes

    def _write(self, n_bytes: int, id: int) -> None:
        """Write the buffer into the destination's cache, as the cells of an id."""
        context = self._destination.context.native
        with native_errors() as errors:
            n_written = self._lib.llama_state_seq_set_data(context, self._buffer, n_bytes, id)
        if not n_written:
            raise EngineError(f"the draft does not take the target's KV cells: {errors}")


def read_state(sequence: LlamaSequence) -> bytes:
    """Return all cells of a sequence, as bytes."""
    context = sequence.context.native
    size = int(lib().llama_state_seq_get_size(context, sequence.id))
    buffer = (ctypes.c_uint8 * size)()
    n_bytes = int(lib().llama_state_seq_get_data(context, buffer, size, sequence.id))
    return bytes(buffer[:n_bytes])
