"""A summary of a chat by the model itself, in place of the turns that it sums up."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from qdraft.chat.conversation import USER, Message, Messages
from qdraft.errors import ContextError

INSTRUCTION = (
    "Summarize our conversation so far, so that we can go on from your summary alone. Keep facts, "
    "names, numbers, decisions, code and open questions. Write only the summary."
)
_SHARE = 4  # of the context: what a summary may take at most is one part of so many
_MOST = 1024  # tokens of a summary


def summary_room(n_ctx: int) -> int:
    """Return how many tokens a summary may have."""
    return min(_MOST, n_ctx // _SHARE)


def choose_turns(
    head: Messages, turns: Sequence[Messages], encode: Callable[[Messages], list[int]], n_ctx: int
) -> int:
    """Return how many of the oldest turns to sum up: all if the context has room for that.

    Raises ContextError if the first turn alone leaves no room for its summary.
    """
    room = n_ctx - summary_room(n_ctx)
    for n in range(len(turns), 0, -1):
        if len(encode(with_instruction(head, turns[:n]))) <= room:
            return n
    n_first = len(encode(with_instruction(head, turns[:1])))
    raise ContextError(
        f"the first turn has {n_first} tokens, which leaves no room for a summary in the context "
        f"of {n_ctx}",
        hint="/drop 1 takes it out of the chat",
    )


def with_instruction(head: Messages, turns: Sequence[Messages]) -> Messages:
    """Return the system message and the turns, and after them the request to sum them up."""
    return (*head, *(message for turn in turns for message in turn), Message(USER, INSTRUCTION))
