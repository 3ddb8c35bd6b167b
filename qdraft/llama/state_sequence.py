"""A sequence of a model with a recurrent state, which goes back to remembered places only.

llama.cpp keeps one state for each id of a sequence, as of the last token. There are three ways back
(llama-memory-recurrent.cpp of llama-cpp-python 0.3.36):

1. The states of the last tokens of a decode, up to ``n_rs_seq`` of them, if the architecture keeps
   them. A partial ``seq_rm`` then takes tokens back. It works once for each decode, and only for
   the tokens of that decode, although ``seq_rm`` does not refuse others.
2. A checkpoint: ``seq_cp`` to a second id shares the cell of the state and all KV cells, which
   copies nothing. The next decode writes into a cell of its own. ``seq_cp`` does not see a rollback
   of the first kind that no decode has followed yet, so that one is settled first.
3. A place: the state in Python's memory, while the KV cells before it are still in the cache. Texts
   one after another go back to it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from qdraft.errors import ContextError, EngineError, QDraftError
from qdraft.llama.native import native_errors
from qdraft.llama.sequence import LlamaSequence

if TYPE_CHECKING:
    from qdraft.llama.context import LlamaContext

_STATE_ONLY = 1  # LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY
# Tokens at the end of a prompt that another text may change: what a chat template adds there to
# begin an answer, and reads otherwise once the answer is there.
_N_TAIL = 16
_N_PLACES = 4  # each holds a state in memory, so the oldest goes


class StateSequence(LlamaSequence):
    """One text in a context of a recurrent or hybrid model.

    ``keeps_places`` makes it remember a place near the end of each prompt, for the next text.
    """

    def __init__(self, context: LlamaContext, id: int) -> None:
        super().__init__(context, id)
        self._marked: int | None = None  # tokens before the checkpoint
        self._places: list[tuple[int, bytes]] = []  # tokens before, and the state
        self._n_decoded = 0  # tokens of the last decode, some of which can be taken back
        self._is_rolled_back = False  # since the last decode
        self._begins = False  # the next eval reads a prompt

    @property
    def checkpoint_id(self) -> int:
        """The second id of this sequence."""
        return self.context.n_texts + self.id

    def eval(self, tokens: Sequence[int], logits: int) -> NDArray[np.float32]:
        begins, self._begins = self._begins, False
        if begins and self.keeps_places:
            n_first = len(tokens) - _N_TAIL
            if n_first > 0:
                super().eval(tokens[:n_first], 0)
                tokens = tokens[n_first:]
            self._remember_place()
        return super().eval(tokens, logits)

    def _decode(self, tokens: Sequence[int], logits: int, interrupted: Callable[[], bool]) -> None:
        try:
            super()._decode(tokens, logits, interrupted)
        except ContextError:  # before anything has changed
            raise
        except QDraftError:
            # The state may have read some of the tokens.
            with suppress(EngineError):  # of a lost server, which is the error already
                self._go_back(self.n_past)
            raise
        self._n_decoded, self._is_rolled_back = len(tokens), False

    def checkpoint(self, n_ahead: int | None = None) -> None:
        """Remember this place, unless ``n_ahead`` tokens can be taken back anyway."""
        self._require_open()
        if n_ahead is not None and n_ahead <= self.context.n_back:
            return
        if self._marked == self.n_past and not self._is_rolled_back:
            return
        if self._is_rolled_back:
            self._settle()
        self.release_checkpoint()
        memory = self.context.memory
        self._lib.llama_memory_seq_cp(memory, self.id, self.checkpoint_id, -1, -1)
        self._marked = self.n_past
        # Taking back tokens before the checkpoint would move the state that it shares.
        self._n_decoded = 0

    def release_checkpoint(self) -> None:
        """Forget the checkpoint, so that its id is free."""
        self._marked = None
        self._lib.llama_memory_seq_rm(self.context.memory, self.checkpoint_id, -1, -1)

    def truncate(self, n_past: int) -> None:
        """Cut to at most the first ``n_past`` tokens: to exactly as many if the state allows it."""
        self._require_open()
        n_taken = self.n_past - n_past
        if n_taken <= 0:
            return
        if n_past > 0 and n_taken < self._n_decoded and n_taken <= self.context.n_back:
            memory = self.context.memory
            if self._lib.llama_memory_seq_rm(memory, self.id, n_past, -1):
                del self._tokens[n_past:]
                self._n_decoded, self._is_rolled_back = 0, True
                return
        self._go_back(n_past)

    def keep(self, tokens: Sequence[int]) -> int:
        n_past = super().keep(tokens)
        self._begins = True
        return n_past

    def take_over(self, tokens: Sequence[int]) -> None:
        super().take_over(tokens)
        self._n_decoded, self._is_rolled_back, self._begins = 0, False, False
        self._places = [place for place in self._places if place[0] <= self.n_past]

    def close(self) -> None:
        if not self._closed and not self.context.closed:
            with suppress(EngineError):  # the memory of a lost server is lost with it
                self.release_checkpoint()
        self._places.clear()
        super().close()

    def read_state(self) -> bytes:
        """Return the recurrent state as llama.cpp writes it, without KV cells."""
        context = self.context.native
        size = int(self._lib.llama_state_seq_get_size_ext(context, self.id, _STATE_ONLY))
        buffer = (ctypes.c_uint8 * size)()
        get = self._lib.llama_state_seq_get_data_ext
        with native_errors() as errors:
            n_bytes = int(get(context, buffer, size, self.id, _STATE_ONLY))
        if not n_bytes:
            raise EngineError(f"the recurrent state cannot be read: {errors}")
        return bytes(memoryview(buffer)[:n_bytes])

    def write_state(self, state: bytes) -> None:
        """Replace the recurrent state, and leave the KV cells alone."""
        buffer: Any = (ctypes.c_uint8 * len(state)).from_buffer_copy(state)
        context, write = self.context.native, self._lib.llama_state_seq_set_data_ext
        with native_errors() as errors:
            n_bytes = write(context, buffer, len(state), self.id, _STATE_ONLY)
        if not n_bytes:
            raise EngineError(f"the recurrent state cannot be written: {errors}")

    @property
    def is_rolled_back(self) -> bool:
        """True if tokens were taken back, and no decode has followed yet."""
        return self._is_rolled_back

    def _settle(self) -> None:
        """Make the state the last of the decode's in llama.cpp's eyes too."""
        self.write_state(self.read_state())
        self._is_rolled_back = False

    def _remember_place(self) -> None:
        """Keep the state, unless it is kept already."""
        if self.n_past and all(n != self.n_past for n, _ in self._places):
            self._places.append((self.n_past, self.read_state()))
            self._places = sorted(self._places)[-_N_PLACES:]

    def _go_back(self, n_past: int) -> None:
        """Go back to the last remembered place with at most ``n_past`` tokens, or to none."""
        self._places = [place for place in self._places if place[0] <= n_past]
        if self._marked is not None and self._marked > n_past:
            self.release_checkpoint()
        marked = self._marked or 0
        last, state = self._places[-1] if self._places else (0, b"")
        self._n_decoded, self._is_rolled_back = 0, False
        if last > marked:
            self._return_to_place(last, state)
        else:
            self._return_to_checkpoint(marked)

    def _return_to_place(self, n_past: int, state: bytes) -> None:
        try:
            self.write_state(state)
            memory = self.context.memory
            if not self._lib.llama_memory_seq_rm(memory, self.id, n_past, -1):
                raise EngineError(f"the KV cells cannot be cut to {n_past} tokens")
        except EngineError:
            self._return_to_checkpoint(0)
            raise
        del self._tokens[n_past:]

    def _return_to_checkpoint(self, n_past: int) -> None:
        """Return to the checkpoint, or to an empty cache if ``n_past`` is 0."""
        memory = self.context.memory
        self._lib.llama_memory_seq_rm(memory, self.id, -1, -1)
        if n_past:
            self._lib.llama_memory_seq_cp(memory, self.checkpoint_id, self.id, -1, -1)
        else:
            self.release_checkpoint()
            self._places.clear()
        del self._tokens[n_past:]
