"""Text in and out: BOS, characters that span tokens, stop strings."""

from __future__ import annotations

import random

import pytest

from qdraft.errors import UsageError
from qdraft.session.text import TextReader, encode_prompt
from qdraft.testing import FakeVocab

BYTES = FakeVocab([bytes([i]) for i in range(256)])


def read(
    tokens: list[int] | bytes, stop: tuple[str, ...] = (), vocab: FakeVocab = BYTES
) -> list[str]:
    reader = TextReader(vocab, stop)
    parts = []
    for token in tokens:
        parts.append(reader.push(token))
        if reader.stopped:
            break
    return [*parts, reader.flush()]


def test_characters_come_out_whole() -> None:
    """The stream equals the whole, whatever characters span tokens.

    https://github.com/abetlen/llama-cpp-python/issues/372
    """
    text = "naïve 日本語 🦙👩‍🚀 end"
    parts = read(text.encode())
    assert "".join(parts) == text
    assert not any("\ufffd" in part for part in parts)


def test_a_cut_character_is_flushed_once() -> None:
    """A character that the budget cuts comes out once.

    https://github.com/abetlen/llama-cpp-python/issues/372
    """
    assert read("a🦙".encode()[:3]) == ["a", "", "", "\ufffd"]


def test_bytes_that_are_no_utf8_equal_the_whole() -> None:
    data = bytes(random.Random(3).randrange(256) for _ in range(400))
    assert "".join(read(data)) == data.decode("utf-8", "replace")


def test_stop_string_over_a_block_border() -> None:
    """Text is held back while a stop string may begin in it, and cut exactly.

    https://github.com/vllm-project/vllm/issues/3574
    """
    assert read(b"one END two", ("END",)) == ["o", "n", "e", " ", "", "", "", ""]
    assert read(b"one ENd", ("END",)) == ["o", "n", "e", " ", "", "", "ENd", ""]
    assert read(b"one EN", ("END",)) == ["o", "n", "e", " ", "", "", "EN"]


def test_the_earliest_stop_string_wins_within_one_token() -> None:
    vocab = FakeVocab([b"alpha beta gamma"])
    assert read([0], ("gamma", "beta"), vocab)[0] == "alpha "


def test_stop_strings_equal_a_cut_of_the_whole() -> None:
    """Random texts over a small alphabet, with stop strings that overlap themselves."""
    rng = random.Random(1)
    vocab = FakeVocab([b"a", b"b", b"ab", b"ba", b"aab", "é".encode()[:1], "é".encode()[1:]])
    for _ in range(500):
        tokens = [rng.randrange(7) for _ in range(12)]
        stop = tuple(
            {"".join(rng.choice("abé") for _ in range(rng.randrange(1, 4))) for _ in range(2)}
        )
        # The text ends with the token that completes a stop string, and is cut before it.
        expected = "".join(read(tokens, (), vocab))
        for n in range(1, len(tokens) + 1):
            text = "".join(read(tokens[:n], (), vocab)[:-1])
            if any(s in text for s in stop):
                expected = text[: min(text.find(s) for s in stop if s in text)]
                break
        assert "".join(read(tokens, stop, vocab)) == expected


class TestPrompt:
    bos = FakeVocab([b"<s>", b"a", b"b"], bos=0)

    def test_exactly_one_bos(self) -> None:
        """The prompt has one BOS, also if its text begins with one.

        https://github.com/abetlen/llama-cpp-python/issues/1501
        https://github.com/abetlen/llama-cpp-python/issues/1537
        """
        assert encode_prompt(self.bos, "ab") == [0, 1, 2]
        assert encode_prompt(self.bos, "<s>ab") == [0, 1, 2]

    def test_no_bos_where_the_model_wants_none(self) -> None:
        """A BOS in the text itself stays.

        https://github.com/abetlen/llama-cpp-python/issues/1501
        https://github.com/abetlen/llama-cpp-python/issues/1537
        """
        vocab = FakeVocab([b"<s>", b"a"])
        assert encode_prompt(vocab, "a") == [1]
        assert encode_prompt(vocab, "<s>a") == [0, 1]

    def test_empty(self) -> None:
        with pytest.raises(UsageError, match="empty"):
            encode_prompt(FakeVocab([b"a"]), "")

    def test_chat_template_unless_raw(self) -> None:
        vocab = FakeVocab([b"a", b"b", b"+"], chat="+")
        assert encode_prompt(vocab, "a") == [0]
        assert encode_prompt(vocab, "a", system="b") == [1, 2, 0]
        with pytest.raises(UsageError, match="--raw"):
            encode_prompt(vocab, "a", system="b", raw=True)
        with pytest.raises(UsageError, match="this model has none"):
            encode_prompt(BYTES, "a", system="b")
