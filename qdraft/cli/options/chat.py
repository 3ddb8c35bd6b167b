"""Which chat to go on with, and whether to save it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from qdraft.cli.options.group import Group, option
from qdraft.errors import UsageError

_PANEL = "Chat"


@dataclass(frozen=True, kw_only=True)
class ChatOptions(Group):
    """Which chat to go on with, and whether to save it."""

    resume: Annotated[
        str | None,
        option(
            _PANEL,
            "--resume",
            metavar="[NAME]",
            help="Go on with this saved chat, by its name or file; without a name, with the last "
            "one.",
            default="a new chat",
        ),
    ] = None
    no_save: Annotated[
        bool, option(_PANEL, "--no-save", help="Save neither the chat nor what you type.")
    ] = False

    def __post_init__(self) -> None:
        if self.resume == "-":
            raise UsageError("--resume is - but must be the name of a chat")
