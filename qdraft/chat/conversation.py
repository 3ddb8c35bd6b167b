"""The messages of a chat, and the way back to what they were before."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from qdraft.errors import UsageError

SYSTEM, USER, ASSISTANT = "system", "user", "assistant"
ROLES = (SYSTEM, USER, ASSISTANT)


@dataclass(frozen=True, slots=True)
class Message:
    """What one side said.

    ``reasoning`` is what the model thought before it answered. ``cut`` says why an answer is not
    whole, as a ``FinishReason`` has it; it is empty if the model ended it.
    """

    role: str
    content: str
    reasoning: str = ""
    cut: str = ""

    def as_dict(self) -> dict[str, Any]:
        """The message as OpenAI's API and chat templates have it."""
        message = {"role": self.role, "content": self.content}
        return message | ({"reasoning_content": self.reasoning} if self.reasoning else {})


Messages = tuple[Message, ...]


class Conversation:
    """The messages of a chat, the system message first if there is one.

    ``change`` and ``undo`` are the only ways to other messages. A turn is a message of the user
    and the answer to it.
    """

    def __init__(self, messages: Messages = ()) -> None:
        self._messages = messages
        self._before: list[Messages] = []  # the newest last

    @property
    def messages(self) -> Messages:
        return self._messages

    @property
    def system(self) -> str | None:
        """The system message; None if there is none."""
        return self.head[0].content if self.head else None

    @property
    def head(self) -> Messages:
        """The system message alone, or nothing."""
        return tuple(m for m in self._messages[:1] if m.role == SYSTEM)

    @property
    def turns(self) -> list[Messages]:
        """The turns, oldest first; what stands before the first message of the user is one too."""
        return split_turns(self._messages[len(self.head) :])

    @property
    def last_question(self) -> str | None:
        """The newest message of the user."""
        return self._last(USER)

    @property
    def last_answer(self) -> str | None:
        return self._last(ASSISTANT)

    def _last(self, role: str) -> str | None:
        return next((m.content for m in reversed(self._messages) if m.role == role), None)

    def question_again(self, text: str | None = None) -> Messages:
        """Return the messages up to the newest question, with ``text`` in its place if given.

        Raises UsageError if nothing was asked.
        """
        places = [i for i, message in enumerate(self._messages) if message.role == USER]
        if not places:
            raise UsageError("there is no message of yours to answer again")
        asked = self._messages[places[-1]] if text is None else Message(USER, text)
        return (*self._messages[: places[-1]], asked)

    def change(self, messages: Messages, *, again: bool = False) -> None:
        """Go on with other messages; with ``again`` an undo goes back past what they replace."""
        if not again:
            self._before.append(self._messages)
        self._messages = messages

    def undo(self) -> None:
        """Go back to the messages before the last change, else without the last turn.

        Raises UsageError if there is nothing to take back.
        """
        if self._before:
            self._messages = self._before.pop()
        elif self.turns:
            self._messages = self._messages[: -len(self.turns[-1])]
        else:
            raise UsageError("there is nothing to undo")


def split_turns(messages: Messages) -> list[Messages]:
    """Return the messages in groups, each of which starts with one of the user."""
    turns: list[Messages] = []
    for message in messages:
        if message.role == USER or not turns:
            turns.append((message,))
        else:
            turns[-1] = (*turns[-1], message)
    return turns
