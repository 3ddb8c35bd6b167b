"""The loop of speculative decoding: draft, verify, accept, cut, commit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from qdraft.decoding.drafters.protocol import Drafter
from qdraft.decoding.engine import Engine
from qdraft.decoding.policy.schedule import Schedule
from qdraft.decoding.records import Draft, FinishReason, Round, Times
from qdraft.decoding.rng import Rng
from qdraft.decoding.sampling import Sampler
from qdraft.decoding.verification import verify
from qdraft.errors import ContextError

Stop = Callable[[int], FinishReason | None]
Clock = Callable[[], float]


def decode(
    target: Engine,
    drafter: Drafter,
    prompt: Sequence[int],
    sampler: Sampler,
    schedule: Schedule,
    rng: Rng,
    *,
    stop: Stop,
    clock: Clock,
    n_predict: int = -1,
    verify_block: bool = False,
) -> Iterator[Round]:
    """Generate after ``prompt`` (token ids, at least one), yielding each round.

    The emitted tokens have the law of the target alone under ``sampler``, whatever the
    drafter proposes; ``verify_block`` takes block verification instead of token-level.
    ``stop`` is called once for each emitted token, in order, and ends the text after that
    token by returning a reason. Between rounds the target's cache holds all tokens but the
    last: row 0 of the next verify batch belongs to that one.

    Raises ContextError when the prompt leaves no room, LogitsError on bad target logits.
    """
    if len(prompt) >= target.n_ctx:
        raise ContextError(
            f"the prompt has {len(prompt)} tokens, but the context holds {target.n_ctx}",
            hint="raise -c, or shorten the prompt; one place is needed for the answer",
        )
    tokens = list(prompt)
    finish = FinishReason.LENGTH if n_predict == 0 else None
    target.truncate(0)
    drafter.begin(prompt)
    index = 0
    while finish is None:
        started = clock()
        n_context = len(tokens)
        pending = tokens[target.n_past :]
        budget = target.n_ctx - n_context
        if n_predict >= 0:
            budget = min(budget, n_predict - (n_context - len(prompt)))
        # The prompt's own round drafts nothing: the first token is not kept waiting.
        gate = schedule.plan(budget - 1 if index else 0)
        draft = drafter.draft(tokens, gate, sampler, rng) if budget > 1 else Draft()
        drafted = clock()
        rows = target.eval([*pending, *draft.tokens], draft.n + 1)
        evaluated = clock()
        verdict = verify(draft, rows, tokens, sampler, rng, block=verify_block)
        block, finish = cut(verdict.tokens, stop)
        tokens += block
        if finish is None and len(block) >= budget:
            full = len(tokens) >= target.n_ctx
            finish = FinishReason.CONTEXT_FULL if full else FinishReason.LENGTH
        target.truncate(len(tokens) - 1)
        drafter.accept(min(verdict.n_accepted, len(block)), tokens)
        round = Round(
            index,
            n_context,
            len(pending) if index == 0 else 0,
            draft.without_probs(),
            verdict,
            tuple(block),
            finish,
            Times(drafted - started, evaluated - drafted, clock() - evaluated),
        )
        schedule.observe(round)
        index += 1
        yield round


def cut(block: Sequence[int], stop: Stop) -> tuple[list[int], FinishReason | None]:
    """The tokens up to and including the first at which the text ends."""
    for i, token in enumerate(block):
        reason = stop(token)
        if reason is not None:
            return list(block[: i + 1]), reason
    return list(block), None
