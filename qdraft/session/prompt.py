"""From a prompt to tokens: marks of the chat template are tokens, whatever the text holds."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence

from qdraft.errors import UsageError
from qdraft.session.text import TextVocab, control_names

log = logging.getLogger(__name__)

# No character, and in no text. It splits the names of control tokens in the user's own text, so
# that the tokenizer does not see them, and shows where the template has put them.
_MARK = "\ufdd0"
_SPACE = " \t\n\v\f\r"  # as C has it


def encode_prompt(
    vocab: TextVocab,
    prompt: str,
    *,
    system: str | None = None,
    raw: bool = False,
    parse_special: bool | None = None,
) -> list[int]:
    """Return the token ids of a prompt, in the chat template unless there is none or ``raw``.

    ``parse_special`` says whether the names of control tokens in the user's own text are these
    tokens; None takes them as text in a chat, and as tokens otherwise. The tokens begin with one
    BOS at most. Raises UsageError for an empty prompt, or for a system text without a template.
    """
    chat = vocab.has_chat_template and not raw
    if any("\ud800" <= c <= "\udfff" for c in prompt + (system or "")):
        raise UsageError("the prompt is not valid UTF-8")
    if system is not None and not chat:
        why = "--raw leaves it out" if raw else "this model has none"
        raise UsageError(f"a system text needs a chat template, but {why}")
    if chat:
        messages = [] if system is None else [{"role": "system", "content": system}]
        messages.append({"role": "user", "content": prompt})
        tokens = _encode_chat(vocab, messages, parse_special=bool(parse_special))
    else:
        tokens = vocab.tokenize(prompt, parse_special=parse_special is not False)
    while len(tokens) > 1 and tokens[0] == tokens[1] == vocab.bos:
        del tokens[0]
    if not tokens:
        raise UsageError("the prompt is empty", hint="give a text with -p, with -f or on stdin")
    return tokens


def _encode_chat(
    vocab: TextVocab, messages: Sequence[dict[str, str]], *, parse_special: bool
) -> list[int]:
    """Return the tokens of a chat; control tokens in the messages are text unless asked for."""
    text = vocab.render_chat(messages)
    contents = [message["content"] for message in messages]
    names = sorted({name for each in contents for name in control_names(vocab, each)})
    if parse_special or not names:
        return vocab.tokenize(text)
    marked = vocab.render_chat(
        [{**message, "content": _mark(vocab, message["content"])} for message in messages]
    )
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
