"""A chat without a model: messages and their tokens, transcripts, and every command."""

from __future__ import annotations

import json
import logging
import os
import stat
from pathlib import Path

import pytest
from chatting import ASSISTANT as ASSISTANT_MARK
from chatting import END, PIECES, ChatVocab, make_chat, say

from qdraft.chat.chat import Chat
from qdraft.chat.commands import COMMANDS, Effect, describe_load, parse, run
from qdraft.chat.compaction import INSTRUCTION
from qdraft.chat.conversation import ASSISTANT, SYSTEM, USER, Conversation, Message
from qdraft.chat.reuse import keep_tokens
from qdraft.chat.transcript import Transcript, find_chat, list_chats, new_path, read_chat
from qdraft.errors import ContextError, QDraftError, UsageError

VOCAB = ChatVocab()


def texts(chat: Chat) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in chat.conversation.messages]


def command(chat: Chat, line: str) -> Effect:
    parsed = parse(line)
    assert parsed
    return run(chat, *parsed)


def finish(effect: Effect) -> str:
    """Read the answer that a command gives."""
    assert effect.answer
    for _ in effect.answer:
        pass
    return effect.answer.text


class TestReuse:
    def test_other_tokens_of_the_same_text_are_kept_up_to_a_control_token(self) -> None:
        fresh = VOCAB.tokenize("<user>hi<end><assistant>the end<end><user>an<end><assistant>")
        known = [*VOCAB.tokenize("<user>hi<end><assistant>"), *b"the end", END]
        kept = keep_tokens(VOCAB, known, fresh)
        assert kept[: len(known)] == known
        assert kept[len(known) :] == VOCAB.tokenize("<user>an<end><assistant>")

    def test_text_that_goes_on_is_tokenized_anew(self) -> None:
        known = [*VOCAB.tokenize("<user>"), *b"th"]
        fresh = VOCAB.tokenize("<user>the<end>")
        assert keep_tokens(VOCAB, known, fresh) == fresh
        known = [*VOCAB.tokenize("<user>"), *b"the"]
        fresh = VOCAB.tokenize("<user>then<end>")
        assert keep_tokens(VOCAB, known, fresh) == fresh

    def test_the_name_of_a_control_token_is_not_the_token(self) -> None:
        known = [*b"<end>", END]
        fresh = [END, END]
        assert keep_tokens(VOCAB, known, fresh) == fresh

    @pytest.mark.parametrize("known", [[], [END], list(b"xyz")], ids=["none", "end", "other"])
    def test_nothing_in_common(self, known: list[int]) -> None:
        fresh = VOCAB.tokenize("<user>hi<end>")
        assert keep_tokens(VOCAB, known, fresh) == fresh


class TestConversation:
    def test_undo_goes_back_change_by_change_and_then_turn_by_turn(self) -> None:
        first = (Message(USER, "a"), Message(ASSISTANT, "b"))
        second = (*first, Message(USER, "c"), Message(ASSISTANT, "d"))
        conversation = Conversation(second)
        conversation.change(())
        conversation.undo()
        assert conversation.messages == second
        conversation.undo()
        assert conversation.messages == first
        conversation.undo()
        assert conversation.messages == ()
        with pytest.raises(UsageError, match="nothing to undo"):
            conversation.undo()

    def test_turns_and_the_system_message(self) -> None:
        system = Message(SYSTEM, "s")
        turn = (Message(USER, "a"), Message(ASSISTANT, "b"))
        conversation = Conversation((system, *turn, Message(USER, "c")))
        assert conversation.system == "s"
        assert conversation.turns == [turn, (Message(USER, "c"),)]
        assert conversation.question_again("x") == (system, *turn, Message(USER, "x"))


class TestAnswers:
    def test_a_turn_reads_the_new_text_alone(self) -> None:
        chat = make_chat("the end", "another end", "an end")
        n_before = 0
        for turn in range(3):
            text = f"question {turn}"
            say(chat, text)
            assert chat.last
            figures = chat.last.figures
            # The last token of the answer before had no successor yet, so it was not decoded.
            assert figures.n_reused == max(0, n_before - 1)
            n_new = len(VOCAB.tokenize(f"<user>{text}<end><assistant>"))
            assert figures.n_read == n_new + (1 if turn else 0)
            n_before = figures.n_context
        assert texts(chat)[1::2] == [
            (ASSISTANT, "the end"),
            (ASSISTANT, "another end"),
            (ASSISTANT, "an end"),
        ]
        assert chat.summary.n_accepted > 0
        assert chat.n_used() == n_before + 1  # and the mark of an answer

    def test_a_stopped_answer_stays_and_is_marked(self) -> None:
        chat = make_chat("a very long answer")
        answer = chat.ask("hi")
        for _ in answer:
            answer.stop()
        assert answer.cut == "interrupted"
        assert answer.text == "a"
        assert chat.conversation.messages[-1] == Message(ASSISTANT, "a", cut="interrupted")
        say(chat, "go on")
        assert chat.last
        assert chat.last.figures.n_reused == 5  # its one token had no successor

    def test_an_answer_stopped_before_its_first_token_leaves_no_turn(self) -> None:
        chat = make_chat()
        say(chat, "one")
        chat.ask("two").end()
        assert texts(chat) == [(USER, "one"), (ASSISTANT, "the end")]
        assert chat.transcript
        assert read_chat(chat.transcript.path).messages == chat.conversation.messages

    def test_a_message_that_does_not_fit_is_refused_with_both_numbers(self) -> None:
        chat = make_chat(n_ctx=100)
        say(chat, "hello")
        with pytest.raises(ContextError, match=r"has 119 tokens .* holds 100") as error:
            chat.ask("x" * 100)
        assert all(way in str(error.value.hint) for way in ("/compact", "/drop N", "/clear"))
        with pytest.raises(ContextError, match="leaves 21 of the context of 100"):
            chat.ask("x" * 60)
        assert len(chat.conversation.turns) == 1
        say(chat, "x" * 30)

    def test_an_answer_that_fills_the_context_says_so(self) -> None:
        chat = make_chat("y" * 200, n_ctx=100)
        say(chat, "hello")
        assert chat.conversation.messages[-1].cut == "context_full"
        assert chat.last
        assert chat.last.figures.n_context == 100

    @pytest.mark.parametrize("text", ["", " \n"])
    def test_a_message_needs_text(self, text: str) -> None:
        with pytest.raises(UsageError, match="the message is empty"):
            make_chat().ask(text)

    def test_without_a_template_there_is_no_chat(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(ChatVocab, "has_chat_template", False)
        with pytest.raises(UsageError, match=r"target\.gguf has no chat template"):
            make_chat()


class TestTranscript:
    def lines(self, chat: Chat) -> list[dict[str, object]]:
        assert chat.transcript
        text = chat.transcript.path.read_text(encoding="utf-8")
        return [json.loads(line) for line in text.splitlines()]

    def test_each_turn_is_a_line_for_each_message(self) -> None:
        chat = make_chat()
        answer = chat.ask("hi \u2603")
        head, question = self.lines(chat)  # before the answer
        assert (head["qdraft_chat"], head["target"]) == (1, "target.gguf")
        assert (question["role"], question["content"]) == (USER, "hi \u2603")
        for _ in answer:
            pass
        reply = self.lines(chat)[2]
        assert (reply["role"], reply["content"]) == (ASSISTANT, "the end")
        assert reply["n_tokens"] == 8
        say(chat, "more")
        assert len(self.lines(chat)) == 5

    def test_only_the_user_may_read_it(self) -> None:
        chat = make_chat()
        say(chat, "secret")
        assert chat.transcript
        assert stat.S_IMODE(chat.transcript.path.stat().st_mode) == 0o600

    def test_a_change_replaces_all_messages(self) -> None:
        chat = make_chat()
        say(chat, "one")
        say(chat, "two")
        chat.drop(1)
        last = self.lines(chat)[-1]
        assert last["change"] == "drop"
        assert [each["content"] for each in last["messages"]] == ["two", "the end"]  # type: ignore[attr-defined]
        assert chat.transcript
        assert read_chat(chat.transcript.path).messages == chat.conversation.messages

    def test_a_chat_goes_on_where_it_was(self) -> None:
        first = make_chat()
        first.set_system("be brief")
        say(first, "one")
        first.close()
        second = make_chat()
        describe_load(second, find_chat())
        assert second.conversation.messages == first.conversation.messages
        say(second, "two")
        second.undo()
        second.close()
        third = make_chat()
        third.load(find_chat())
        assert third.conversation.messages == first.conversation.messages

    def test_a_line_that_was_cut_is_left_out_and_the_next_one_is_whole(self) -> None:
        chat = make_chat()
        say(chat, "one")
        chat.close()
        path = find_chat()
        with path.open("ab") as file:
            file.write(b'{"role": "user", "cont')
        again = make_chat()
        assert describe_load(again, path).endswith("1 turn; left out what is damaged: line 4")
        say(again, "two")
        read = read_chat(path)
        assert read.damaged == (4,)
        assert [m.content for m in read.messages] == ["one", "the end", "two", "the end"]

    def test_a_question_without_an_answer_is_given_back(self, tmp_path: Path) -> None:
        path = tmp_path / "chat.jsonl"
        path.write_text('{"role": "user", "content": "hi"}\n', encoding="utf-8")
        chat = make_chat()
        assert describe_load(chat, path) == "chat: 0 turns; its last message has no answer yet"
        assert chat.unsent == "hi"
        assert chat.conversation.messages == ()

    @pytest.mark.parametrize(
        "content",
        [b"GGUF\x00\xff", b"hello", b"[1]\n", b'{"role": "tool", "content": "x"}', b'{"a": 1}'],
        ids=["binary", "text", "list", "role", "object"],
    )
    def test_a_file_that_is_no_chat_is_refused(self, tmp_path: Path, content: bytes) -> None:
        path = tmp_path / "other.jsonl"
        path.write_bytes(content)
        chat = make_chat()
        say(chat, "one")
        with pytest.raises(UsageError, match="is not a chat"):
            chat.load(path)
        say(chat, "two")
        assert chat.transcript
        assert len(read_chat(chat.transcript.path).messages) == 4

    def test_a_later_format_is_refused(self, tmp_path: Path) -> None:
        path = tmp_path / "new.jsonl"
        path.write_text('{"qdraft_chat": 2}\n', encoding="utf-8")
        with pytest.raises(UsageError, match="a later version"):
            read_chat(path)

    def test_two_programs_do_not_write_to_one_chat(self) -> None:
        chat = make_chat()
        say(chat, "one")
        with pytest.raises(UsageError, match="is open in another qdraft"):
            make_chat().load(find_chat())
        chat.close()
        make_chat().load(find_chat())

    def test_a_chat_that_cannot_be_saved_goes_on(
        self, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full(*_args: object) -> int:
            raise OSError(28, "No space left on device")

        chat = make_chat()
        real = os.fsync
        monkeypatch.setattr(os, "fsync", full)
        logging.getLogger("qdraft").propagate = True
        say(chat, "one")
        assert caplog.messages == ["the chat is not saved: No space left on device"]
        monkeypatch.setattr(os, "fsync", real)
        say(chat, "two")
        assert chat.transcript
        assert read_chat(chat.transcript.path).messages == chat.conversation.messages

    def test_names_and_the_list_of_chats(self) -> None:
        assert list_chats() == []
        with pytest.raises(UsageError, match="there is no chat to resume"):
            find_chat()
        for name in ("old", "new"):
            transcript = Transcript(new_path(name))
            transcript.record((Message(USER, f"in {name}"),))
            transcript.close()
        os.utime(find_chat("old"), (1, 1))
        assert [(each.name, each.n_turns, each.first) for each in list_chats()] == [
            ("new", 1, "in new"),
            ("old", 1, "in old"),
        ]
        assert find_chat() == find_chat("new")
        with pytest.raises(UsageError, match="there is a chat old already"):
            new_path("old")
        with pytest.raises(UsageError, match="there is no chat other") as error:
            find_chat("other")
        assert error.value.hint == "the last ones are new, old"
        with pytest.raises(UsageError, match="a chat cannot be called"):
            new_path("\x1b[2J")


class TestCommands:
    @pytest.mark.parametrize(
        ("line", "parsed"),
        [
            ("/help", ("help", "")),
            ("/?", ("?", "")),
            ("/SET temp 0.5 ", ("set", "temp 0.5")),
            ("/edit one\ntwo", ("edit", "one\ntwo")),
            ("hello", None),
            ("/etc/hosts is what?", None),
            ("//help", None),
            (" /help", None),
            ("a /help", None),
        ],
    )
    def test_what_is_a_command(self, line: str, parsed: tuple[str, str] | None) -> None:
        assert parse(line) == parsed

    def test_an_unknown_command_names_the_nearest(self) -> None:
        with pytest.raises(UsageError, match="there is no command /udno") as error:
            command(make_chat(), "/udno")
        assert "did you mean /undo?" in str(error.value.hint)

    def test_a_command_without_an_argument_takes_none(self) -> None:
        with pytest.raises(UsageError, match="/undo takes no argument"):
            command(make_chat(), "/undo 2")

    def test_views_and_leaving(self) -> None:
        chat = make_chat()
        views = {name: command(chat, f"/{name}").show for name in ("help", "stats", "pair", "set")}
        assert views == {"help": "help", "stats": "stats", "pair": "pair", "set": "settings"}
        assert command(chat, "/load").show == "chats"
        assert all(command(chat, f"/{name}").leave for name in ("bye", "exit", "quit"))

    def test_undo_retry_and_edit(self) -> None:
        chat = make_chat("first", "second")
        say(chat, "a")
        say(chat, "b")
        with pytest.raises(UsageError, match="at temperature 0"):
            command(chat, "/retry")
        command(chat, "/set temp 0.5")
        chat.pair.answers = ("first", "third")  # type: ignore[attr-defined]
        assert finish(command(chat, "/retry")) == "third"
        assert texts(chat) == [
            (USER, "a"),
            (ASSISTANT, "first"),
            (USER, "b"),
            (ASSISTANT, "third"),
        ]
        assert chat.last
        # All but the last token of the prompt, which gives the first row.
        assert chat.last.figures.n_read == 1
        assert command(chat, "/edit").edit == "b"
        assert finish(command(chat, "/edit c\nd")) == "third"
        assert texts(chat)[2:] == [(USER, "c\nd"), (ASSISTANT, "third")]
        assert command(chat, "/undo").say == "taken back; the chat has 1 turn"
        assert texts(chat) == [(USER, "a"), (ASSISTANT, "first")]
        assert chat.transcript
        assert read_chat(chat.transcript.path).messages == chat.conversation.messages

    def test_a_retry_that_is_stopped_at_once_keeps_the_old_answer(self) -> None:
        chat = make_chat()
        say(chat, "a")
        chat.retry().end()
        assert texts(chat) == [(USER, "a"), (ASSISTANT, "the end")]

    def test_the_system_message(self) -> None:
        chat = make_chat()
        assert command(chat, "/system").say == "there is no system message"
        command(chat, "/system be brief")
        say(chat, "a")
        assert chat.last
        assert chat.last.generation.prompt[:9] == tuple(VOCAB.tokenize("<system>be brief"))
        assert command(chat, "/system").say == "be brief"
        command(chat, "/system off")
        assert chat.conversation.system is None
        assert len(chat.conversation.turns) == 1

    def test_settings(self) -> None:
        chat = make_chat()
        for line in ("/set temp 0.5", "/set top-k=7", "/set seed 3", "/set color = draft"):
            command(chat, line)
        settings = chat.settings
        assert (settings.sampling.temperature, settings.sampling.top_k) == (0.5, 7)
        assert (settings.decode.seed, settings.colour) == (3, "draft")
        for line, problem in {
            "/set nothing 1": "there is no setting nothing",
            "/set top_k x": "top_k is x but must be a whole number",
            "/set top_p 2": "top_p is 2.0 but must be above 0",
            "/set colour red": "colour is red but must be one of off, draft",
            "/set temp": "/set is temp but must be a setting and its value",
        }.items():
            with pytest.raises(UsageError, match=problem):
                command(chat, line)
        assert settings.sampling.top_p == 0.95

    def test_draft(self) -> None:
        chat = make_chat()
        assert command(chat, "/draft off").say == "the target runs alone"
        say(chat, "a")
        assert chat.last
        assert chat.last.figures.summary.n_drafted == 0
        assert command(chat, "/draft 2").say == "drafts have up to 2 tokens"
        say(chat, "b")
        assert max(r.n_draft for r in chat.last.generation.rounds) == 2
        assert command(chat, "/draft on").say == "drafts have up to 4 tokens"
        with pytest.raises(UsageError, match="/draft is many but must be"):
            command(chat, "/draft many")
        with pytest.raises(UsageError, match="n_draft is 99 but must be 0 to 63"):
            command(chat, "/draft 99")
        chat.pair.draft = None  # type: ignore[misc]
        with pytest.raises(UsageError, match="there is no draft to use"):
            command(chat, "/draft 3")

    def test_think(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(ChatVocab, "can_think", True)
        chat = make_chat("<think>why</think>because", "so")
        assert command(chat, "/think").say.endswith("its reasoning is shown")
        with pytest.raises(UsageError, match="think is maybe but must be one of"):
            command(chat, "/think maybe")
        assert command(chat, "/think hide").say.endswith("its reasoning is not shown")
        assert say(chat, "a") == "because"
        assert chat.conversation.messages[-1] == Message(ASSISTANT, "because", "why")
        assert chat.transcript
        assert read_chat(chat.transcript.path).messages == chat.conversation.messages
        command(chat, "/think off")
        say(chat, "b")
        assert chat.last
        assert chat.last.generation.prompt[-4:] == tuple(b"(no)")
        # The template leaves old reasoning out, so the first answer is read again.
        assert chat.last.figures.n_reused == 4
        command(chat, "/think on")
        assert chat.encode(chat.conversation.messages)[-1] == ASSISTANT_MARK

    def test_a_template_without_a_switch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        chat = make_chat()
        command(chat, "/think off")  # the model never reasons
        command(chat, "/think on")
        monkeypatch.setattr(ChatVocab, "chat_template", "<think>")
        with pytest.raises(UsageError, match="cannot switch reasoning off"):
            command(chat, "/think off")
        assert chat.settings.think == "on"

    def test_save_and_load(self) -> None:
        chat = make_chat()
        with pytest.raises(UsageError, match="there is nothing to save yet"):
            command(chat, "/save plans")
        say(chat, "a")
        assert chat.transcript
        old = chat.transcript.path
        assert command(chat, "/save").say == f"this chat is saved as {old.stem}"
        command(chat, "/save plans")
        say(chat, "b")
        assert len(read_chat(old).messages) == 2
        assert len(read_chat(find_chat("plans")).messages) == 4
        with pytest.raises(UsageError, match="is the chat that you are in"):
            command(chat, "/load plans")
        assert command(chat, f"/load {old.stem}").say == f"{old.stem}: 1 turn"
        say(chat, "c")
        assert len(read_chat(old).messages) == 4

    def test_a_chat_that_is_not_saved_can_be(self) -> None:
        chat = make_chat(save=False)
        say(chat, "a")
        assert list_chats() == []
        command(chat, "/save kept")
        say(chat, "b")
        assert [each.n_turns for each in list_chats()] == [2]

    def test_clear_and_drop(self) -> None:
        chat = make_chat()
        chat.set_system("s")
        for text in "abc":
            say(chat, text)
        assert command(chat, "/drop 2").say == "1 turn left; /undo brings the others back"
        assert texts(chat) == [(SYSTEM, "s"), (USER, "c"), (ASSISTANT, "the end")]
        for line in ("/drop 2", "/drop 0"):
            with pytest.raises(UsageError, match="but must be from 1 to 1"):
                command(chat, line)
        with pytest.raises(UsageError, match="/drop needs the number"):
            command(chat, "/drop x")
        command(chat, "/clear")
        assert texts(chat) == [(SYSTEM, "s")]
        with pytest.raises(UsageError, match="there is no turn to drop"):
            command(chat, "/drop 1")
        command(chat, "/undo")
        command(chat, "/undo")
        assert len(chat.conversation.turns) == 3

    def test_compact(self) -> None:
        chat = make_chat("one", "two", "in short")
        chat.set_system("s")
        with pytest.raises(UsageError, match="nothing to sum up"):
            command(chat, "/compact")
        say(chat, "a")
        say(chat, "b")
        assert finish(command(chat, "/compact")) == "in short"
        assert texts(chat) == [(SYSTEM, "s"), (USER, INSTRUCTION), (ASSISTANT, "in short")]
        assert chat.last
        assert chat.last.figures.n_reused == 18  # the turns that it sums up were in the caches
        command(chat, "/undo")
        assert len(chat.conversation.turns) == 2

    def test_compact_keeps_the_turns_that_the_context_has_no_room_to_sum_up(self) -> None:
        chat = make_chat("x" * 60, "y" * 60, "in short", n_ctx=360)
        say(chat, "a")
        say(chat, "b")
        chat.pair.answers = ("x" * 60, "in short")  # type: ignore[attr-defined]
        assert finish(command(chat, "/compact")) == "in short"
        assert texts(chat)[:2] == [(USER, INSTRUCTION), (ASSISTANT, "in short")]
        assert texts(chat)[2:] == [(USER, "b"), (ASSISTANT, "y" * 60)]

    def test_compact_needs_room(self) -> None:
        chat = make_chat("x" * 150, n_ctx=300)
        say(chat, "a")
        with pytest.raises(ContextError, match="the first turn has"):
            command(chat, "/compact")

    def test_a_summary_that_is_stopped_at_once_changes_nothing(self) -> None:
        chat = make_chat()
        say(chat, "a")
        chat.compact().end()
        assert texts(chat) == [(USER, "a"), (ASSISTANT, "the end")]

    def test_copy(self) -> None:
        chat = make_chat()
        with pytest.raises(UsageError, match="no answer to copy yet"):
            command(chat, "/copy")
        say(chat, "a")
        assert command(chat, "/copy").copy == "the end"

    def test_read(self, tmp_path: Path) -> None:
        chat = make_chat(n_ctx=300)
        path = tmp_path / "my notes.txt"
        path.write_text("buy an\nox\n", encoding="utf-8")
        assert command(chat, f"/read '{path}'").say == (
            "my notes.txt, 8 tokens, goes before your next message"
        )
        say(chat, "what?")
        say(chat, "and now?")
        finish(command(chat, f'/read "{path}" once more'))
        asked = [content for role, content in texts(chat) if role == USER]
        assert asked == [
            "my notes.txt:\n\nbuy an\nox\n\nwhat?",
            "and now?",
            "my notes.txt:\n\nbuy an\nox\n\nonce more",
        ]
        command(chat, f"/read '{path}'")
        chat.ask("never read").end()
        assert chat.attached
        assert command(chat, "/undo").say == "the file is left out"
        assert len(chat.conversation.turns) == 3
        for name, content, problem in (
            ("long.txt", b"x" * 300, "has 300 tokens, but the context holds 300"),
            ("binary", b"\xff\xfe\x00", "is not UTF-16 text"),
        ):
            (tmp_path / name).write_bytes(content)
            with pytest.raises(QDraftError, match=problem):
                command(chat, f"/read {tmp_path / name}")
        with pytest.raises(UsageError, match="cannot be read: No such file"):
            command(chat, "/read nothing.txt")
        with pytest.raises(UsageError, match="/read needs a file"):
            command(chat, "/read")
        assert not chat.attached

    def test_every_command_says_what_it_does(self) -> None:
        assert all(each.help.endswith(".") for each in COMMANDS.values())
        assert PIECES[END] == b"<end>"
