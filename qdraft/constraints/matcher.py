"""The constraint of one text: masks of tokens, from the tokens of the text alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qdraft.constraints.grammar import compile_grammar
from qdraft.constraints.library import llguidance
from qdraft.constraints.vocabulary import ConstraintVocabulary
from qdraft.decoding.constraint import ConstraintSpec
from qdraft.decoding.engine import n_common
from qdraft.errors import ConstraintError

Mask = NDArray[np.bool_]
# How many of the tokens after the prompt come before the constraint; None if it has not begun.
Begin = Callable[[Sequence[int]], "int | None"]


def from_the_start(tokens: Sequence[int]) -> int | None:
    """Let the constraint begin with the first token."""
    return 0


class TextConstraint:
    """What may follow a text; see ``qdraft.decoding.constraint.Constraint``.

    The matcher follows the emitted tokens only. For draft tokens it looks ahead, and goes back
    within the same call, so that a rejected token leaves no trace. After a token that ends the
    text, and before the constraint begins, any token may follow.

    ``begin`` gets the tokens after the prompt, drafted ones too, and says how many of them come
    before the constraint. It must depend on these tokens alone, and stay at what it has said once
    the tokens go on.
    """

    def __init__(
        self,
        spec: ConstraintSpec,
        vocabulary: ConstraintVocabulary,
        n_prompt: int,
        begin: Begin = from_the_start,
    ) -> None:
        """Raises ParameterError for a mistake in ``spec``, and UsageError without llguidance."""
        self._vocabulary = vocabulary
        self._n_prompt = n_prompt
        self._begin = begin
        self._called = spec.called
        self._grammar = compile_grammar(spec)
        self._matcher = vocabulary.matcher(self._grammar)
        if error := self._failure():
            raise error
        self._text: list[int] = []  # the emitted tokens that the matcher has followed
        self._masks: dict[tuple[int, ...], Mask | None] = {}  # by drafted tokens, after _text

    def prepare(self, context: Sequence[int], drafted: Sequence[int]) -> None:
        self._follow(context)
        prefixes = [tuple(drafted[:i]) for i in range(len(drafted) + 1)]
        missing = [prefix for prefix in prefixes if prefix not in self._masks]
        if len(missing) > 1:
            self._look_ahead(tuple(drafted))

    def allowed(self, context: Sequence[int], drafted: Sequence[int] = ()) -> Mask | None:
        self._follow(context)
        key = tuple(drafted)
        if key not in self._masks:
            self._masks[key] = self._mask_after(key)
        mask = self._masks[key]
        if mask is not None and not mask.any():
            raise self._dead_end()
        return mask

    def forced(self, context: Sequence[int], drafted: Sequence[int] = ()) -> Sequence[int]:
        self._follow(context)
        within = self._within(tuple(drafted))
        if within is None:
            return ()
        with _Ahead(self._matcher, within) as is_valid:
            tokens: list[int] = self._matcher.compute_ff_tokens() if is_valid else []
        return tokens

    def n_allowed(self, context: Sequence[int], drafted: Sequence[int]) -> int:
        self._follow(context)
        n_before, covered = self._covered(tuple(drafted))
        if covered is None:
            return len(drafted)
        # With the token that ends the text, if there is one; nothing after it is part of the text.
        tokens = list(drafted[n_before : n_before + len(covered) + 1])
        return n_before + (int(self._matcher.validate_tokens(tokens)) if tokens else 0)

    def _follow(self, context: Sequence[int]) -> None:
        """Bring the matcher to the end of the emitted tokens."""
        text = list(context[self._n_prompt :])
        if text == self._text:
            return
        self._masks.clear()
        if n_common(text, self._text) < len(self._text):  # a check reads the text once more
            self._matcher.reset()
            self._text = []
        before = self._constrained(self._text)
        now = self._constrained(text)
        for token in now[len(before) :]:
            if not self._matcher.consume_token(token):
                self._start_again()
                raise ConstraintError(f"{self._called} does not allow token {token} of the text")
        self._text = text

    def _constrained(self, tokens: Sequence[int]) -> list[int]:
        """The tokens that the constraint covers: up to the end of the text, without that token."""
        start = self._begin(tokens)
        return [] if start is None else self._up_to_the_end(tokens[start:])

    def _up_to_the_end(self, tokens: Sequence[int]) -> list[int]:
        ends = self._vocabulary.ends
        n = next((i for i, token in enumerate(tokens) if token in ends), len(tokens))
        return list(tokens[:n])

    def _covered(self, drafted: tuple[int, ...]) -> tuple[int, list[int] | None]:
        """How many of ``drafted`` come before the constraint, and those that it covers.

        None if it covers no place after them: it has not begun, or the text has ended.
        """
        start = self._begin([*self._text, *drafted])
        n_text = len(self._text)
        if start is None or len(self._up_to_the_end(self._text[start:])) < n_text - start:
            return len(drafted), None
        n_before = max(0, start - n_text)
        return n_before, self._up_to_the_end(drafted[n_before:])

    def _within(self, drafted: tuple[int, ...]) -> list[int] | None:
        """Those of ``drafted`` that the constraint covers; None if it covers nothing after them."""
        n_before, covered = self._covered(drafted)
        return covered if covered is None or n_before + len(covered) == len(drafted) else None

    def _mask_after(self, drafted: tuple[int, ...]) -> Mask | None:
        within = self._within(drafted)
        if within is None:
            return None
        with _Ahead(self._matcher, within) as is_valid:
            return self._fill([])[0] if is_valid else None

    def _look_ahead(self, drafted: tuple[int, ...]) -> None:
        """Fill in the masks before and after each of ``drafted``, all in one call."""
        n_before, covered = self._covered(drafted)
        try:
            masks = [] if covered is None else self._fill(covered)
        except ConstraintError:
            return  # at some place of the draft; ``allowed`` finds out at which, if it matters
        for i in range(len(drafted) + 1):
            is_covered = n_before <= i < n_before + len(masks)
            self._masks[drafted[:i]] = masks[i - n_before] if is_covered else None

    def _fill(self, drafted: list[int]) -> list[Mask | None]:
        """The masks from here to the end of ``drafted``; None after a token that is not allowed."""
        n_valid = int(self._matcher.validate_tokens(drafted)) if drafted else 0
        n_rows, n_vocab = len(drafted) + 1, self._vocabulary.n_tokens
        module = llguidance().numpy
        bits = module.allocate_token_bitmask(n_rows, self._vocabulary.tokenizer.vocab_size)
        if drafted:
            module.fill_next_token_bitmask_par_with_draft_tokens(
                self._vocabulary.executor, [(self._matcher, 0, drafted)], bits
            )
        else:
            module.fill_next_token_bitmask(self._matcher, bits)
        if error := self._failure():
            self._start_again()
            raise error
        unpacked = np.unpackbits(bits.view(np.uint8), axis=1, bitorder="little")[:, :n_vocab]
        masks: list[Mask | None] = [row.view(np.bool_) for row in unpacked]
        masks[n_valid + 1 :] = [None] * (n_rows - n_valid - 1)
        return masks

    def _failure(self) -> ConstraintError | None:
        """Why the matcher has given up; None if it has not."""
        if not self._matcher.is_error():
            return None
        reason = str(self._matcher.get_error()).strip().splitlines() or ["it gives no reason"]
        if "NoExtension" in reason[0]:
            return self._dead_end()
        return ConstraintError(
            f"llguidance cannot follow {self._called} any further: {reason[0]}",
            hint="use a simpler one",
        )

    def _dead_end(self) -> ConstraintError:
        return ConstraintError(
            f"no token of this model can follow the text under {self._called}",
            hint="look for a part of it that no text can match",
        )

    def _start_again(self) -> None:
        """Make the matcher anew: after an error it stays in that state."""
        self._matcher = self._vocabulary.matcher(self._grammar)
        self._text = []
        self._masks.clear()


class _Ahead:
    """The matcher after draft tokens, for a moment; false if one of them is not allowed."""

    def __init__(self, matcher: Any, tokens: Sequence[int]) -> None:
        self._matcher, self._tokens, self._n = matcher, list(tokens), 0

    def __enter__(self) -> bool:
        if self._tokens:
            self._n = int(self._matcher.try_consume_tokens(self._tokens))
        return self._n == len(self._tokens)

    def __exit__(self, *error: object) -> None:
        if self._n:
            self._matcher.rollback(self._n)
