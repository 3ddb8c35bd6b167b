"""Calls of llama.cpp's tokenizer that cannot end the process, nor keep it from an interrupt.

Most pre-tokenizers of llama.cpp are a std::regex, which recurses for each character of a match: up
to 750 bytes of stack for each. For some the time grows with the square of a run. Some vocabularies
meet an assertion of llama.cpp. So a harmless text is tokenized on a thread with a large stack, and
any other in a child process.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from qdraft.errors import EngineError, UsageError
from qdraft.llama.child import command
from qdraft.llama.native import lib, native_errors

T = TypeVar("T")

# A text within these bounds takes less than a second, whatever the pre-tokenizer.
_MAX_CHARS = 100_000
_RUN = re.compile(r"\s+|\S+")
_MAX_RUN = 4_000
_DIGITS = re.compile(r"\d+")
_MAX_DIGITS = 400  # one pre-tokenizer looks ahead over all that follow, for each digit
_STACK_PER_CHAR = 2_048
_MIN_STACK = 2**20
_NO_MODEL = 3  # the child's status if the file does not load
_ASSERTS = ("whitespace",)  # no word may hold a space, and two spaces are one
_lock = threading.Lock()


def is_harmless(text: str) -> bool:
    """Tell whether a text is short enough, and has breaks enough, to be tokenized at once."""
    if len(text) > _MAX_CHARS:
        return False
    return _longest(_RUN, text) <= _MAX_RUN and _longest(_DIGITS, text) <= _MAX_DIGITS


def _longest(pattern: re.Pattern[str], text: str) -> int:
    """Return the number of characters of the longest match."""
    return max((match.end() - match.start() for match in pattern.finditer(text)), default=0)


def is_trustworthy(vocab: Any, pre_tokenizer: str) -> bool:
    """Tell whether llama.cpp can tokenize any text with this vocabulary without an assertion."""
    llama = lib()
    if pre_tokenizer in _ASSERTS:
        return False
    kind = int(llama.llama_vocab_type(vocab))
    if kind == llama.LLAMA_VOCAB_TYPE_SPM:
        # It falls back to the tokens of single bytes, which come first, and throws without them.
        n_first = min(1024, llama.llama_vocab_n_tokens(vocab))
        first = {llama.llama_vocab_get_text(vocab, token) for token in range(n_first)}
        return all(b"<0x%02X>" % byte in first for byte in range(256))
    return kind in (llama.LLAMA_VOCAB_TYPE_BPE, llama.LLAMA_VOCAB_TYPE_RWKV)


def tokenize_here(vocab: Any, text: str, *, parse_special: bool = True) -> list[int]:
    """Return the tokens of a harmless text, without BOS or EOS.

    ``parse_special`` takes the names of special tokens in it as these tokens.
    """
    data = text.encode()
    return _on_large_stack(len(text), lambda: _tokenize(vocab, data, parse_special))


def tokenize_in_child(path: Path, text: str, *, parse_special: bool = True) -> list[int]:
    """Return the tokens of any text by the vocabulary of a file; see ``tokenize_here``.

    Raises UsageError if llama.cpp ends the child, which is out of stack or met an assertion.
    KeyboardInterrupt ends the child at once.
    """
    child = subprocess.Popen(
        command(__name__, str(path), *(["--parse-special"] if parse_special else [])),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "GGML_NO_BACKTRACE": "1"},  # else ggml starts a debugger
    )
    with child:
        try:
            ids, errors = child.communicate(text.encode())
        finally:
            child.kill()
            child.wait()
    if child.returncode == 0:
        tokens: list[int] = np.frombuffer(ids, dtype=np.int32).tolist()
        return tokens
    reason = (errors.decode("utf-8", "replace").strip().splitlines() or ["it gave no reason"])[-1]
    if child.returncode == _NO_MODEL:
        raise EngineError(f"the vocabulary of {path} does not load: {reason}")
    if child.returncode < 0:
        reason = f"llama.cpp died of {signal.Signals(-child.returncode).name}"
    raise UsageError(
        f"{path.name} cannot tokenize a text of {len(text)} characters, up to "
        f"{_longest(_RUN, text)} of them in a row without a break: {reason}",
        hint="use a shorter text, or one with spaces and line breaks",
    )


def _tokenize(vocab: Any, data: bytes, parse_special: bool) -> list[int]:
    llama = lib()
    size = len(data) + 8
    while True:
        buffer = (llama.llama_token * size)()
        n = llama.llama_tokenize(vocab, data, len(data), buffer, size, False, parse_special)
        if n >= 0:
            return list(buffer[:n])
        if n == -(2**31):
            raise EngineError("the prompt is too long to tokenize")
        size = -n


def _on_large_stack(n_chars: int, function: Callable[[], T]) -> T:
    """Call ``function`` on a thread whose stack is large enough for a match of ``n_chars``.

    An interrupt is raised when it has ended. Raises EngineError if no thread starts.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            results.append(function())
        except BaseException as error:  # the caller raises it
            errors.append(error)

    thread = _start(work, _MIN_STACK + _STACK_PER_CHAR * n_chars)
    try:
        thread.join()
    except BaseException:
        thread.join()  # it uses the vocabulary
        raise
    if errors:
        raise errors[0]
    return results[0]


def _start(work: Callable[[], None], stack: int) -> threading.Thread:
    """Start a thread with a stack of that many bytes; less if the system refuses so much."""
    with _lock:  # the size counts for all threads that start meanwhile
        before = threading.stack_size()
        try:
            while True:
                # A multiple of the size of a page.
                threading.stack_size(max(_MIN_STACK, stack) // 2**16 * 2**16)
                thread = threading.Thread(target=work, daemon=True, name="qdraft-tokenizer")
                try:
                    thread.start()
                except RuntimeError as error:
                    if stack <= _MIN_STACK:
                        raise EngineError(f"llama.cpp's tokenizer: {error}") from error
                    stack //= 2
                else:
                    return thread
        finally:
            threading.stack_size(before)


def main(args: list[str]) -> int:
    """Run the child: tokenize stdin by the vocabulary of a file; write int32 ids to stdout.

    ``args`` is the file, and "--parse-special" if special tokens count.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process on an interrupt
    data = sys.stdin.buffer.read()
    llama = lib()
    params = llama.llama_model_default_params()
    params.vocab_only = True
    with native_errors() as errors:
        model = llama.llama_model_load_from_file(os.fsencode(args[0]), params)
    if not model:
        print(errors, file=sys.stderr)
        return _NO_MODEL
    vocab = llama.llama_model_get_vocab(model)
    n_chars = len(data.decode())
    tokens = _on_large_stack(n_chars, lambda: _tokenize(vocab, data, len(args) > 1))
    sys.stdout.buffer.write(np.array(tokens, dtype=np.int32).tobytes())
    return 0
