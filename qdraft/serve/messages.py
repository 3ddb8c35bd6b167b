"""The messages of a chat, as OpenAI's clients send them: checked, with the text of their parts."""

from __future__ import annotations

from typing import Any

from qdraft.serve.errors import ApiError, invalid
from qdraft.serve.fields import Fields

# By the role in the request: the role that chat templates know.
_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}


def read_messages(fields: Fields) -> tuple[dict[str, Any], ...]:
    """Return the messages with text as content. Raises ApiError, which names the part."""
    messages = fields.items("messages")
    if not messages:
        raise invalid("messages is missing or empty", "messages")
    return tuple(_read_message(each, f"messages.{i}") for i, each in enumerate(messages))


def _read_message(message: object, where: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise invalid(f"{where} must be an object", where)
    fields = Fields(message, where)
    role = fields.text("role")
    if role not in _ROLES:
        raise fields.wrong("role", f"one of {', '.join(_ROLES)}")
    calls = fields.items("tool_calls")
    content = _read_content(fields)
    if content is None and not (role == "assistant" and calls):
        raise invalid(f"{where} has no content", fields.path("content"))
    read: dict[str, Any] = {"role": _ROLES[role], "content": content or ""}
    if role == "assistant":
        reasoning = fields.text("reasoning_content") or fields.text("reasoning")
        if reasoning:
            read["reasoning_content"] = reasoning
        if calls:
            read["tool_calls"] = [
                _read_call(each, f"{where}.tool_calls.{i}") for i, each in enumerate(calls)
            ]
    for name in ("name", "tool_call_id"):
        if value := fields.text(name):
            read[name] = value
    return read


def _read_content(fields: Fields) -> str | None:
    """Return the text of a content: a string, or a list of parts."""
    content = fields.raw("content")
    if content is None:
        return None
    if isinstance(content, list):
        path = fields.path("content")
        return "\n".join(_read_part(part, f"{path}.{i}") for i, part in enumerate(content))
    if not isinstance(content, str):
        raise fields.wrong("content", "a string or a list of parts")
    return fields.text("content")


def _read_part(part: object, where: str) -> str:
    fields = Fields(part if isinstance(part, dict) else {}, where)
    kind = fields.text("type")
    if kind == "text" or (kind is None and "text" in fields):
        return fields.text("text") or ""
    if kind == "refusal":
        return fields.text("refusal") or ""
    raise _not_text(kind, where)


def _not_text(kind: str | None, where: str) -> ApiError:
    what = f"of type {kind}" if kind else "without a type"
    return invalid(f"{where} is a part {what}, but qdraft reads text alone", where)


def _read_call(call: object, where: str) -> dict[str, Any]:
    """Return a call of an earlier turn, as templates want it."""
    fields = Fields(call if isinstance(call, dict) else {}, where)
    function = Fields(fields.mapping("function") or {}, f"{where}.function")
    name = function.text("name")
    if not name:
        raise invalid(f"{where}.function.name is missing", f"{where}.function.name")
    arguments = function.raw("arguments")
    return {
        "id": fields.text("id") or "",
        "type": "function",
        "function": {"name": name, "arguments": "{}" if arguments is None else arguments},
    }
