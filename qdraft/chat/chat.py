"""A chat: what was said, the caches that hold it, and the file that it is saved to."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from qdraft.chat.answer import Answer
from qdraft.chat.compaction import INSTRUCTION, choose_turns, summary_room, with_instruction
from qdraft.chat.conversation import (
    ASSISTANT,
    SYSTEM,
    USER,
    Conversation,
    Message,
    Messages,
)
from qdraft.chat.reuse import keep_tokens
from qdraft.chat.settings import Settings
from qdraft.chat.transcript import Read, Transcript
from qdraft.decoding.drafters.kinds import KINDS
from qdraft.decoding.records import DecodeParams, Round
from qdraft.decoding.summary import Summary, summarize
from qdraft.errors import ContextError, UsageError
from qdraft.llama.chat_template import NO_OPTIONS, TemplateOptions
from qdraft.session.pair import Pair
from qdraft.session.prompt import encode_messages
from qdraft.session.reasoning import find_marks, switch_reasoning

log = logging.getLogger(__name__)

# Tokens that the context must have left for an answer. Not measured: a sentence.
_ROOM = 32
_WAYS_OUT = "make room with /compact, /drop N (the oldest N turns) or /clear"


class Chat:
    """Messages and answers on one session of a pair; use it as a context manager.

    ``unsent`` is a question without an answer, to be asked again, ``attached`` are texts that go
    before the next question. ``transcript`` None saves nothing.
    """

    def __init__(
        self,
        pair: Pair,
        settings: Settings,
        transcript: Transcript | None = None,
        *,
        template: TemplateOptions = NO_OPTIONS,
        split_reasoning: bool = True,
        parse_special: bool = False,
    ) -> None:
        """``template`` is what the chat template gets beside the messages.

        ``split_reasoning`` keeps the reasoning apart from the answers. ``parse_special`` reads the
        names of control tokens in messages as these tokens. Raises UsageError if the target has no
        chat template.
        """
        if not pair.vocab.has_chat_template:
            raise UsageError(
                f"{pair.target.path.name} has no chat template, which a chat needs",
                hint="give it one with --chat-template-file",
            )
        self.pair = pair
        self.settings = settings
        self.conversation = Conversation()
        self.transcript = transcript
        self.unsent = ""
        self.attached: list[str] = []
        self.last: Answer | None = None
        self._template = template
        self._splits = split_reasoning
        self._parse_special = parse_special
        self._session = pair.session()
        self._known: list[int] = []  # the tokens of the last prompt and answer
        self._rounds: list[Round] = []
        self._is_unsaved = False

    @property
    def n_ctx(self) -> int:
        """Tokens that the context holds."""
        return self.pair.contexts.target.n_ctx

    @property
    def summary(self) -> Summary:
        """The figures of all answers together."""
        kind = KINDS[self.settings.decode.drafter]
        return summarize(self._rounds, costs=self.pair.learned.costs, source=kind.source)

    def ask(self, text: str) -> Answer:
        """Return the answer to a message of the user, after the texts that are attached.

        Raises ContextError if the context has no room for it, and UsageError if the message is
        empty or the template refuses it. The chat is then as before.
        """
        if not text.strip():
            raise UsageError("the message is empty")
        question = Message(USER, "\n\n".join([*self.attached, text]))
        messages = (*self.conversation.messages, question)

        def settle(reply: Message) -> None:
            self.attached.clear()
            self.conversation.change((*messages, reply))
            self._save(self.conversation.messages, **self._figures())

        answer = self._answer(messages, settle)
        self._save(messages)
        return answer

    def retry(self, text: str | None = None) -> Answer:
        """Return a new answer to the last question, or to ``text`` in its place.

        It replaces the old one if anything comes of it. A fixed seed would repeat the old answer,
        so this draws one. Raises what ``ask`` raises.
        """
        messages = self.conversation.question_again(text)
        change = "retry" if text is None else "edit"

        def settle(reply: Message) -> None:
            self.conversation.change((*messages, reply), again=True)
            self._save(self.conversation.messages, change, **self._figures())

        return self._answer(messages, settle, replace(self.settings.decode, seed=-1))

    def compact(self) -> Answer:
        """Return a summary of the oldest turns, which replaces them when it ends.

        Those are all turns if the context has room for the summary beside them. Raises UsageError
        if there are no turns, and ContextError if there is no room.
        """
        head, turns = self.conversation.head, self.conversation.turns
        if not turns:
            raise UsageError("there is nothing to sum up yet")
        n = choose_turns(head, turns, self.encode, self.n_ctx)
        kept = [message for turn in turns[n:] for message in turn]

        def settle(summary: Message) -> None:
            self.conversation.change((*head, Message(USER, INSTRUCTION), summary, *kept))
            self._save(self.conversation.messages, "compact")

        decode = replace(self.settings.decode, n_predict=summary_room(self.n_ctx))
        return self._answer(with_instruction(head, turns[:n]), settle, decode)

    def set_system(self, text: str | None) -> None:
        """Begin the chat with another system message, or with none."""
        head = () if text is None else (Message(SYSTEM, text),)
        old = self.conversation
        self._change((*head, *old.messages[len(old.head) :]), "system")

    def clear(self) -> None:
        """Forget all turns; the system message stays."""
        self._change(self.conversation.head, "clear")

    def drop(self, n: int) -> int:
        """Forget the oldest ``n`` turns; return how many are left. Raises UsageError."""
        turns = self.conversation.turns
        if not turns:
            raise UsageError("there is no turn to drop")
        if not 1 <= n <= len(turns):
            raise UsageError(
                f"/drop is {n} but must be from 1 to {len(turns)}, the turns there are"
            )
        kept = [message for turn in turns[n:] for message in turn]
        self._change((*self.conversation.head, *kept), "drop")
        return len(turns) - n

    def undo(self) -> None:
        """Take the last change of the chat back. Raises UsageError if there is none."""
        self.conversation.undo()
        self._save(self.conversation.messages, "undo")

    def save_as(self, path: Path) -> Path:
        """Save the chat in a new file, and go on in it. Raises OSError if that fails."""
        about = self.transcript.about if self.transcript else {}
        transcript = Transcript(path, about)
        transcript.record(self.conversation.messages)
        if self.transcript:
            self.transcript.close()
        self.transcript = transcript
        return path

    def load(self, path: Path, *, keep: bool = True) -> Read:
        """Go on with the chat in a file; ``keep`` False saves nothing in it.

        Raises UsageError if it is no chat, or another program has it open. The chat is then as
        before.
        """
        about = self.transcript.about if self.transcript else {}
        transcript = Transcript(path, about)
        read = transcript.resume()
        if self.transcript:
            self.transcript.close()
        if not keep:
            transcript.close()
        self.transcript = transcript if keep else None
        messages = read.messages
        if messages and messages[-1].role == USER:
            self.unsent, messages = messages[-1].content, messages[:-1]
        self.conversation = Conversation(messages)
        return read

    def encode(self, messages: Messages) -> list[int]:
        """Return the tokens of a prompt, those that the caches hold as they are there."""
        vocab = self.pair.vocab
        tokens = encode_messages(
            vocab,
            [message.as_dict() for message in messages],
            template=self._template,
            parse_special=self._parse_special,
        )
        return keep_tokens(vocab, self._known, tokens)

    def set_think(self, think: str) -> None:
        """Have the model reason or not; see ``Settings.think``.

        Raises UsageError for another value, or if the template has no switch for that.
        """
        before = self.settings.think
        self.settings.choose("think", think)
        on = think != "off"
        if on == (before != "off"):
            return
        vocab = self.pair.vocab
        try:
            never = on and find_marks(vocab) is None  # it did not reason before, either
            switch = {} if never else switch_reasoning(vocab, on=on)
        except UsageError:
            self.settings.think = before
            raise
        self._template = replace(self._template, kwargs={**self._template.kwargs, **switch})

    def n_used(self) -> int:
        """Return how many tokens of the context the chat takes as it is."""
        messages = self.conversation.messages
        return len(self.encode(messages)) if messages else 0

    def close(self) -> None:
        """Give the cells back and close the file; harmless when repeated."""
        self._session.close()
        if self.transcript:
            self.transcript.close()

    def __enter__(self) -> Chat:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _answer(
        self,
        messages: Messages,
        settle: Callable[[Message], None],
        decode: DecodeParams | None = None,
    ) -> Answer:
        """Return the answer to messages; ``settle`` takes it in if anything comes of it."""
        decode = decode or self.settings.decode
        prompt = self.encode(messages)
        self._require_room(len(prompt), decode.n_predict)

        def end(answer: Answer) -> None:
            text = answer.generation
            self._rounds += text.rounds
            if not text.tokens:  # stopped before the first token: as if it had not been asked
                self._save(self.conversation.messages, "undo")
                return
            self._known = [*text.prompt, *text.tokens]
            settle(Message(ASSISTANT, answer.text, text.reasoning, answer.cut))

        generation = self._session.generate(
            prompt, self.settings.sampling, decode, split_reasoning=self._splits
        )
        self.last = Answer(generation, self.n_ctx, end)
        return self.last

    def _require_room(self, n: int, n_predict: int) -> None:
        """Raise ContextError if ``n`` tokens leave no room for an answer."""
        room = _ROOM if n_predict < 0 else min(_ROOM, n_predict)
        if n + room <= self.n_ctx:
            return
        hint = _WAYS_OUT if self.conversation.turns else "shorten the message, or raise -c"
        what = f"the chat has {n} tokens with this message"
        if n >= self.n_ctx:
            raise ContextError(f"{what}, but the context holds {self.n_ctx}", hint=hint)
        raise ContextError(
            f"{what}, which leaves {self.n_ctx - n} of the context of {self.n_ctx} for an answer",
            hint=hint,
        )

    def _change(self, messages: Messages, what: str) -> None:
        self.conversation.change(messages)
        self._save(messages, what)

    def _figures(self) -> dict[str, Any]:
        """What the line of an answer says beside its text."""
        assert self.last
        figures = self.last.figures
        names = ("n_tokens", "tokens_per_second", "speedup", "alpha")
        return {name: getattr(figures.summary, name) for name in names} | {"seed": figures.seed}

    def _save(self, messages: Messages, change: str = "", **figures: Any) -> None:
        """Write to the transcript; a chat that cannot be saved goes on, with one warning."""
        if self.transcript is None:
            return
        try:
            self.transcript.record(messages, change, **figures)
        except OSError as error:
            if not self._is_unsaved:
                log.warning("the chat is not saved: %s", error.strerror or error)
            self._is_unsaved = True
        else:
            self._is_unsaved = False
