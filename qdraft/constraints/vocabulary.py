"""A model's vocabulary as llguidance reads it: the bytes of each token, and the special ones."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Protocol

from qdraft.constraints.library import llguidance
from qdraft.errors import QDraftError, UsageError

_MOST_TEXTS = 4096  # remembered tokens of texts that grammars force


class TokenBytes(Protocol):
    """What a constraint needs to know of a vocabulary."""

    @property
    def n_tokens(self) -> int: ...

    def is_end(self, token: int) -> bool: ...

    def is_special(self, token: int) -> bool:
        """Tell whether no ordinary text is made of a token."""
        ...

    def piece(self, token: int, *, special: bool = False) -> bytes: ...

    def tokenize(
        self, text: str, *, parse_special: bool = True, add_bos: bool = True
    ) -> list[int]: ...


class ConstraintVocabulary:
    """The tokens of a model, read once for all constraints.

    ``tokenizer`` is llguidance's own object. Making it takes a few tenths of a second. Raises
    UsageError without llguidance, or if no token ends a text.
    """

    def __init__(self, vocab: TokenBytes) -> None:
        self.n_tokens = vocab.n_tokens
        self.ends = frozenset(t for t in range(vocab.n_tokens) if vocab.is_end(t))
        if not self.ends:
            raise UsageError("this model has no token that ends a text, which a constraint needs")
        module = llguidance()
        self.tokenizer = module.LLTokenizer(_Wrapper(vocab, self.ends), eos_token=sorted(self.ends))
        self.executor = module.LLExecutor(1)

    def matcher(self, grammar: str) -> Any:
        """Return a matcher of a grammar at its start."""
        return llguidance().LLMatcher(self.tokenizer, grammar, log_level=0)


class _Wrapper:
    """The attributes and the call that llguidance asks a tokenizer for."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, vocab: TokenBytes, ends: frozenset[int]) -> None:
        self._vocab = vocab
        self.eos_token_id = min(ends)
        tokens = range(vocab.n_tokens)
        self.special_token_ids = [t for t in tokens if vocab.is_special(t) or t in ends]
        special = frozenset(self.special_token_ids)
        self.tokens = [vocab.piece(t, special=t in special) for t in tokens]
        # A vocabulary that puts a space before a text does so after a newline only once.
        newline = vocab.tokenize("\n", add_bos=False)
        spaced = vocab.tokenize("\na", add_bos=False)
        adds_space = b"".join(map(self.tokens.__getitem__, vocab.tokenize("a", add_bos=False)))
        self._prefix = newline if adds_space != b"a" and spaced[: len(newline)] == newline else []
        self._tokenize = lru_cache(_MOST_TEXTS)(self._read)

    def __call__(self, text: str | bytes) -> list[int]:
        return list(self._tokenize(text if isinstance(text, str) else text.decode()))

    def _read(self, text: str) -> tuple[int, ...]:
        before = "\n" if self._prefix else ""
        try:
            tokens = self._vocab.tokenize(before + text, parse_special=False, add_bos=False)
        except QDraftError:  # llguidance then takes the longest token at each place
            return ()
        return tuple(tokens[len(self._prefix) :])
