"""Functions that a model may call: those of a request, and the calls in what the model writes."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from qdraft.serve.errors import invalid
from qdraft.serve.fields import Fields
from qdraft.session.text import n_overlap

Json = dict[str, Any]

AUTO, REQUIRED = "auto", "required"
# A call as Qwen, Hermes and many others write it. Calls of other models stay in the content.
START, END = "<tool_call>", "</tool_call>"


def read_tools(fields: Fields) -> tuple[list[Json], str]:
    """Return the tools that the model may call, and AUTO, REQUIRED or the name of one of them.

    Without tools, or with the choice "none", there are none. Raises ApiError.
    """
    tools = [_read_tool(each, f"tools.{i}") for i, each in enumerate(fields.items("tools") or ())]
    choice = fields.raw("tool_choice")
    if isinstance(choice, dict):
        function = Fields(choice, "tool_choice").mapping("function") or {}
        name = Fields(function, "tool_choice.function").text("name")
        if name not in [tool["function"]["name"] for tool in tools]:
            raise invalid(f"tool_choice names {name}, which is not one of the tools", "tool_choice")
        assert name is not None
        if name in (AUTO, REQUIRED):
            raise invalid(f"tool_choice cannot name a tool that is called {name}", "tool_choice")
        return tools, name
    if choice not in (None, "none", AUTO, REQUIRED):
        raise fields.wrong("tool_choice", "none, auto, required, or an object that names a tool")
    if choice == REQUIRED and not tools:
        raise invalid("tool_choice is required, but there are no tools", "tool_choice")
    return ([] if choice == "none" else tools), choice or AUTO


def _read_tool(tool: object, where: str) -> Json:
    fields = Fields(tool if isinstance(tool, dict) else {}, where)
    if fields.text("type") not in (None, "function"):
        raise fields.wrong("type", "function")
    function = fields.mapping("function")
    if function is None:
        raise invalid(f"{where}.function is missing", f"{where}.function")
    own = Fields(function, f"{where}.function")
    if not own.text("name"):
        raise invalid(f"{where}.function.name is missing", f"{where}.function.name")
    own.mapping("parameters")
    return {"type": "function", "function": function}


def call_schema(tools: Sequence[Json], choice: str) -> Json:
    """Return the JSON schema of one call of a tool: of any, or of the one that is chosen."""
    functions = [tool["function"] for tool in tools if choice in (REQUIRED, _name(tool))]
    if len(functions) == 1:
        return _call_of(functions[0], "#")
    return {"anyOf": [_call_of(each, f"#/anyOf/{i}") for i, each in enumerate(functions)]}


def _call_of(function: Json, pointer: str) -> Json:
    """Return the schema of a call that stands at ``pointer``."""
    arguments = function.get("parameters") or {"type": "object"}
    return {
        "type": "object",
        "properties": {
            "name": {"const": function["name"]},
            "arguments": _moved(arguments, f"{pointer}/properties/arguments"),
        },
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _moved(schema: Any, pointer: str) -> Any:
    """Return a schema whose references hold at ``pointer`` of another schema."""
    if isinstance(schema, list):
        return [_moved(each, pointer) for each in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {
        key: value if key in ("const", "enum") else _moved(value, pointer)
        for key, value in schema.items()
    }
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = pointer + reference[1:]
    return moved


def _name(tool: Json) -> str:
    return str(tool["function"]["name"])


class ToolReader:
    """Splits what a model writes into content and calls while it streams.

    Text that may be the beginning of a call is held back until that is certain. What stands between
    the marks but is no call stays in the content. ``n_calls`` counts the calls.
    """

    def __init__(self) -> None:
        self._held = ""
        self.n_calls = 0

    def push(self, text: str) -> list[Json]:
        """Return the deltas that this text releases."""
        text, self._held = self._held + text, ""
        deltas: list[Json] = []
        while (place := text.find(START)) >= 0:
            end = text.find(END, place)
            if end < 0:
                self._held = text[place:]
                return deltas + _content(text[:place].rstrip() if self._held else text[:place])
            call = self._call(text[place + len(START) : end])
            end += len(END)
            before = text[:place].rstrip() if call else text[:end]
            deltas += _content(before) + ([call] if call else [])
            text = text[end:].lstrip() if call else text[end:]
        n_kept = len(text) - n_overlap(text, START)
        self._held = text[n_kept:]
        return deltas + _content(text[:n_kept])

    def flush(self) -> list[Json]:
        """Return what was held back at the end."""
        held, self._held = self._held, ""
        call = self._call(held.removeprefix(START)) if held.startswith(START) else None
        return [call] if call else _content(held)

    def _call(self, text: str) -> Json | None:
        delta = read_call(text, self.n_calls)
        self.n_calls += delta is not None
        return delta


class ForcedReader(ToolReader):
    """Takes all of the text as one call, which a constraint has the model write."""

    def push(self, text: str) -> list[Json]:
        self._held += text
        return []

    def flush(self) -> list[Json]:
        held, self._held = self._held, ""
        call = self._call(held)
        return [call] if call else _content(held)


def read_call(text: str, index: int) -> Json | None:
    """Return the delta for a call in JSON; None if the text is none."""
    try:
        call = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, Mapping) or not isinstance(call.get("name"), str):
        return None
    arguments = call.get("arguments", call.get("parameters", {}))
    function = {
        "name": call["name"],
        "arguments": arguments
        if isinstance(arguments, str)
        else json.dumps(arguments, ensure_ascii=False),
    }
    own = {"index": index, "id": f"call_{secrets.token_hex(12)}", "type": "function"}
    return {"tool_calls": [{**own, "function": function}]}


def _content(text: str) -> list[Json]:
    return [{"content": text}] if text else []
