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
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

Message = dict[str, Any]
Messages = Sequence[Message]

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

    def render(self, messages: Messages, **variables: Any) -> str:
        """Return the messages in the template, with ``variables`` as Transformers passes them.

        Raises whatever the template makes Python raise.
        """
        if self._way is None:
            self._way = self._find_way()
        tools, in_parts = self._way
        variables = {"add_generation_prompt": True, **tools, **variables}
        failure: Exception | None = None
        for each in _spellings(messages):
            try:
                text = self._render(each, variables, in_parts)
            except Exception as error:  # see _find_way
                failure = failure or error
                continue
            if not _prints_objects(each, text):
                return text
        raise failure or ValueError("it prints the arguments of a tool call as Python does")

    def _find_way(self) -> tuple[dict[str, Any], bool]:
        """Return the first way that prints a message; the first of all if each fails."""
        fails = True
        for way in _WAYS:
            tools, in_parts = way
            try:
                text = self._render(_PROBE, {"add_generation_prompt": True, **tools}, in_parts)
            except Exception:  # a template can fail in any way that Python can
                continue
            fails = False
            if "hello" in text.casefold():
                return way
        if fails:
            return _WAYS[0]
        raise ValueError("it leaves the message out")

    def _render(self, messages: Messages, variables: Mapping[str, Any], in_parts: bool) -> str:
        content = _in_parts if in_parts else _as_text
        messages = [{**each, "content": content(each.get("content"))} for each in messages]
        text = self._template.render({**self._tokens, **variables, "messages": messages})
        if len(text) > _N_CHARACTERS:
            raise ValueError(f"it makes a prompt of {len(text)} characters")
        return text


def _in_parts(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _as_text(content: Any) -> Any:
    """Join the parts of a message as llama.cpp does (common_chat_msg::to_json_oaicompat)."""
    return "\n".join(part["text"] for part in content) if isinstance(content, list) else content


def _spellings(messages: Messages) -> Iterator[Messages]:
    """Give the messages as templates may want them.

    Clients send the arguments of a tool call as JSON text. Most templates want an object, others
    join them to a string. A message without content has None or an empty text.
    """
    objects = [_with_objects(each) for each in messages]
    yield objects
    if objects != list(messages):
        yield messages
    if any(each.get("content") is None for each in messages):
        for spelling in (objects, messages):
            yield [{**each, "content": each.get("content") or ""} for each in spelling]


def _with_objects(message: Message) -> Message:
    """Return a message with the arguments of its tool calls as objects."""
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        function = call.get("function")
        if isinstance(function, dict) and isinstance(function.get("arguments"), str):
            with contextlib.suppress(ValueError):
                arguments = json.loads(function["arguments"])
                if isinstance(arguments, dict):
                    call = {**call, "function": {**function, "arguments": arguments}}
        calls.append(call)
    return {**message, "tool_calls": calls}


def _prints_objects(messages: Messages, text: str) -> bool:
    """Tell whether a template has printed the arguments of a call as Python prints an object."""
    arguments = [
        call["function"]["arguments"]
        for message in messages
        for call in message.get("tool_calls") or ()
        if isinstance(call.get("function"), dict) and "arguments" in call["function"]
    ]
    return any(isinstance(each, dict) and each and str(each) in text for each in arguments)


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
    one answer may take, each further one the messages and the variables. An answer has a ``text``
    or an ``error``. A system without limits leaves the time to the parent.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles an interrupt
    text, bos, eos, limit_s = json.loads(sys.stdin.readline())
    _limit_memory()
    template: Template | None = None
    for line in sys.stdin:
        _limit_time(limit_s)
        try:
            template = template or Template(text, bos, eos)
            messages, variables = json.loads(line)
            answer = json.dumps({"text": template.render(messages, **variables)})
        except Exception as error:  # see _find_way
            answer = json.dumps({"error": _describe(error)})
        print(answer, flush=True)


def _describe(error: Exception) -> str:
    from jinja2 import TemplateError

    if isinstance(error, MemoryError):
        return f"it needs more than {N_BYTES >> 20} MiB of memory"
    words = " ".join(str(error).split())[:2000]
    if type(error) in (TemplateError, ValueError):
        return words
    place = _line_of(error)
    return f"{type(error).__name__}: {words}" + (f" (line {place} of the template)" * bool(place))


def _line_of(error: Exception) -> int | None:
    """Return the line of the template where an error was raised; jinja2 puts it in the trace.

    An error of its syntax knows its line.
    """
    line: int | None = getattr(error, "lineno", None)
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "<template>":
            line = trace.tb_lineno
        trace = trace.tb_next
    return line


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
