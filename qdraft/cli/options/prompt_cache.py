"""The file that keeps what the target has read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from qdraft.cli.options.group import Group, option
from qdraft.errors import UsageError
from qdraft.session.pair import Pair
from qdraft.session.prompt_cache import PromptCache, require_readable

_PANEL = "Prompt cache"


@dataclass(frozen=True, kw_only=True)
class PromptCacheOptions(Group):
    """The file that keeps what the target has read."""

    prompt_cache: Annotated[
        Path | None,
        option(
            _PANEL,
            "--prompt-cache",
            help="Keep what the target has read of the prompt in this file, and start from what is "
            "in it.",
        ),
    ] = None
    prompt_cache_all: Annotated[
        bool, option(_PANEL, "--prompt-cache-all", help="Keep the generated text in it too.")
    ] = False
    prompt_cache_ro: Annotated[
        bool,
        option(_PANEL, "--prompt-cache-ro", help="Start from --prompt-cache, but do not write it."),
    ] = False

    def __post_init__(self) -> None:
        if self.prompt_cache_all and self.prompt_cache_ro:
            raise UsageError("--prompt-cache-all cannot be combined with --prompt-cache-ro")
        if self.prompt_cache is None and (self.prompt_cache_all or self.prompt_cache_ro):
            name = "--prompt-cache-all" if self.prompt_cache_all else "--prompt-cache-ro"
            raise UsageError(f"{name} needs a file", hint="name it with --prompt-cache FILE")

    def require_readable(self) -> None:
        """Raise UsageError if the file cannot be a prompt cache, before a model is loaded."""
        if self.prompt_cache:
            require_readable(self.prompt_cache, must_exist=self.prompt_cache_ro)

    def of_pair(self, pair: Pair) -> PromptCache | None:
        """Return the prompt cache of a pair; None without the option. Raises UsageError."""
        if self.prompt_cache is None:
            return None
        return PromptCache(
            pair,
            self.prompt_cache,
            read_only=self.prompt_cache_ro,
            with_text=self.prompt_cache_all,
        )
