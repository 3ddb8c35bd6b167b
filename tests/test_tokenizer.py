"""Texts that llama.cpp's tokenizer does not survive: a run of equal characters, odd vocabularies.

https://github.com/ggml-org/llama.cpp/issues/27783
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import pytest
import tiny

pytest.importorskip("llama_cpp", reason="needs llama-cpp-python")

from qdraft.errors import UsageError
from qdraft.llama import tokenizer as module
from qdraft.llama.model import LlamaModel
from qdraft.llama.params import EngineParams
from qdraft.llama.tokenizer import is_harmless, tokenize_in_child
from qdraft.llama.vocab import LlamaVocab

A = tiny.TOKENS.index("a")


@contextmanager
def vocab_of(path: Path, model: str, pre: str) -> Iterator[LlamaVocab]:
    # A byte that no load needs lacks its token.
    tokens = [*tiny.TOKENS, *(f"<0x{byte:02X}>" for byte in range(256) if byte != ord("~"))]
    loaded = LlamaModel(tiny.zeros(path, tokens, tokenizer=(model, pre)), EngineParams(), dry=True)
    try:
        yield loaded.vocab
    finally:
        loaded.close()


def test_a_text_with_breaks_is_harmless() -> None:
    assert is_harmless("word " * 20_000)
    assert not is_harmless("word " * 20_001)
    for character in "a\n中":
        assert is_harmless(f"x{character * 3_998} x")
        assert not is_harmless(f"x {character * 4_001} x")
    assert is_harmless("1" * 400)
    assert not is_harmless("1" * 401)


@pytest.mark.parametrize(("pre", "character"), [("tekken", "a"), ("deepseek-v3", "\n")])
def test_many_equal_characters(tmp_path: Path, pre: str, character: str) -> None:
    """std::regex recurses for each of them: llama.cpp itself ends in a segmentation fault."""
    with vocab_of(tmp_path / "m.gguf", "gpt2", pre) as vocab:
        tokens = vocab.tokenize(200_000 * character)
        n_known = 200_000 * (character in tiny.TOKENS)
        assert tokens == [vocab.bos] * vocab.special()["get_add_bos"] + n_known * [A]


def test_a_thread_with_a_small_stack(tmp_path: Path) -> None:
    """A program may tokenize in a thread of its own, whose stack would hold a few hundred."""
    results: list[list[int]] = []
    with vocab_of(tmp_path / "m.gguf", "gpt2", "tekken") as vocab:
        text = 4_000 * "a"
        before = threading.stack_size(2**18)
        try:
            thread = threading.Thread(target=lambda: results.append(vocab.tokenize(text)))
            thread.start()
            thread.join()
        finally:
            size = threading.stack_size(before)
    assert results == [[tiny.TOKENS.index("<s>"), *4_000 * [A]]]
    assert size == 2**18


def test_a_system_that_gives_no_large_stack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under `ulimit -v` a thread may not start; a smaller stack mostly does."""
    start, refused = threading.Thread.start, []

    def refuse(thread: threading.Thread) -> None:
        if threading.stack_size() > 2**20:
            refused.append(threading.stack_size())
            raise RuntimeError("can't start new thread")
        start(thread)

    with vocab_of(tmp_path / "m.gguf", "gpt2", "tekken") as vocab:
        monkeypatch.setattr(threading.Thread, "start", refuse)
        assert vocab.tokenize("a" * 1_000) == [vocab.bos, *1_000 * [A]]
    assert refused


@pytest.mark.parametrize(
    ("model", "pre", "text"),
    [("gpt2", "whitespace", "a  b"), ("llama", "default", "a~")],
    ids=["two spaces", "no token for a byte"],
)
def test_a_vocabulary_that_ends_the_process(
    tmp_path: Path, model: str, pre: str, text: str
) -> None:
    with (
        vocab_of(tmp_path / "m.gguf", model, pre) as vocab,
        pytest.raises(UsageError, match=f"of {len(text)} characters") as caught,
    ):
        vocab.tokenize(text)
    assert "llama.cpp died of SIGABRT" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.real
def test_a_child_gives_the_same_tokens(source_file: Path) -> None:
    model = LlamaModel(source_file, EngineParams(), dry=True)
    text = "Mixed: été, 中文 😀, 12345\n\n\tx = {1}; <|im_start|>  don't " * 20
    tokens = model.vocab.tokenize(text)
    model.close()
    assert len(tokens) > 400
    assert tokenize_in_child(source_file, text) == tokens


def test_an_interrupt_ends_the_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some pre-tokenizers need minutes, because their time grows with the square of a run."""
    note = tmp_path / "pid"
    code = f"import os, time; open({str(note)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    monkeypatch.setattr(module, "command", lambda *args: [sys.executable, "-c", code])

    def interrupt(number: int, frame: FrameType | None) -> None:
        if note.exists() and note.read_text():
            signal.setitimer(signal.ITIMER_REAL, 0)
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)
    try:
        with pytest.raises(KeyboardInterrupt):
            tokenize_in_child(tmp_path / "m.gguf", "text")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    with pytest.raises(ProcessLookupError):
        os.kill(int(note.read_text()), 0)
