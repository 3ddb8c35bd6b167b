"""Reasoning apart from the answer: marks, pieces of any size, switches, and `run`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from invoke import one_error, qdraft

from qdraft import DecodeParams, EngineParams, Pair, PairSpec, SamplingParams
from qdraft.decoding.sampling import History, Row
from qdraft.errors import UsageError
from qdraft.llama.chat_template import TemplateOptions
from qdraft.session.reasoning import (
    Marks,
    ReasoningSplitter,
    find_marks,
    is_open,
    switch_reasoning,
)
from qdraft.testing import FakeVocab

THINK = Marks("<think>", "</think>")
GPT_OSS = find_marks(FakeVocab([], chat="<|start|>assistant<|channel|>analysis<|message|>"))
assert GPT_OSS


def split(
    text: str, size: int, marks: Marks = THINK, *, opened: bool = False
) -> tuple[str, str, list[str]]:
    """Return the reasoning, the content and the pieces of content of a text in equal pieces."""
    splitter = ReasoningSplitter(marks, opened=opened)
    splits = [splitter.push(text[i : i + size]) for i in range(0, len(text), size)]
    splits.append(splitter.flush())
    contents = [each.content for each in splits]
    return "".join(each.reasoning for each in splits), "".join(contents), contents


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
@pytest.mark.parametrize(
    ("text", "opened", "reasoning", "content"),
    [
        ("<think>\na b\n</think>\n\nc d\n", False, "a b", "c d\n"),
        (" \n<think>a</think>b", False, "a", "b"),
        ("<think>\n\n</think>\n\nb", False, "", "b"),
        ("\na b\n</think>\n\nc", True, "a b", "c"),
        # Text that looks like a mark, and marks that are text.
        ("<thinking> a", False, "", "<thinking> a"),
        ("\n <thin", False, "", "\n <thin"),
        (" a <think>b</think>", False, "", " a <think>b</think>"),
        (
            "<think>a </thin k> b\n</think>c</think><think>",
            False,
            "a </thin k> b",
            "c</think><think>",
        ),
        ("<think><think>a</think>b", False, "<think>a", "b"),
        # A text that ends early.
        ("<think>a </thi", False, "a </thi", ""),
        ("<think>a", False, "a", ""),
        ("a \n ", True, "a \n ", ""),
        ("", False, "", ""),
        ("<think>a</think> \n", False, "a", ""),
    ],
)
def test_what_is_reasoning(
    text: str, opened: bool, reasoning: str, content: str, size: int
) -> None:
    assert split(text, size, opened=opened)[:2] == (reasoning, content)


@pytest.mark.parametrize("size", [1, 5, 100])
def test_channels_of_gpt_oss(size: int) -> None:
    final = "<|channel|>final<|message|>"
    thought = "<|channel|>analysis<|message|>a<|end|><|start|>assistant"
    assert split(f"{thought}{final}b", size, GPT_OSS)[:2] == ("a", "b")
    assert split(f"{final}b", size, GPT_OSS)[:2] == ("", "b")


def test_text_without_marks_waits_for_nothing() -> None:
    assert split("ab <c", 1)[2] == ["a", "b", " ", "<", "c", ""]


def test_a_mark_in_the_prompt() -> None:
    """The template has begun the reasoning, or ended it; marks of other turns do not count."""
    names = ["[U]", "[A]", "<think>", "</think>", "a"]
    vocab = FakeVocab([name.encode() for name in names], control=(0, 1), chat="<think>")
    spelled = FakeVocab([name.encode() for name in (*names[:2], *"<think>/a")], control=(0, 1))
    for prompt, opened in (
        ("[U]a[A]<think>", True),
        ("[U]a[A]<think>a", True),
        ("[U]a[A]<think></think>", False),
        ("[U]<think>a[A]", False),
        ("[U]a[A]", False),
        ("", False),
    ):
        for each in (vocab, spelled):
            assert is_open(each, THINK, each.tokenize(prompt)) == opened
    as_control = FakeVocab([name.encode() for name in names], control=(0, 1, 2, 3))
    assert is_open(as_control, THINK, as_control.tokenize("[U]a[A]<think>a"))


def test_switches(monkeypatch: pytest.MonkeyPatch) -> None:
    vocab = FakeVocab([b"a"], chat="<think> enable_thinking, thinking")

    def render(messages: Sequence[dict[str, Any]], options: TemplateOptions) -> str:
        return str(options.kwargs.get("enable_thinking"))

    monkeypatch.setattr(vocab, "render_chat", render)
    assert switch_reasoning(vocab, on=False) == {"enable_thinking": False}
    assert switch_reasoning(vocab, on=True) == {"enable_thinking": True}
    always, never = FakeVocab([b"a"], chat="<think>"), FakeVocab([b"a"], chat="x")
    assert switch_reasoning(always, on=True) == switch_reasoning(never, on=False) == {}
    with pytest.raises(UsageError, match="cannot switch reasoning off"):
        switch_reasoning(always, on=False)
    with pytest.raises(UsageError, match="cannot switch reasoning on"):
        switch_reasoning(never, on=True)


TOKENS = ["<s>", "</s>", "[U]", "<think>", "</think>", *"abc<>/thinks", "Ċ", "Ġ"]
TEMPLATE = (
    "{% for m in messages %}[U]{{ m.content }}{% endfor %}[U]"
    "{% if enable_thinking is not defined or enable_thinking %}<think>{% endif %}"
)


@pytest.fixture(scope="module", params=["text", "control"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose marks are ordinary tokens, or control tokens, which are in no text."""
    path = tmp_path_factory.mktemp("model") / f"{request.param}.gguf"
    control = (0, 1, 2, 3, 4) if request.param == "control" else (0, 1, 2)
    return tiny.zeros(path, TOKENS, control=control, template=TEMPLATE)


def test_a_generated_text(model: Path) -> None:
    script = [TOKENS.index(c) for c in ("a", "Ċ", "</think>", "Ċ", "b", "c")]

    def follow(row: Row, history: History) -> Row:
        row = np.full_like(row, -np.inf)
        row[script[len(history.context) + len(history.drafted) - n_prompt]] = 0
        return row

    params = EngineParams(n_ctx=64, n_threads=1)
    few = DecodeParams(n_predict=len(script), n_draft=0)
    with Pair(PairSpec.of(model, None, params)) as pair:
        text = pair.generate(
            "a", SamplingParams(temperature=0), few, processors=[follow], split_reasoning=True
        )
        n_prompt = len(text.prompt)
        chunks = [(chunk.reasoning, chunk.text) for chunk in text]
        assert chunks == [("a", ""), ("", ""), ("", ""), ("", ""), ("", "b"), ("", "c")]
        assert (text.reasoning, text.text) == ("a", "bc")
        whole = pair.generate("a", SamplingParams(temperature=0), few, processors=[follow])
        whole.read()
    mark = "" if "control" in model.name else "</think>"
    assert (whole.reasoning, whole.text) == ("", f"a\n{mark}\nbc")


class TestRun:
    def run(self, model: Path, *more: str) -> Any:
        args = ("run", "-m", str(model), "--no-draft", "-p", "b", "-n", "3", "-c", "32")
        return qdraft(*args, "--temp", "0", "--logit-bias", "5+60", *more)

    def test_reasoning_is_apart(self, model: Path) -> None:
        done = self.run(model)
        assert done.stdout == ""
        assert "reasoning:\naaa\n" in done.stderr
        report = json.loads(self.run(model, "--json").stdout)
        assert (report["reasoning"], report["text"]) == ("aaa", "")
        for more in ("--hide-reasoning", "--quiet"):
            assert "aaa" not in "".join(
                (self.run(model, more).stdout, self.run(model, more).stderr)
            )
        assert self.run(model, "--reasoning-format", "none").stdout == "aaa\n"

    def test_the_template_and_its_variables(self, model: Path, tmp_path: Path) -> None:
        for more in (
            ("--reasoning", "off"),
            ("--chat-template-kwargs", '{"enable_thinking": false}'),
        ):
            assert self.run(model, *more).stdout == "aaa\n"
        other = tmp_path / "other.jinja"
        other.write_text("{{ messages[0].content }}")
        assert self.run(model, "--chat-template-file", str(other)).stdout == "aaa\n"
        other.write_text("{{ messages[0].content }}\n{% if %}")
        failed = self.run(model, "--chat-template-file", str(other))
        assert "TemplateSyntaxError" in one_error(failed, 2)
        assert "(line 2 of the template)" in failed.stderr

    @pytest.mark.parametrize(
        ("options", "error"),
        [
            (("--reasoning", "maybe"), "--reasoning is maybe but must be one of on, off, auto"),
            (("--reasoning-format", "x"), "--reasoning-format is x but must be one of"),
            (("--chat-template-kwargs", "x"), "--chat-template-kwargs is not JSON"),
            (("--chat-template-kwargs", "[]"), "--chat-template-kwargs must be a JSON object"),
            (("--chat-template-kwargs", '{"tools": 1}'), "tools is a variable of the chat"),
            (("--chat-template-file", "/nowhere"), "/nowhere cannot be read"),
            (("--raw", "--reasoning", "off"), "--reasoning cannot be combined with --raw"),
            (("--hide-reasoning", "--json"), "--hide-reasoning cannot be combined with --json"),
            (
                ("--reasoning", "off", "--chat-template-kwargs", '{"enable_thinking": true}'),
                "--reasoning cannot be combined with enable_thinking in --chat-template-kwargs",
            ),
        ],
    )
    def test_what_is_refused(self, model: Path, options: tuple[str, ...], error: str) -> None:
        assert error in one_error(self.run(model, *options), 2)
