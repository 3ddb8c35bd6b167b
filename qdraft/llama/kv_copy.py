"""The KV copy: the target's KV cells, copied into the draft's cache.

Target and draft of one model have caches of the same shape, and the target's cells are what the
draft's own would be without the loss of quantization. So the draft never reads a prompt: it gets
the target's cells, and after each round those of the accepted tokens.

llama.cpp saves and restores whole sequences only, and restoring wipes the destination. So a part of
a sequence travels under an id that each context reserves for this, ``LlamaContext.spare_id``.

A recurrent state travels whole, with the KV cells of the other layers from a position on, under the
ids of both sequences' checkpoints. The draft then has a checkpoint of what it got, so that a round
needs no more than the cells since then and the state.
"""

from __future__ import annotations

import ctypes
import time
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from qdraft.errors import EngineError, PairError, ServerError
from qdraft.llama.context import LlamaContext
from qdraft.llama.interrupts import interruptible
from qdraft.llama.native import lib, native_errors
from qdraft.llama.sequence import LlamaSequence
from qdraft.llama.state_proof import NOISE, difference
from qdraft.llama.state_sequence import StateSequence

# A copy that takes more than this share of a decode costs about as much as shared cells gain. It
# takes more over a slow link, where each layer's cells are a message and an answer.
_MAX_COPY = 0.5
_WHOLE_ONLY = ("deepseek4",)  # seq_cp of a part ends the process (llama-kv-cache-dsv4.cpp)
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
        _require_cells(target, draft, flash_attn=flash_attn)
        copy_s, decode_s = (prove_states if target.model.has_state else prove)(target, draft)
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


def _require_cells(target: LlamaContext, draft: LlamaContext, *, flash_attn: bool) -> None:
    """Raise EngineError with the reason if no trial is needed to know that cells are not shared."""
    if not flash_attn and not target.model.is_recurrent:
        # V is then stored transposed, so that one cell takes thousands of tiny copies.
        raise EngineError("flash attention is off")
    if target.model.shape != draft.model.shape:
        raise EngineError("target and draft are different models")
    if target.model.architecture in _WHOLE_ONLY:
        raise EngineError(f"llama.cpp copies {target.model.architecture} cells whole only")


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
        if not np.array_equal(source.read_cells(), destination.read_cells()):
            raise EngineError("copied cells differ from the target's")
    return min(copies), min(decodes)


def prove_states(target: LlamaContext, draft: LlamaContext) -> tuple[float, float]:
    """Copy a recurrent state before and after a rejection, and compare rows of the draft.

    Returns the seconds of a copy and those of the verify batch before it. Raises EngineError with
    the reason if the draft's rows on a state that was copied in parts differ from those on one that
    was copied whole.
    """
    tokens = [i % target.vocab.n_tokens for i in range(8)]
    with ExitStack() as stack:
        source = stack.enter_context(closing(target.sequence()))
        destination = stack.enter_context(closing(draft.sequence()))
        kv_copy = KvCopy(source, destination)
        source.eval(tokens[:3], 0)
        kv_copy.copy(0)
        destination.eval([tokens[3], tokens[7]], 1)  # drafted, and rejected
        before = target.decode_s
        source.checkpoint(2)
        source.eval([tokens[3], tokens[7], tokens[6]], 3)
        source.truncate(4)
        decode_s = target.decode_s - before
        before = draft.copy_s
        kv_copy.copy(3)
        copy_s = draft.copy_s - before
        n_past = destination.n_past
        row = destination.eval(tokens[n_past:5], 1)[0].copy()
        destination.truncate(0)
        kv_copy.copy(0)
        whole = destination.eval(tokens[n_past:5], 1)[0]
        if difference(row, whole) > NOISE:
            raise EngineError("a copied state differs from the target's")
    return copy_s, decode_s


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
        source, destination = self._source, self._destination
        if isinstance(source, StateSequence) and isinstance(destination, StateSequence):
            self._copy_state(source, destination, start)
        elif start == 0:
            n_bytes = self._read(self._source.id)
            self._write(n_bytes, self._destination.id)
            self._buffer = (ctypes.c_uint8 * 0)()  # free the memory of a whole prompt's cells
        elif start < self._source.n_past:
            self._copy_part(start)
        else:
            self._destination.truncate(self._source.n_past)

    def _copy_state(self, source: StateSequence, destination: StateSequence, start: int) -> None:
        """Copy the recurrent state, and the KV cells from ``start`` on if there are any."""
        destination.truncate(start)
        start = min(destination.n_past, source.n_past)
        destination.release_checkpoint()
        if start == 0 or (start < source.n_past and source.context.model.is_recurrent):
            n_bytes = self._read(source.id)
            self._write(n_bytes, destination.id)
        elif start < source.n_past:
            source.release_checkpoint()
            self._copy_through(source.checkpoint_id, destination.checkpoint_id, start)
            if source.is_rolled_back:  # which another id does not see
                destination.write_state(source.read_state())
        destination.take_over(source.tokens)
        destination.checkpoint()

    def _copy_part(self, start: int) -> None:
        """Copy the cells from ``start`` on through the spare id of both contexts."""
        self._copy_through(self._source.context.spare_id, self._destination.context.spare_id, start)

    def _copy_through(self, source_id: int, destination_id: int, start: int) -> None:
        """Copy the cells from ``start`` on, through an unused id of each context."""
        source, destination = self._source, self._destination
        memory = source.context.memory
        self._lib.llama_memory_seq_cp(memory, source.id, source_id, start, -1)
        try:
            n_bytes = self._read(source_id)
        finally:
            self._lib.llama_memory_seq_rm(memory, source_id, -1, -1, later=True)
        memory = destination.context.memory
        self._lib.llama_memory_seq_rm(memory, destination.id, start, -1)
        self._write(n_bytes, destination_id)
        self._lib.llama_memory_seq_cp(memory, destination_id, destination.id, start, -1)
        self._lib.llama_memory_seq_rm(memory, destination_id, -1, -1)

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
