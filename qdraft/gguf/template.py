"""A chat template in a sandbox, and the child process that renders it.

A template is a program from outside: it may loop for ever or ask for all memory. This file runs as
a script in a process with limits, and imports nothing of qdraft, which would take longer than most
templates.
"""

from __future__ import annotations

import contextlib
import json
import math
import signal
import sys
import time
from collections.abc import Sequence
from datetime import datetime
from typing import Any

Messages = Sequence[dict[str, Any]]

N_BYTES = 1 << 29  # of memory for the whole process
_N_CHARACTERS = 1 << 24  # of a prompt
_PROBE = [{"role": "user", "content": "Hello"}]

# Some templates fail if `tools` is None, as Transformers passes it, others if there is no `tools`,
# others in a chat without tools if it is not a list. Templates of models that see pictures want the
# parts of a message, each with its type.
_TOOLS: tuple[dict[str, Any], ...] = ({"tools": None}, {}, {"tools": []})
_WAYS = tuple((tools, in_parts) for in_parts in (False, True) for tools in _TOOLS)


class Template:
    """One template, and the way that it wants its messages, which a trial determines.

    It has what Transformers gives chat templates: loop controls, ``tojson`` without escapes of
    HTML, ``raise_exception``, ``strftime_now`` and the block ``generation``.
    """

    def __init__(self, text: str, bos: str, eos: str) -> None:
        """Compile the template. Raises whatever its syntax makes jinja2 raise."""
        from jinja2 import TemplateError, nodes
        from jinja2.ext import Extension
        from jinja2.parser import Parser
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        class Generation(Extension):
            """``{% generation %}`` marks the assistant's words for training, and prints them."""

            tags = {"generation"}  # noqa: RUF012 (as jinja2 declares it)

            def parse(self, parser: Parser) -> list[nodes.Node]:
                next(parser.stream)
                return parser.parse_statements(("name:endgeneration",), drop_needle=True)

        def refuse(message: str) -> None:
            raise TemplateError(message)

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", Generation],
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = refuse
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        self._template = environment.from_string(text)
        self._tokens = {"bos_token": bos, "eos_token": eos}
        self._way: tuple[dict[str, Any], bool] | None = None

    def render(self, messages: Messages) -> str:
        """Return the messages in the template, open for the assistant's turn.

        Raises whatever the template makes Python raise.
        """
        if self._way is None:
            self._way = self._find_way()
        return self._render(messages, *self._way)

    def _find_way(self) -> tuple[dict[str, Any], bool]:
        """Return the first way that prints a message; the first of all if each fails."""
        fails = True
        for way in _WAYS:
            try:
                text = self._render(_PROBE, *way)
            except Exception:  # a template can fail in any way that Python can
                continue
            fails = False
            if "hello" in text.casefold():
                return way
        if fails:
            return _WAYS[0]
        raise ValueError("it leaves the message out")

    def _render(self, messages: Messages, tools: dict[str, Any], in_parts: bool) -> str:
        if in_parts:
            messages = [
                {**each, "content": [{"type": "text", "text": each["content"]}]}
                for each in messages
            ]
        text = self._template.render(
            messages=messages, add_generation_prompt=True, **tools, **self._tokens
        )
        if len(text) > _N_CHARACTERS:
            raise ValueError(f"it makes a prompt of {len(text)} characters")
        return text


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def main() -> None:
    """Answer each line of stdin with a line of stdout, both JSON, until stdin ends.

    The first line is the template, the text of BOS, that of EOS and the seconds of computing that
    one answer may take, each further one a list of messages. An answer has a ``text`` or an
    ``error``. A system without limits leaves the time to the parent.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles an interrupt
    text, bos, eos, limit_s = json.loads(sys.stdin.readline())
    _limit_memory()
    template: Template | None = None
    for line in sys.stdin:
        _limit_time(limit_s)
        try:
            template = template or Template(text, bos, eos)
            answer = json.dumps({"text": template.render(json.loads(line))})
        except Exception as error:  # see _find_way
            answer = json.dumps({"error": _describe(error)})
        print(answer, flush=True)


def _describe(error: Exception) -> str:
    from jinja2 import TemplateError

    if isinstance(error, MemoryError):
        return f"it needs more than {N_BYTES >> 20} MiB of memory"
    if type(error) in (TemplateError, ValueError):
        return str(error)[:2000]
    return f"{type(error).__name__}: {error}"[:2000]


def _limit_memory() -> None:
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_AS, (N_BYTES, N_BYTES))


def _limit_time(limit_s: float) -> None:
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_CPU)
        resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(time.process_time() + limit_s), hard))


if __name__ == "__main__":
    main()
