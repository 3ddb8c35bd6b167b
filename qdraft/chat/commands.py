"""The commands of a chat: what a line that begins with a slash asks for, and what it does."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path

from qdraft.chat.answer import Answer
from qdraft.chat.chat import Chat
from qdraft.chat.transcript import find_chat, new_path
from qdraft.decoding.drafters.kinds import KINDS
from qdraft.errors import ContextError, UsageError
from qdraft.text_file import read_text

# A path such as /etc/hosts at the start of a message is none.
_COMMAND = re.compile(r"/([A-Za-z]+|\?)(?:\s+(.*))?", re.DOTALL)

_PATH = re.compile(r"""(?:(["'])(.+?)\1|(\S+))\s*(.*)""", re.DOTALL)


@dataclass(frozen=True)
class Effect:
    """What the terminal has to do after a command.

    ``say`` is a line to show, ``show`` the name of a view (help, settings, stats, pair, chats),
    ``answer`` an answer to stream, ``edit`` a text to edit and answer anew, ``copy`` a text for the
    clipboard. ``leave`` ends the chat.
    """

    say: str = ""
    show: str = ""
    answer: Answer | None = None
    edit: str | None = None
    copy: str | None = None
    leave: bool = False


@dataclass(frozen=True)
class Command:
    """A command; ``values`` are words that its argument may be, ``run`` takes the argument."""

    name: str
    argument: str
    help: str
    run: Callable[[Chat, str], Effect]
    values: tuple[str, ...] = ()


def parse(line: str) -> tuple[str, str] | None:
    """Return the name of a command and its argument; None if the line is a message.

    A line that begins with a space, or whose first word is a path, is a message.
    """
    match = _COMMAND.fullmatch(line.rstrip())
    return (match[1].casefold(), (match[2] or "").strip()) if match else None


def run(chat: Chat, name: str, argument: str) -> Effect:
    """Run a command. Raises UsageError if there is none of this name, or what it raises."""
    command = COMMANDS.get(_ALIASES.get(name, name))
    if command is None:
        near = get_close_matches(name, COMMANDS, 1)
        hint = f"did you mean /{near[0]}? " if near else "/help lists the commands; "
        raise UsageError(
            f"there is no command /{name}", hint=f"{hint}a space before it makes it a message"
        )
    if argument and not command.argument:
        raise UsageError(f"/{command.name} takes no argument")
    return command.run(chat, argument)


def _help(_chat: Chat, _argument: str) -> Effect:
    return Effect(show="help")


def _undo(chat: Chat, _argument: str) -> Effect:
    if chat.attached:
        chat.attached.pop()
        return Effect(say="the file is left out")
    chat.undo()
    n = len(chat.conversation.turns)
    return Effect(say=f"taken back; the chat has {_count(n, 'turn')}")


def _retry(chat: Chat, _argument: str) -> Effect:
    if chat.settings.sampling.temperature == 0:
        raise UsageError(
            "at temperature 0 the answer would be the same",
            hint="/set temperature 0.8 lets it vary, /edit changes the question",
        )
    return Effect(answer=chat.retry())


def _edit(chat: Chat, argument: str) -> Effect:
    if argument:
        return Effect(answer=chat.retry(argument))
    return Effect(edit=chat.conversation.question_again()[-1].content)


def _system(chat: Chat, argument: str) -> Effect:
    if not argument:
        system = chat.conversation.system
        return Effect(say="there is no system message" if system is None else system)
    chat.set_system(None if argument == "off" else argument)
    return Effect(say="the system message is " + ("gone" if argument == "off" else "set"))


def _set(chat: Chat, argument: str) -> Effect:
    if not argument:
        return Effect(show="settings")
    match = re.fullmatch(r"([\w-]+)(?:\s*=\s*|\s+)(\S.*)", argument)
    if not match:
        raise UsageError(f"/set is {argument} but must be a setting and its value")
    chat.settings.set(match[1], match[2])
    return Effect(say=f"{match[1]} is {match[2]} from the next answer on")


def _draft(chat: Chat, argument: str) -> Effect:
    decode = chat.settings.decode
    if argument:
        sizes = {"on": None, "off": 0}
        if argument not in sizes and not argument.isdecimal():
            raise UsageError(f"/draft is {argument} but must be on, off or a number of tokens")
        n_draft = sizes[argument] if argument in sizes else int(argument)
        if n_draft != 0 and chat.pair.draft is None and KINDS[decode.drafter].needs_draft:
            raise UsageError("there is no draft to use in this chat")
        decode = chat.settings.decode = replace(decode, n_draft=n_draft)
    if not decode.most_drafted:
        return Effect(say="the target runs alone")
    return Effect(say=f"drafts have up to {_count(decode.most_drafted, 'token')}")


def _think(chat: Chat, argument: str) -> Effect:
    if argument:
        chat.set_think(argument)
    meaning = {
        "on": "the model reasons if it can, and its reasoning is shown",
        "hide": "the model reasons if it can, and its reasoning is not shown",
        "off": "the template asks the model not to reason",
    }
    return Effect(say=meaning[chat.settings.think])


def _stats(_chat: Chat, _argument: str) -> Effect:
    return Effect(show="stats")


def _pair(_chat: Chat, _argument: str) -> Effect:
    return Effect(show="pair")


def _save(chat: Chat, argument: str) -> Effect:
    if not argument and chat.transcript and chat.transcript.is_begun:
        return Effect(say=f"this chat is saved as {chat.transcript.name}")
    if not chat.conversation.messages:
        raise UsageError("there is nothing to save yet")
    chat.save_as(new_path(argument))
    assert chat.transcript
    return Effect(say=f"saved as {chat.transcript.name}, where the chat goes on")


def _load(chat: Chat, argument: str) -> Effect:
    if not argument:
        return Effect(show="chats")
    path = find_chat(argument)
    if chat.transcript and chat.transcript.is_begun and path.samefile(chat.transcript.path):
        raise UsageError(f"{argument} is the chat that you are in")
    return Effect(say=describe_load(chat, path))


def describe_load(chat: Chat, path: Path, *, keep: bool = True) -> str:
    """Load a chat, and return a line about it. Raises UsageError."""
    read = chat.load(path, keep=keep)
    n = len(chat.conversation.turns)
    line = f"{path.stem}: {_count(n, 'turn')}"
    if read.damaged:
        lines = ", ".join(map(str, read.damaged))
        line += f"; left out what is damaged: line {lines}"
    if chat.unsent:
        line += "; its last message has no answer yet"
    return line


def _clear(chat: Chat, _argument: str) -> Effect:
    chat.clear()
    return Effect(say="the chat is empty; /undo brings it back")


def _compact(chat: Chat, _argument: str) -> Effect:
    return Effect(answer=chat.compact())


def _drop(chat: Chat, argument: str) -> Effect:
    if not argument.isdecimal():
        raise UsageError("/drop needs the number of oldest turns to leave out")
    n_left = chat.drop(int(argument))
    return Effect(say=f"{_count(n_left, 'turn')} left; /undo brings the others back")


def _copy(chat: Chat, _argument: str) -> Effect:
    answer = chat.conversation.last_answer
    if answer is None:
        raise UsageError("there is no answer to copy yet")
    return Effect(copy=answer)


def _read(chat: Chat, argument: str) -> Effect:
    name, text = _split_path(argument)
    path = Path(name).expanduser()
    content = read_text(path).replace("\r\n", "\n").rstrip("\n")
    n = len(chat.pair.vocab.tokenize(content, parse_special=False, add_bos=False))
    if n >= chat.n_ctx:
        raise ContextError(f"{name} has {n} tokens, but the context holds {chat.n_ctx}")
    attached = f"{path.name}:\n\n{content}"
    if text:
        return Effect(answer=chat.ask(f"{attached}\n\n{text}"))
    chat.attached.append(attached)
    return Effect(say=f"{path.name}, {_count(n, 'token')}, goes before your next message")


def _bye(_chat: Chat, _argument: str) -> Effect:
    return Effect(leave=True)


def _split_path(argument: str) -> tuple[str, str]:
    """Return the path at the start of an argument, which may be in quotes, and what follows."""
    match = _PATH.fullmatch(argument)
    if not match:
        raise UsageError("/read needs a file")
    return match[2] or match[3], match[4]


def _count(n: int, what: str) -> str:
    return f"{n} {what}" if n == 1 else f"{n} {what}s"


COMMANDS = {
    command.name: command
    for command in (
        Command("help", "", "List the commands.", _help),
        Command("undo", "", "Take back the last turn, or the last change of the chat.", _undo),
        Command("retry", "", "Answer your last message again.", _retry),
        Command("edit", "[TEXT]", "Change your last message, and answer it again.", _edit),
        Command("system", "[TEXT|off]", "Show or set the system message.", _system, ("off",)),
        Command("set", "[KEY VALUE]", "Show or set how answers are made and coloured.", _set),
        Command(
            "draft", "[on|off|N]", "Draft, or not, or N tokens at most.", _draft, ("on", "off")
        ),
        Command("stats", "", "Show the figures of the last answer and of the chat.", _stats),
        Command(
            "think",
            "[on|off|hide]",
            "Let the model reason or not, or hide its reasoning.",
            _think,
            ("on", "off", "hide"),
        ),
        Command("save", "[NAME]", "Save the chat under a name, and go on there.", _save),
        Command("load", "[NAME]", "Go on with a saved chat, or list the saved chats.", _load),
        Command("clear", "", "Forget all turns.", _clear),
        Command("compact", "", "Let the model sum the chat up, and go on from that.", _compact),
        Command("drop", "N", "Forget the oldest N turns.", _drop),
        Command("copy", "", "Copy the last answer.", _copy),
        Command("read", "FILE [TEXT]", "Put a file before your next message.", _read),
        Command("pair", "", "Show the loaded files and where they are.", _pair),
        Command("bye", "", "Leave; so does Ctrl-D.", _bye),
    )
}
_ALIASES = {"?": "help", "exit": "bye", "quit": "bye", "regen": "retry"}
