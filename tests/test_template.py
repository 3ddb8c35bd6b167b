"""Chat templates: one verdict for `inspect` and `run`, and an end to every one of them."""

from __future__ import annotations

import gc
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
from invoke import one_error, qdraft

from qdraft.errors import UsageError
from qdraft.gguf.template import Template
from qdraft.llama.chat_template import ChatTemplate, TemplateOptions, template_renders
from qdraft.llama.model import LlamaModel
from qdraft.llama.params import EngineParams
from qdraft.making.calibration import takes_a_chat

HELLO: list[dict[str, Any]] = [{"role": "user", "content": "Hello"}]
SAID = "{{ messages[0]['content'] }}"


def render(text: str, messages: list[dict[str, Any]] = HELLO, **variables: Any) -> str:
    return Template(text, "<s>", "</s>").render(messages, **variables)


@pytest.mark.parametrize(
    ("text", "rendered"),
    [
        (
            "{% for m in messages %}<{{ m.role }}>{{ m['content'] }}\n{% endfor %}|",
            "<user>Hello\n|",
        ),
        (
            SAID + "{% if add_generation_prompt %}{{ bos_token }}{{ eos_token }}{% endif %}",
            "Hello<s></s>",
        ),
        # Templates for training mark the assistant's words (SmolLM3, LFM2.5).
        (SAID + "{% generation %}x{% if 1 %}y{% endif %}{% endgeneration %}", "Helloxy"),
        (
            SAID + "{{ {'b': '<é>', 'a': 1} | tojson(ensure_ascii=False) }}",
            'Hello{"b": "<é>", "a": 1}',
        ),
        (
            SAID + "{{ [1, {'a': 2}] | tojson(indent=1, sort_keys=True) }}",
            'Hello[\n 1,\n {\n  "a": 2\n }\n]',
        ),
        ("{% for m in messages %}{{ m.content }}{% break %}{% endfor %}", "Hello"),
        (SAID + "{{ strftime_now('%') | length > 0 }}", "HelloTrue"),
        # What tools may be if there are none: Hermes, Command R+ and FireFunction differ.
        (SAID + "{% if tools is defined and tools | length > 0 %}x{% endif %}", "Hello"),
        (SAID + "{% if tools is not none %}{{ tools | tojson }}{% endif %}", "Hello"),
        (SAID + "{% for t in tools %}{{ t }}{% endfor %}", "Hello"),
        (SAID + "{% if functions is defined %}{{ '' + functions }}{% endif %}", "Hello"),
        (SAID + "{{ (tools + []) | length }}", "Hello0"),
        # A model that sees pictures wants the parts of a message.
        ("{% for part in messages[0].content %}{{ part['text'] }}{% endfor %}", "Hello"),
        ("{{ messages[0].content | upper }}", "HELLO"),
    ],
)
def test_what_templates_use(text: str, rendered: str) -> None:
    """https://github.com/abetlen/llama-cpp-python/issues/2225"""
    assert render(text) == rendered


CALL = {"function": {"name": "f", "arguments": '{"é": [1]}'}}
CALLED = [*HELLO, {"role": "assistant", "content": None, "tool_calls": [CALL]}]
LAST = "{{ messages[0].content }}{% set m = messages[-1] %}"
ARGUMENTS = "m.tool_calls[0].function.arguments"


@pytest.mark.parametrize(
    ("text", "rendered"),
    [
        # Qwen prints objects as JSON, DeepSeek joins texts, and others do not look.
        (LAST + f"{{% if m.tool_calls %}}{{{{ {ARGUMENTS} | tojson }}}}{{% endif %}}", True),
        (LAST + f"{{% if m.tool_calls %}}{{{{ '' + {ARGUMENTS} }}}}{{% endif %}}", True),
        (LAST + f"{{% if m.tool_calls %}}{{{{ {ARGUMENTS} }}}}{{% endif %}}", True),
        (LAST + f"{{% if m.content is none %}}{{{{ {ARGUMENTS} | tojson }}}}{{% endif %}}", True),
        (LAST + "{{ m.content + '|' }}", False),  # None is no text
    ],
)
def test_calls_of_tools(text: str, rendered: bool) -> None:
    assert render(text, CALLED) == ('Hello{"é": [1]}' if rendered else "Hello|")


def test_variables_and_the_end_of_the_prompt() -> None:
    text = SAID + "{{ tools }}{% if add_generation_prompt %}<think={{ think }}>{% endif %}"
    with closing(ChatTemplate(text)) as template:
        assert template.render(HELLO) == "HelloNone<think=>"
        options = TemplateOptions({"think": True}, [{"a": 1}])
        assert template.render(HELLO, options) == "Hello[{'a': 1}]<think=True>"
        assert template.render(HELLO, TemplateOptions(add_generation_prompt=False)) == "HelloNone"
        parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
        assert template.render([{"role": "user", "content": parts}]).startswith("a\nb")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{% for m in messages %}", "TemplateSyntaxError"),
        ("{{ raise_exception('only in pairs') }}", "fails: only in pairs"),
        ("{{ messages.__class__.__mro__ }}", "SecurityError"),
        ("nothing of the message", "leaves the message out"),
        (SAID + "{{ messages[0].content + none }}", "TypeError"),
        (SAID + "\n{{ 1 / 0 }}", "ZeroDivisionError: division by zero (line 2 of the template)"),
        (SAID + "{{ none.x.y }}", "UndefinedError"),
        (SAID + "{{ '' + functions }}", "UndefinedError"),
        (SAID + "{% for i in range(200000) %}{% endfor %}", "OverflowError"),
        (SAID + "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        (SAID + "{% include 'x' %}", "TypeError"),
        (SAID + "{{ 'x' * 10**9 }}", "MiB of memory"),
        (SAID + "{{ 'x' | center(10**9) }}", "MiB of memory"),
        (SAID + "{{ 'x' * 2 ** 24 }}", "a prompt of 16777221 characters"),
    ],
)
def test_failures_are_one_line(text: str, reason: str) -> None:
    with closing(ChatTemplate(text)) as template, pytest.raises(UsageError) as failure:
        template.render(HELLO)
    assert reason in str(failure.value)
    assert "\n" not in str(failure.value)
    assert str(failure.value).startswith("the model's chat template fails: ")
    assert "--raw" in (failure.value.hint or "")


@pytest.mark.parametrize(
    "text",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{{ 7 ** (messages | length * 10 ** 8) % 7 }}",
    ],
)
def test_a_template_that_loops_ends(text: str) -> None:
    """Also in C, where no Python code could look at a clock; and the next prompt is answered."""
    looping = "{% if messages[0].content == 'loop' %}" + text + "{% endif %}" + SAID
    with closing(ChatTemplate(looping, limit_s=0.3)) as template:
        assert template.render(HELLO) == "Hello"
        with pytest.raises(UsageError, match=r"does not end within 0\.3 seconds"):
            template.render([{"role": "user", "content": "loop"}])
        assert template.render(HELLO) == "Hello"


def test_one_child_renders_all_and_goes_with_its_template() -> None:
    template = ChatTemplate("{{ bos_token }}" + SAID, "<s>", "</s>")
    texts = [template.render([{"role": "user", "content": c}]) for c in "aé\n"]
    assert texts == ["<s>a", "<s>é", "<s>\n"]
    child = template._child
    assert child is not None
    assert child.poll() is None
    del template
    gc.collect()
    assert child.poll() is not None


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "broken.gguf"
    tiny.zeros(path, tiny.TOKENS, template=SAID + "{{ 1 / 0 }}")
    return path


def test_one_verdict(broken: Path) -> None:
    assert template_renders(SAID)
    assert not template_renders(SAID + "{{ 1 / 0 }}")
    assert "does not render" in qdraft("inspect", str(broken)).stdout
    run = qdraft("run", "-m", str(broken), "--no-draft", "-p", "a", "-n", "2", "-c", "32")
    assert "ZeroDivisionError" in one_error(run, 2)
    assert "--raw" in run.stderr
    raw = qdraft("run", "-m", str(broken), "--no-draft", "-p", "a", "-n", "2", "-c", "32", "--raw")
    assert raw.returncode == 0


def test_a_study_goes_on_without_the_template(
    broken: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """`bench`, `make`, `tune` and `compare` ask this before they generate texts."""
    model = LlamaModel(broken, EngineParams())
    try:
        pair: Any = SimpleNamespace(vocab=model.vocab)
        with caplog.at_level("WARNING", "qdraft"):
            assert not takes_a_chat(pair, "abc")
        assert "division by zero (line 1 of the template): qdraft generates texts" in caplog.text
        model.vocab.use_template(SAID)
        assert takes_a_chat(pair, "abc")
    finally:
        model.close()
