"""Stand-ins for tests of qdraft and of programs built on it: no model, no clock."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from qdraft.decoding.drafters.protocol import Verified
from qdraft.decoding.engine import n_common
from qdraft.decoding.policy.gate import Gate
from qdraft.decoding.records import Draft
from qdraft.decoding.rng import Rng
from qdraft.decoding.sampling import Sampler
from qdraft.errors import ContextError, EngineError, RollbackError
from qdraft.llama.chat_template import NO_OPTIONS, TemplateOptions

LogitsFn = Callable[[tuple[int, ...]], Sequence[float]]
Result = TypeVar("Result")


class FakeVocab:
    """A vocabulary given by its pieces; token ids index ``pieces``."""

    def __init__(
        self,
        pieces: Sequence[bytes],
        *,
        end: Sequence[int] = (),
        bos: int = -1,
        chat: str | None = None,
        control: Sequence[int] = (),
    ) -> None:
        self._pieces = tuple(pieces)
        self._end = frozenset(end)
        self._chat = chat
        self._control = frozenset(control)
        self.bos = bos

    @property
    def n_tokens(self) -> int:
        return len(self._pieces)

    @property
    def has_chat_template(self) -> bool:
        return self._chat is not None

    @property
    def chat_template(self) -> str:
        return self._chat or ""

    def is_end(self, token: int) -> bool:
        return token in self._end

    def is_control(self, token: int) -> bool:
        return token in self._end or token in self._control or token == self.bos

    def is_special(self, token: int) -> bool:
        return self.is_control(token)

    def piece(self, token: int, *, special: bool = False) -> bytes:
        hidden = token in self._end or token in self._control
        return b"" if hidden and not special else self._pieces[token]

    def tokenize(self, text: str, *, parse_special: bool = True, add_bos: bool = True) -> list[int]:
        """Take the longest match first; skip a byte that no piece begins with."""
        data, tokens = text.encode(), [self.bos] if self.bos >= 0 and add_bos else []
        order = sorted(range(len(self._pieces)), key=lambda t: -len(self._pieces[t]))
        order = [t for t in order if self._pieces[t] and (parse_special or not self.is_control(t))]
        while data:
            token = next((t for t in order if data.startswith(self._pieces[t])), None)
            if token is not None:
                tokens.append(token)
            data = data[1 if token is None else len(self._pieces[token]) :]
        return tokens

    def render_chat(
        self, messages: Sequence[dict[str, Any]], options: TemplateOptions = NO_OPTIONS
    ) -> str:
        return (self._chat or "").join(m["content"] for m in messages)


class FakeSequence:
    """A sequence whose logits are a function of the text so far.

    It hands out a row buffer that the next eval overwrites (as llama.cpp does), and records the
    width of every eval in ``widths``.
    """

    def __init__(
        self,
        logits_fn: LogitsFn,
        vocab: FakeVocab,
        *,
        n_ctx: int = 4096,
        can_rollback: bool = True,
    ) -> None:
        self._logits_fn = logits_fn
        self._can_rollback = can_rollback
        self._rows = np.zeros((0, vocab.n_tokens), dtype=np.float32)
        self.vocab = vocab
        self.n_ctx = n_ctx
        self.tokens: list[int] = []
        self.widths: list[int] = []
        self.closed = False

    @property
    def n_past(self) -> int:
        return len(self.tokens)

    def eval(self, tokens: Sequence[int], logits: int) -> NDArray[np.float32]:
        if self.closed:
            raise EngineError("this sequence is closed")
        if len(self.tokens) + len(tokens) > self.n_ctx:
            raise ContextError("the context is full")
        self._rows[:] = np.nan  # whoever kept the last rows must notice
        self.widths.append(len(tokens))
        text = self._read(tokens)
        n = len(text)
        rows = [self._logits_fn(tuple(text[:i])) for i in range(n - logits + 1, n + 1)]
        self._rows = np.array(rows, dtype=np.float32).reshape(logits, self.vocab.n_tokens)
        return self._rows

    def _read(self, tokens: Sequence[int]) -> Sequence[int]:
        """Take in tokens; return what the logits depend on."""
        self.tokens += tokens
        return self.tokens

    def checkpoint(self, n_ahead: int | None = None) -> None:
        pass

    def truncate(self, n_past: int) -> None:
        if n_past < self.n_past and n_past and not self._can_rollback:
            raise RollbackError("this cache cannot be cut back")
        del self.tokens[n_past:]

    def keep(self, tokens: Sequence[int]) -> int:
        n = n_common(self.tokens, tokens)
        self.truncate(n if self._can_rollback or n == self.n_past else 0)
        return self.n_past

    def close(self) -> None:
        self.closed = True


class FakeStateSequence(FakeSequence):
    """A sequence of a model with a recurrent state: it goes back to its checkpoint, or to nothing.

    Its logits are a function of what its state has read, so a state that went back to a wrong place
    gives wrong rows. Of the tokens of the last eval, ``truncate`` can also take back up to
    ``n_back`` one by one, once, and all but the first.
    """

    def __init__(
        self, logits_fn: LogitsFn, vocab: FakeVocab, *, n_ctx: int = 4096, n_back: int = 0
    ) -> None:
        super().__init__(logits_fn, vocab, n_ctx=n_ctx)
        self.n_back = n_back
        self.state: list[int] = []
        self._marked: tuple[list[int], list[int]] | None = None
        self._n_last = 0  # tokens that can be taken back, and one more

    def _read(self, tokens: Sequence[int]) -> Sequence[int]:
        super()._read(tokens)
        self.state += tokens
        self._n_last = len(tokens)
        return self.state

    def checkpoint(self, n_ahead: int | None = None) -> None:
        self._marked = list(self.tokens), list(self.state)

    def truncate(self, n_past: int) -> None:
        n_taken = self.n_past - n_past
        if n_taken <= 0:
            return
        if n_past and n_taken < self._n_last and n_taken <= self.n_back:
            self._take_back(n_taken)
        elif self._marked and len(self._marked[0]) <= n_past:
            self.tokens, self.state = (list(each) for each in self._marked)
        else:
            self.tokens, self.state, self._marked = [], [], None
        self._n_last = 0

    def _take_back(self, n: int) -> None:
        del self.tokens[-n:], self.state[-n:]

    def take_over(self, source: FakeSequence) -> None:
        """Become a copy of ``source``, and remember this place."""
        self.tokens = list(source.tokens)
        self.state = list(getattr(source, "state", source.tokens))
        self._n_last = 0
        self.checkpoint()


class FakeKvCopy:
    """Copies the cells of one FakeSequence to another; records where each copy started."""

    def __init__(self, source: FakeSequence, destination: FakeSequence) -> None:
        self._source = source
        self._destination = destination
        self.starts: list[int] = []

    def copy(self, start: int) -> None:
        self.starts.append(start)
        if isinstance(self._destination, FakeStateSequence):
            self._destination.take_over(self._source)
            return
        self._destination.tokens[start:] = self._source.tokens[start:]


class ScriptedDrafter:
    """Proposes what ``script(context)`` returns, as far as the gate admits, as point masses."""

    source = "script"

    def __init__(self, script: Callable[[Sequence[int]], Sequence[int]]) -> None:
        self._script = script
        self.accepted: list[int] = []

    def begin(self, prompt: Sequence[int]) -> None:
        self.accepted.clear()

    def draft(self, context: Sequence[int], gate: Gate, sampler: Sampler, rng: Rng) -> Draft:
        tokens: list[int] = []
        for token in self._script(context):
            if not (gate.more(self.source) and gate.take(self.source, 1.0)):
                break
            tokens.append(token)
        n = len(tokens)
        return Draft(tuple(tokens), None, self.source, confidence=(1.0,) * n, n_rows=n)

    def accept(self, verified: Verified) -> None:
        self.accepted.append(verified.n_accepted)


class FakeClock:
    """A clock that advances by ``step`` seconds each time it is read."""

    def __init__(self, step: float = 1.0) -> None:
        self.now = 0.0
        self._step = step

    def __call__(self) -> float:
        self.now += self._step
        return self.now


class EnumeratingRng:
    """Walks one path through the tree of all random decisions; see ``enumerate_law``."""

    def __init__(self, path: Sequence[int]) -> None:
        self._path = path
        self.weight = 1.0
        self.branches: list[int] = []  # number of branches at each decision on this path

    def accept(self, probability: float) -> bool:
        p = min(1.0, max(0.0, probability))
        return self._take(np.array([1 - p, p])) == 1

    def draw(self, weights: NDArray[np.float64]) -> int:
        return self._take(weights / weights.sum())

    def _take(self, probs: NDArray[np.float64]) -> int:
        live = np.flatnonzero(probs)  # leaves out impossible branches
        depth = len(self.branches)
        branch = int(live[self._path[depth] if depth < len(self._path) else 0])
        self.branches.append(len(live))
        self.weight *= float(probs[branch])
        return branch


def enumerate_law(run: Callable[[Rng], Result]) -> dict[Result, float]:
    """The exact probability of each result of a random program.

    Calls ``run`` once for each path of random decisions. ``run`` must be finite, and make every
    random decision through the Rng that it gets.
    """
    law: dict[Result, float] = {}
    for rng, result in _paths(run):
        law[result] = law.get(result, 0.0) + rng.weight
    return law


def _paths(run: Callable[[Rng], Result]) -> Iterator[tuple[EnumeratingRng, Result]]:
    path: list[int] | None = []
    while path is not None:
        rng = EnumeratingRng(path)
        yield rng, run(rng)
        taken = path + [0] * (len(rng.branches) - len(path))
        while taken and taken[-1] == rng.branches[len(taken) - 1] - 1:
            taken.pop()
        path = [*taken[:-1], taken[-1] + 1] if taken else None
