"""The file of a chat: one JSON object a line, appended as the chat goes on.

A line with ``role`` is the next message. A line with ``messages`` replaces all messages before it,
for example after an undo.
"""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from qdraft.chat.conversation import ROLES, USER, Message, Messages
from qdraft.errors import UsageError
from qdraft.paths import data_dir
from qdraft.text_file import read_bytes

try:
    from fcntl import LOCK_EX, LOCK_NB, flock
except ImportError:  # Windows: nothing keeps two programs from writing to one chat
    flock = None  # type: ignore[assignment]

_FORMAT = 1
_ENDING = ".jsonl"
_NAME = re.compile(r"[\w][\w .+-]*")


@dataclass(frozen=True, slots=True)
class Read:
    """What a file of a chat holds; ``damaged`` are the numbers of the lines that are no JSON."""

    messages: Messages
    damaged: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Saved:
    """A chat in the folder of chats."""

    name: str
    changed: datetime
    n_turns: int
    first: str  # question


@dataclass(eq=False)
class Transcript:
    """The file that a chat is saved to; it appears with the first message.

    ``about`` goes into its first line. Use ``record`` after each change, and ``close`` at the end.
    """

    path: Path
    about: dict[str, Any] = field(default_factory=dict)
    _written: Messages = ()
    _handle: int | None = None

    @property
    def name(self) -> str:
        """The name that ``find_chat`` finds the file by: that of a chat, or a path."""
        is_own = self.path.parent == chats_dir() and self.path.suffix == _ENDING
        return self.path.stem if is_own else str(self.path)

    @property
    def is_begun(self) -> bool:
        """Tell whether there is a file yet."""
        return self._handle is not None

    def resume(self) -> Read:
        """Return what the file holds, and go on at its end.

        Raises UsageError if another program writes to it, or if it is no chat.
        """
        self._open(is_new=False)
        try:
            read = read_chat(self.path)
        except BaseException:
            self.close()
            raise
        self._written = read.messages
        return read

    def record(self, messages: Messages, change: str = "", **figures: Any) -> None:
        """Write what is new in ``messages``, and bring it to disk.

        ``figures`` are of the last message, ``change`` names what made messages go. Raises OSError
        if the file cannot be written; what is missing is written the next time.
        """
        if messages == self._written:
            return
        n = len(self._written)
        if messages[:n] == self._written:
            lines = [_as_line(message) for message in messages[n:]]
            lines[-1] |= figures
        else:
            whole = [_as_line(message) for message in messages]
            lines = [{"change": change or "edit", "messages": whole}]
        now = datetime.now().astimezone().isoformat(timespec="seconds")
        self._append([{"time": now, **line} for line in lines])
        self._written = messages

    def close(self) -> None:
        """Let others write to the file; harmless when repeated."""
        handle, self._handle = self._handle, None
        if handle is not None:
            os.close(handle)

    def _append(self, lines: list[dict[str, Any]]) -> None:
        """Append lines as a whole, or nothing if the disk takes only a part. Raises OSError."""
        if self._handle is None:
            self._open(is_new=True)
        assert self._handle is not None
        size = os.fstat(self._handle).st_size
        if not size:
            now = datetime.now().astimezone().isoformat(timespec="seconds")
            lines = [{"qdraft_chat": _FORMAT, "created": now, **self.about}, *lines]
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        data = _without_halves(text)
        if self._ends_inside_a_line():
            data = b"\n" + data
        try:
            while data:
                data = data[os.write(self._handle, data) :]
            os.fsync(self._handle)
        except OSError:
            with suppress(OSError):
                os.ftruncate(self._handle, size)
            raise

    def _ends_inside_a_line(self) -> bool:
        """Tell whether the last line was cut, as by a program that was killed."""
        with self.path.open("rb") as file:
            if not file.seek(0, os.SEEK_END):
                return False
            file.seek(-1, os.SEEK_END)
            return file.read() != b"\n"

    def _open(self, *, is_new: bool) -> None:
        """Open the file for appending, and lock it. Raises UsageError, or OSError."""
        flags = os.O_RDWR | os.O_APPEND
        if is_new:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            flags |= os.O_CREAT | os.O_EXCL
        # Nobody else may read what a user tells a model, unless the user lets them.
        handle = os.open(self.path, flags, 0o600)
        try:
            if flock is not None:
                flock(handle, LOCK_EX | LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                os.close(handle)
                raise UsageError(f"the chat {self.name} is open in another qdraft") from error
        self._handle = handle


def chats_dir() -> Path:
    """Return the folder of the chats. Raises OSError if the user has no home."""
    return data_dir() / "chats"


def new_path(name: str = "") -> Path:
    """Return the path of a new chat: in the folder of chats, or where a path as name leads.

    Without a name it is called by the time. Raises UsageError if it is there already.
    """
    if not name:
        stem = datetime.now().strftime("%Y-%m-%d-%H%M%S")
        names = (stem if i == 1 else f"{stem}-{i}" for i in range(1, 1000))
        return next(path for each in names if not (path := _path_of(each)).exists())
    path = _path_of(name)
    if path.exists():
        raise UsageError(f"there is a chat {name} already", hint="give another name")
    return path


def find_chat(name: str = "") -> Path:
    """Return the path of a chat by its name or path; the last one without a name.

    Raises UsageError if there is none.
    """
    if name:
        path = _path_of(name)
        if not path.is_file():
            known = ", ".join(path.stem for path in _by_age()[:5])
            hint = f"the last ones are {known}" if known else "no chat is saved yet"
            raise UsageError(f"there is no chat {name}", hint=hint)
        return path
    if not (paths := _by_age()):
        raise UsageError("there is no chat to resume")
    return paths[0]


def list_chats() -> list[Saved]:
    """Return the chats that are saved, the last one first; files that are none are left out."""
    return list(_saved(_by_age()))


def read_chat(path: Path) -> Read:
    """Read the file of a chat.

    A line that is damaged is left out: a program that was killed may have cut the last one. Raises
    UsageError if the file is no chat, or if a later version of qdraft wrote it.
    """
    messages: list[Message] = []
    damaged: list[int] = []
    lines = read_bytes(path).split(b"\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            messages = _apply(json.loads(line), messages)
        except (ValueError, RecursionError):
            damaged.append(number)
    if damaged and not messages:
        raise UsageError(f"{path} is not a chat", hint="each line must be a JSON object")
    return Read(tuple(messages), tuple(damaged))


def _apply(line: Any, messages: list[Message]) -> list[Message]:
    """Return the messages after a line. Raises ValueError if the line is none of a chat."""
    if not isinstance(line, dict):
        raise ValueError("not an object")
    if line.get("qdraft_chat", _FORMAT) != _FORMAT:
        raise UsageError("a later version of qdraft wrote this chat")
    if "role" in line:
        return [*messages, _as_message(line)]
    if isinstance(whole := line.get("messages"), list):
        return [_as_message(each) for each in whole]
    if "qdraft_chat" not in line:
        raise ValueError("neither a message nor messages")
    return messages


def _as_message(line: Any) -> Message:
    role, content = line.get("role"), line.get("content")
    reasoning, cut = line.get("reasoning_content") or "", line.get("cut") or ""
    texts = (content, reasoning, cut)
    if role not in ROLES or not all(isinstance(text, str) for text in texts):
        raise ValueError("not a message")
    return Message(role, content, reasoning, cut)


def _as_line(message: Message) -> dict[str, Any]:
    return message.as_dict() | ({"cut": message.cut} if message.cut else {})


def _without_halves(text: str) -> bytes:
    """Return the text in UTF-8; halves of surrogate pairs, which are no text, as JSON has them."""
    return re.sub("[\ud800-\udfff]", lambda half: f"\\u{ord(half[0]):04x}", text).encode()


def _path_of(name: str) -> Path:
    if os.sep in name or "/" in name or name.endswith(_ENDING):
        return Path(name).expanduser()
    if not _NAME.fullmatch(name):
        raise UsageError(f"a chat cannot be called {name!r}", hint="give letters, digits or a path")
    return chats_dir() / (name + _ENDING)


def _by_age() -> list[Path]:
    folder = chats_dir()
    paths = [path for path in folder.glob(f"*{_ENDING}") if path.is_file()]
    return sorted(paths, key=lambda path: (path.stat().st_mtime_ns, path.name), reverse=True)


def _saved(paths: list[Path]) -> Iterator[Saved]:
    for path in paths:
        try:
            messages = read_chat(path).messages
        except UsageError:
            continue
        asked = [message.content for message in messages if message.role == USER]
        changed = datetime.fromtimestamp(path.stat().st_mtime).astimezone()
        yield Saved(path.stem, changed, len(asked), asked[0] if asked else "")
