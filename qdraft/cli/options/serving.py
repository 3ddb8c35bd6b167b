"""Where a server listens, and who may use it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from qdraft.cli.options.group import Group, option
from qdraft.errors import UsageError
from qdraft.text_file import read_text

_PANEL = "Server"
API_KEY = "QDRAFT_API_KEY"


@dataclass(frozen=True, kw_only=True)
class ServerOptions(Group):
    """Where a server listens, what it offers, and who may use it."""

    host: Annotated[
        str,
        option(_PANEL, "--host", help="Address to listen on; 0.0.0.0 is every address."),
    ] = "127.0.0.1"
    port: Annotated[
        int,
        option(_PANEL, "--port", min=0, max=65535, help="Port to listen on; 0 takes a free one."),
    ] = 8080
    pairs: Annotated[
        str | None,
        option(
            _PANEL,
            "--pairs",
            help="Serve these pairs of models.yaml, separated by commas; all serves every pair. "
            "qdraft loads the first at once and each other at its first request.",
        ),
    ] = None
    alias: Annotated[
        str | None,
        option(
            _PANEL,
            "-a",
            "--alias",
            help="Name of the model for clients.",
            default="the pair's name, or the target's file",
        ),
    ] = None
    api_key: Annotated[
        list[str] | None,
        option(
            _PANEL,
            "--api-key",
            help="Key that requests must have (repeatable).",
            default=f"the environment's {API_KEY}",
        ),
    ] = None
    api_key_file: Annotated[
        Path | None,
        option(_PANEL, "--api-key-file", help="Read keys from this file, one on each line."),
    ] = None
    no_api_key: Annotated[
        bool,
        option(_PANEL, "--no-api-key", help="Let other machines use the server without a key."),
    ] = False
    allow_host: Annotated[
        list[str] | None,
        option(
            _PANEL,
            "--allow-host",
            help="Answer requests for this host name too, for example behind a proxy (repeatable).",
        ),
    ] = None
    cors_origins: Annotated[
        str | None,
        option(
            _PANEL,
            "--cors-origins",
            help="Let web pages of these origins use the server, separated by commas; * is any.",
            default="pages of this machine",
        ),
    ] = None
    queue: Annotated[
        int,
        option(
            _PANEL, "--queue", min=0, help="Requests that may wait; qdraft refuses further ones."
        ),
    ] = 64
    keep: Annotated[
        int,
        option(
            _PANEL,
            "--keep-sessions",
            min=1,
            max=5,
            help="Conversations to keep in the cache, whose next turns read only what is new.",
        ),
    ] = 4
    sse_ping_interval: Annotated[
        float,
        option(
            _PANEL,
            "--sse-ping-interval",
            help="Seconds after which a stream with nothing to say sends a comment; 0 sends none.",
        ),
    ] = 15.0
    no_page: Annotated[bool, option(_PANEL, "--no-page", help="Serve no web page at /.")] = False

    def __post_init__(self) -> None:
        if self.alias and self.pairs:
            raise UsageError("--alias cannot be combined with --pairs")
        if self.no_api_key and (self.api_key or self.api_key_file):
            raise UsageError("--no-api-key cannot be combined with a key")

    def read_keys(self) -> tuple[str, ...]:
        """Return the keys of the options, else that of the environment. Raises UsageError."""
        keys = [key for text in self.api_key or () for key in text.split(",")]
        if self.api_key_file:
            keys += read_text(self.api_key_file, f"--api-key-file {self.api_key_file}").splitlines()
        keys = [key.strip() for key in keys if key.strip()]
        if not keys and (self.api_key or self.api_key_file):
            raise UsageError("--api-key is empty but must be a key")
        own = os.environ.get(API_KEY, "").strip()
        if not keys and own and not self.no_api_key:
            keys = [own]
        return tuple(keys)

    def origins(self) -> tuple[str, ...]:
        """Return the origins of web pages that may use the server."""
        parts = (part.strip().rstrip("/") for part in (self.cors_origins or "").split(","))
        return tuple(filter(None, parts))
