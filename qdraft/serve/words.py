"""Tokens, texts and templates of a pair, without generating: llama-server's small endpoints."""

from __future__ import annotations

from typing import Any

from qdraft.errors import UsageError
from qdraft.serve.errors import invalid
from qdraft.serve.fields import Fields
from qdraft.serve.jobs import template_for
from qdraft.serve.models import Loaded
from qdraft.serve.requests import CHAT, TextRequest, read_chat
from qdraft.session.prompt import render_messages
from qdraft.session.text import TextVocab


def tokenize(loaded: Loaded, fields: Fields) -> dict[str, Any]:
    """Return the tokens of ``content``; with their texts if ``with_pieces``.

    A piece that is not UTF-8 by itself is a list of bytes.
    """
    vocab = loaded.pair.vocab
    content = fields.text("content")
    if content is None:
        raise invalid("content is missing", "content")
    parse_special = fields.flag("parse_special")
    tokens = vocab.tokenize(
        content,
        parse_special=parse_special is not False,
        add_bos=fields.flag("add_special") or False,
    )
    if not fields.flag("with_pieces"):
        return {"tokens": tokens}
    return {"tokens": [{"id": token, "piece": _piece(vocab, token)} for token in tokens]}


def _piece(vocab: TextVocab, token: int) -> str | list[int]:
    data = vocab.piece(token, special=True)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return list(data)


def detokenize(loaded: Loaded, fields: Fields) -> dict[str, Any]:
    """Return the text of ``tokens``, with the names of control tokens."""
    vocab = loaded.pair.vocab
    tokens = fields.items("tokens")
    if tokens is None:
        raise invalid("tokens is missing", "tokens")
    if not all(type(token) is int and 0 <= token < vocab.n_tokens for token in tokens):
        raise fields.wrong("tokens", f"token ids below {vocab.n_tokens}")
    data = b"".join(vocab.piece(token, special=True) for token in tokens)
    return {"content": data.decode("utf-8", "replace")}


def apply_template(loaded: Loaded, fields: Fields) -> dict[str, Any]:
    """Return the text that ``messages`` become in the chat template."""
    if not loaded.pair.vocab.has_chat_template:
        raise UsageError(f"{loaded.name} has no chat template")
    request = TextRequest(CHAT, **read_chat(fields))
    template = template_for(request, loaded)
    return {"prompt": render_messages(loaded.pair.vocab, request.messages, template)}
