"""A model's vocabulary: tokens, text and chat template; and a check that two are the same."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from qdraft.errors import EngineError, PairError
from qdraft.llama.chat_template import NO_OPTIONS, ChatTemplate, TemplateOptions
from qdraft.llama.native import lib
from qdraft.llama.tokenizer import (
    is_harmless,
    is_trustworthy,
    tokenize_here,
    tokenize_in_child,
)

log = logging.getLogger(__name__)

# Tokens of gpt-oss, which llama.cpp changes from control to user-defined (llama-vocab.cpp).
_TURN_MARKS = (b"<|start|>", b"<|channel|>", b"<|message|>", b"<|constrain|>", b"<|end|>")


class LlamaVocab:
    """The vocabulary of a loaded model. Raises EngineError once the model is closed."""

    def __init__(self, model: Any, path: Path) -> None:
        self._lib = lib()
        self._model = model
        self._path = path
        self._pointer = self._lib.llama_model_get_vocab(model)
        self.n_tokens = int(self._lib.llama_vocab_n_tokens(self._vocab))
        self.bos = int(self._lib.llama_vocab_bos(self._vocab))
        self._pieces: dict[tuple[int, bool], bytes] = {}

    @property
    def _vocab(self) -> Any:
        return self._open(self._pointer)

    @staticmethod
    def _open(pointer: Any) -> Any:
        if not pointer:
            raise EngineError("the model of this vocabulary is closed")
        return pointer

    def close(self) -> None:
        """Forget the model, which is about to be freed."""
        if template := self.__dict__.get("_template"):
            template.close()
        self._model = self._pointer = None

    def is_end(self, token: int) -> bool:
        return bool(self._lib.llama_vocab_is_eog(self._vocab, token))

    def piece(self, token: int, *, special: bool = False) -> bytes:
        """Return the bytes that a token adds to a text; ``special`` shows control tokens too."""
        if (token, special) not in self._pieces:
            self._pieces[token, special] = self._to_piece(token, special=special)
        return self._pieces[token, special]

    def _to_piece(self, token: int, *, special: bool) -> bytes:
        size = 64
        while True:
            buffer = ctypes.create_string_buffer(size)
            n = self._lib.llama_token_to_piece(self._vocab, token, buffer, size, 0, special)
            if n >= 0:
                return buffer.raw[:n]
            size = -n

    def tokenize(self, text: str, *, parse_special: bool = True, add_bos: bool = True) -> list[int]:
        """Return the tokens of a text, after BOS if the model wants it and ``add_bos``.

        EOS never follows, whatever the model says: a text that has ended has no continuation.
        Without ``parse_special`` the names of control tokens in the text are text.

        Raises UsageError for a text that llama.cpp does not survive.
        """
        vocab = self._vocab
        bos = [self.chunk_bos] if add_bos and self.chunk_bos >= 0 else []
        if not text:
            return bos
        if self._is_trustworthy and is_harmless(text):
            return bos + tokenize_here(vocab, text, parse_special=parse_special)
        return bos + tokenize_in_child(self._path, text, parse_special=parse_special)

    @cached_property
    def _is_trustworthy(self) -> bool:
        return is_trustworthy(self._vocab, self._pre_tokenizer())

    def _pre_tokenizer(self) -> str:
        buffer = ctypes.create_string_buffer(64)
        key = b"tokenizer.ggml.pre"
        self._lib.llama_model_meta_val_str(self._open(self._model), key, buffer, len(buffer))
        return buffer.value.decode("utf-8", "replace")

    def texts(self) -> list[bytes]:
        """Return the raw text of every token, by id."""
        get = self._lib.llama_vocab_get_text
        return [get(self._vocab, token) for token in range(self.n_tokens)]

    def is_unused(self, token: int) -> bool:
        """Tell whether a token only fills the vocabulary up to a round size."""
        attr = int(self._lib.llama_vocab_get_attr(self._vocab, token))
        return bool(attr & self._lib.LLAMA_TOKEN_ATTR_UNUSED)

    def is_special(self, token: int) -> bool:
        """Tell whether no ordinary text is made of a token: control, unknown or unused."""
        attr = int(self._lib.llama_vocab_get_attr(self._vocab, token))
        names = ("CONTROL", "UNKNOWN", "UNUSED")
        return any(attr & getattr(self._lib, f"LLAMA_TOKEN_ATTR_{name}") for name in names)

    def is_control(self, token: int) -> bool:
        """Tell whether a token is control or unknown, so that its name in a text may be text.

        Marks of turns count too: llama.cpp makes some of them ordinary tokens, to print them.
        """
        attr = int(self._lib.llama_vocab_get_attr(self._vocab, token))
        names = ("CONTROL", "UNKNOWN")
        if any(attr & getattr(self._lib, f"LLAMA_TOKEN_ATTR_{name}") for name in names):
            return True
        is_added = bool(attr & self._lib.LLAMA_TOKEN_ATTR_USER_DEFINED)
        return is_added and self.piece(token, special=True) in _TURN_MARKS

    def special(self) -> dict[str, int]:
        """Return the ids and flags that decide how text is tokenized and where it ends."""
        names = ("bos", "eos", "eot", "get_add_bos", "get_add_eos")
        values = {n: int(getattr(self._lib, f"llama_vocab_{n}")(self._vocab)) for n in names}
        return {"type": int(self._lib.llama_vocab_type(self._vocab)), **values}

    @property
    def chunk_bos(self) -> int:
        """The token that a chunk of a text starts with: BOS if the model wants one, else -1."""
        return self.bos if self.special()["get_add_bos"] else -1

    @cached_property
    def _template(self) -> ChatTemplate | None:
        assert self._vocab
        text = self._lib.llama_model_chat_template(self._open(self._model), None)
        return self._template_of(text.decode("utf-8", "replace")) if text else None

    def _template_of(self, text: str) -> ChatTemplate:
        eos = int(self._lib.llama_vocab_eos(self._vocab))

        def name(token: int) -> str:
            piece = self.piece(token, special=True) if token >= 0 else b""
            return piece.decode("utf-8", "replace")

        return ChatTemplate(text, name(self.bos), name(eos))

    def use_template(self, text: str) -> None:
        """Use another Jinja chat template in place of the model's own."""
        self._template = self._template_of(text)

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    @property
    def chat_template(self) -> str:
        """The text of the chat template; empty if there is none."""
        return "" if self._template is None else self._template.text

    def render_chat(
        self, messages: Sequence[dict[str, Any]], options: TemplateOptions = NO_OPTIONS
    ) -> str:
        """Return the messages in the chat template, as ``options`` say.

        Raises UsageError if the template fails or does not end.
        """
        assert self._template is not None
        return self._template.render(messages, options)


def require_same_vocab(target: LlamaVocab, draft: LlamaVocab, *, same_texts: bool = False) -> None:
    """Raise PairError with the first difference unless the draft's tokens are the target's.

    Tokens at the end that only one vocabulary has must be unused. This warns of what does not
    change the text, because the target's vocabulary tokenizes it and ends it: other texts of
    control, unknown and unused tokens, and other special tokens and flags. ``same_texts`` says that
    the headers of both files hold the same texts, so that nobody asks llama.cpp for each of them.
    """
    kinds = [int(vocab.special()["type"]) for vocab in (target, draft)]
    if kinds[0] != kinds[1]:
        raise _mismatch(f"type is {kinds[0]} in the target, {kinds[1]} in the draft")
    mild = [] if same_texts and target.n_tokens == draft.n_tokens else _other_texts(target, draft)
    for name, value in target.special().items():
        other = draft.special()[name]
        if value != other:
            mild.append(
                f"{name.removeprefix('get_')} is {value} in the target, {other} in the draft"
            )
    if mild:
        n_more = len(mild) - 1
        more = f" and {n_more} more difference{'s' if n_more > 1 else ''}" if n_more else ""
        log.warning("%s%s: qdraft uses the target's vocabulary", mild[0], more)


def _other_texts(target: LlamaVocab, draft: LlamaVocab) -> list[str]:
    """Describe the special tokens that have two texts; raise PairError for any other token."""
    mild: list[str] = []
    for token, (text, of_draft) in enumerate(zip(target.texts(), draft.texts(), strict=False)):
        if text == of_draft:
            continue
        differs = f"token {token} is {_show(text)} in the target, {_show(of_draft)} in the draft"
        if not (target.is_special(token) and draft.is_special(token)):
            raise _mismatch(differs)
        mild.append(differs)
    longer = max((target, draft), key=lambda vocab: vocab.n_tokens)
    for token in range(min(target.n_tokens, draft.n_tokens), longer.n_tokens):
        if not longer.is_unused(token):
            role = "target" if longer is target else "draft"
            raise _mismatch(f"token {token}, {_show(longer.texts()[token])}, is only in the {role}")
    return mild


def _show(text: bytes) -> str:
    return repr(text.decode("utf-8", "replace"))


def _mismatch(difference: str) -> PairError:
    return PairError(
        f"draft and target have different vocabularies: {difference}",
        hint="use a quantization of the same model as the draft",
    )
