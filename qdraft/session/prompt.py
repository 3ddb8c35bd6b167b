"""From a prompt to tokens: marks of the chat template are tokens, whatever the text holds."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from qdraft.errors import UsageError
from qdraft.llama.chat_template import NO_OPTIONS, TemplateOptions
from qdraft.session.text import TextVocab, control_names

__all__ = ["TemplateOptions", "encode_messages", "encode_prompt", "render_messages"]

log = logging.getLogger(__name__)

Message = dict[str, Any]

# No character, and in no text. It splits the names of control tokens in the user's own text, so
# that the tokenizer does not see them, and shows where the template has put them.
_MARK = "\ufdd0"
_OPEN = "\ufdd1"  # likewise; ends the message that the answer continues
_SPACE = " \t\n\v\f\r"  # as C has it


def encode_prompt(
    vocab: TextVocab,
    prompt: str,
    *,
    system: str | None = None,
    raw: bool = False,
    parse_special: bool | None = None,
    template: TemplateOptions = NO_OPTIONS,
) -> list[int]:
    """Return the token ids of a prompt, in the chat template unless there is none or ``raw``.

    ``parse_special`` says whether the names of control tokens in the user's own text are these
    tokens; None takes them as text in a chat, and as tokens otherwise. The tokens begin with one
    BOS at most. Raises UsageError for an empty prompt, or for a system text without a template.
    """
    chat = vocab.has_chat_template and not raw
    _require_unicode([prompt, system])
    if system is not None and not chat:
        why = "--raw leaves it out" if raw else "this model has none"
        raise UsageError(f"a system text needs a chat template, but {why}")
    if chat:
        messages = [] if system is None else [{"role": "system", "content": system}]
        messages.append({"role": "user", "content": prompt})
        tokens = _encode_chat(vocab, messages, template, parse_special=bool(parse_special))
    else:
        tokens = vocab.tokenize(prompt, parse_special=parse_special is not False)
    tokens = _with_one_bos(tokens, vocab.bos)
    if not tokens:
        raise UsageError("the prompt is empty", hint="give a text with -p, with -f or on stdin")
    return tokens


def encode_messages(
    vocab: TextVocab,
    messages: Sequence[Message],
    *,
    template: TemplateOptions = NO_OPTIONS,
    parse_special: bool = False,
) -> list[int]:
    """Return the token ids of a chat in the model's template.

    ``messages`` are as OpenAI's API has them: a role, a content (a text, or a list of parts that
    are text), and of an assistant also ``reasoning_content`` and ``tool_calls``. The names of
    control tokens in them are text unless ``parse_special``. The tokens begin with one BOS at most.
    Raises UsageError if the model has no template, the template fails, or a message is not valid.
    """
    if not vocab.has_chat_template:
        raise UsageError("messages need a chat template, but this model has none")
    _require_valid(messages, template)
    tokens = _with_one_bos(
        _encode_chat(vocab, messages, template, parse_special=parse_special), vocab.bos
    )
    if not tokens:
        raise UsageError("the chat template makes an empty prompt of the messages")
    return tokens


def _with_one_bos(tokens: list[int], bos: int) -> list[int]:
    """Return the tokens without the BOS that both the tokenizer and the template have put."""
    n = 0
    while tokens[n : n + 2] == [bos, bos]:
        n += 1
    return tokens[n:]


def _require_unicode(value: Any) -> None:
    if any("\ud800" <= c <= "\udfff" for text in _texts(value) for c in text):
        raise UsageError("the prompt is not valid UTF-8")


def _require_valid(messages: Sequence[Message], template: TemplateOptions) -> None:
    """Raise UsageError for the first message that no template could render."""
    if not messages:
        raise UsageError("there are no messages")
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise UsageError(f"{where} has no role")
        content = message.get("content")
        if isinstance(content, list):
            for part in content:
                _require_text(part, where)
        elif content is None:
            if not any(message.get(key) for key in ("tool_calls", "reasoning_content")):
                raise UsageError(f"{where} has no content")
        elif not isinstance(content, str):
            raise UsageError(f"the content of {where} is neither a text nor a list of parts")
    _require_unicode([list(messages), template.tools])
    if template.continue_last and messages[-1]["role"] != "assistant":
        raise UsageError(f"the last message is the {messages[-1]['role']}'s: nothing to continue")


def _require_text(part: Any, where: str) -> None:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind != "text":
        raise UsageError(f"{where} has a part of type {kind}, but qdraft reads text alone")
    if not isinstance(part.get("text"), str):
        raise UsageError(f"{where} has a part of type text without a text")


def _encode_chat(
    vocab: TextVocab, messages: Sequence[Message], template: TemplateOptions, *, parse_special: bool
) -> list[int]:
    """Return the tokens of a chat; control tokens in the messages are text unless asked for."""
    text = render_messages(vocab, messages, template)
    own = [list(messages), template.tools]
    texts = set(_texts(own))  # roles come back in each turn
    names = sorted({name for each in texts for name in control_names(vocab, each)})
    if parse_special or not names:
        return vocab.tokenize(text)
    marked_messages, tools = _change_texts(own, lambda each: _mark(vocab, each))
    marked = render_messages(vocab, marked_messages, replace(template, tools=tools))
    shown = ", ".join(names)
    if marked.replace(_MARK, "") == text:
        tokens = _tokenize_marked(vocab, marked)
        if tokens is not None:
            log.info("the prompt holds %s, as text: --parse-special would read tokens", shown)
            return tokens
    log.warning(
        "the prompt holds %s, which the chat template does not pass on as it is: qdraft reads it "
        "as control tokens",
        shown,
    )
    return vocab.tokenize(text)


def render_messages(
    vocab: TextVocab, messages: Sequence[Message], template: TemplateOptions
) -> str:
    """Return the messages in the template, cut after the last one if the answer continues it.

    Raises UsageError if the template fails, or leaves out what the answer should continue.
    """
    if not template.continue_last:
        return vocab.render_chat(messages, template)
    *before, last = messages
    key = "content" if last.get("content") else "reasoning_content"
    value = last.get(key) or ""
    if isinstance(value, list):
        marked: Any = [*value[:-1], {**value[-1], "text": value[-1]["text"] + _OPEN}]
    else:
        marked = value + _OPEN
    text = vocab.render_chat([*before, {**last, key: marked}], template)
    end = text.rfind(_OPEN)
    if end < 0:
        raise UsageError(f"the chat template leaves out the {key} that the answer should continue")
    return text[:end]


def _texts(value: Any) -> Iterator[str]:
    """Give all texts in messages or tools, and in what they hold."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _texts(each)
    elif isinstance(value, dict):
        for item in value.items():
            yield from _texts(item)


def _change_texts(value: Any, change: Callable[[str], str]) -> Any:
    """Return a copy of messages or tools with all of their texts changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, (list, tuple)):
        return [_change_texts(each, change) for each in value]
    if isinstance(value, dict):
        return {change(key): _change_texts(each, change) for key, each in value.items()}
    return value


def _mark(vocab: TextVocab, text: str) -> str:
    """Split the name of each control token in a text by a mark."""
    while names := control_names(vocab, text):
        before = text
        for name in names:
            text = text.replace(name, name[0] + _MARK + name[1:])
        if text == before or len(min(names, key=len)) < 2:
            break
    return text


def _tokenize_marked(vocab: TextVocab, text: str) -> list[int] | None:
    """Return the tokens of a text without its marks; None if that needs another tokenizer.

    As in llama.cpp, control tokens cut the text into pieces that do not know of each other. Pieces
    with a mark are tokenized without control tokens, all others as they stand together.
    """
    names = control_names(vocab, text)
    pieces = re.split(f"({'|'.join(map(re.escape, names))})", text) if names else [text]
    tokens = vocab.tokenize("")
    run = ""
    for i, piece in enumerate(pieces):
        if _MARK not in piece:
            run += piece
            continue
        tokens += vocab.tokenize(run, add_bos=False)
        if i > 0 and _is_alone(vocab, pieces[i - 1] + "\n"):
            piece = piece.lstrip(_SPACE)
        if i + 1 < len(pieces) and _is_alone(vocab, "\n" + pieces[i + 1]):
            piece = piece.rstrip(_SPACE)
        own = _as_text(vocab, piece)
        if own is None:
            return None
        tokens += own
        run = ""
    return tokens + vocab.tokenize(run, add_bos=False)


def _is_alone(vocab: TextVocab, text: str) -> bool:
    """Tell whether the control token in a text takes the newline beside it (as in Phi-3)."""
    n_newline = len(vocab.tokenize("\n", add_bos=False))
    return n_newline > 0 and len(vocab.tokenize(text, add_bos=False)) == 1


def _as_text(vocab: TextVocab, piece: str) -> list[int] | None:
    """Return the tokens of a piece without its marks, none of them control; None if there are.

    llama.cpp finds marks of turns that it prints in any text, and so each part stands alone.
    """
    whole = vocab.tokenize(piece.replace(_MARK, ""), parse_special=False, add_bos=False)
    if not any(map(vocab.is_control, whole)):
        return whole
    parts = [
        token
        for part in piece.split(_MARK)
        for token in vocab.tokenize(part, parse_special=False, add_bos=False)
    ]
    return None if any(map(vocab.is_control, parts)) else parts
