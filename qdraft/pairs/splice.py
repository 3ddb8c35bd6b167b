"""Single keys of a YAML text set or cut, by their places in it; all else stays byte for byte.

A file may be written in ways that this module does not know. Its caller reads the result, and
compares it with what it should say.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from ruamel.yaml.nodes import CollectionNode, MappingNode, Node, ScalarNode

from qdraft.pairs.document import is_merge

_BREAK = re.compile("\r\n|[\n\r\x85\u2028\u2029]")
_ALIAS = re.compile(r"\s*:\s*\*[^\s,\[\]{}]+")
_COLON = re.compile(r"[ \t]*:")
_COMMENT_LINE = re.compile("( *)#[^\n\r\x85\u2028\u2029]*")
_COMMENT = re.compile(r"[ \t]+#.*")
# Text that needs no quotes, also between braces and in YAML 1.1.
_PLAIN = re.compile(r"[A-Za-z/][\w./+()-]*( [\w./+()-]+)*", re.ASCII)
_WORDS = {"true", "false", "yes", "no", "on", "off", "null", "y", "n"}
# What JSON leaves as it is and YAML's readers refuse or take for the end of a line.
_UNUSUAL = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]")


def set_key(text: str, mapping: Node, key: str, value: Any) -> str:
    """Return the text with this key of the mapping set, behind its last one if it is new."""
    assert isinstance(mapping, MappingNode)
    if mapping.flow_style:
        return _set_in_braces(text, mapping, f"{_quote(key)}: {_render_inline(value)}", key)
    pair = _find(mapping, key)
    own, own_value = pair or mapping.value[-1]
    start, end = (
        _start_of_line(text, own),
        _end_of_item(text, own, own_value, with_comments=not pair),
    )
    new = render_key(key, value, _indent_of(text, own))
    if pair and isinstance(value, Mapping):
        head, rest = new.split("\n", 1)
        new = f"{head}{_comment_of(text, own, own_value)}\n{rest}"
    if end == len(text) and not _ends_in_break(text) and not pair:
        new = f"\n{new}"
    line_break = _BREAK.search(text)
    if line_break and line_break[0] == "\r\n":
        new = new.replace("\n", "\r\n")
    return text[: start if pair else end] + new + text[end:]


def cut_key(text: str, mapping: Node | None, key: str) -> str:
    """Return the text without this key of the mapping."""
    assert isinstance(mapping, MappingNode)
    pair = _find(mapping, key)
    if pair is None:  # one that << takes from elsewhere
        return text
    if not mapping.flow_style:
        return text[: _start_of_line(text, pair[0])] + text[_end_of_item(text, *pair) :]
    place = mapping.value.index(pair)
    start, end = pair[0].start_mark.index, _end_in_braces(text, *pair)
    if place + 1 < len(mapping.value):
        end = mapping.value[place + 1][0].start_mark.index
    elif place:
        start = _end_in_braces(text, *mapping.value[place - 1])
    else:
        end = mapping.end_mark.index - 1
    return text[:start] + text[end:]


def render_key(key: str, value: Any, indent: int = 0) -> str:
    """Return the lines of a key and its value: text, a number, a list of mappings, or a mapping."""
    pad = " " * indent
    if isinstance(value, Mapping) and value:
        rest = "".join(render_key(name, each, indent + 2) for name, each in value.items())
        return f"{pad}{_quote(key)}:\n{rest}"
    if isinstance(value, list):
        rest = "".join(f"{pad}  - {_render_inline(each)}\n" for each in value)
        return f"{pad}{_quote(key)}:\n{rest}"
    return f"{pad}{_quote(key)}: {_render_inline(value)}\n"


def _render_inline(value: Any) -> str:
    if isinstance(value, Mapping):
        items = (f"{_quote(key)}: {_render_inline(each)}" for key, each in value.items())
        return f"{{{', '.join(items)}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_render_inline, value))}]"
    return _quote(value) if isinstance(value, str) else _render_number(value)


def _render_number(value: float) -> str:
    return repr(value) if abs(value) < float("inf") else str(value).replace("inf", ".inf")


def _quote(text: str) -> str:
    if _PLAIN.fullmatch(text) and text.lower() not in _WORDS:
        return text
    quoted = json.dumps(text, ensure_ascii=False)
    return _UNUSUAL.sub(lambda match: f"\\u{ord(match[0]):04x}", quoted)


def _set_in_braces(text: str, mapping: MappingNode, new: str, key: str) -> str:
    pair = _find(mapping, key)
    if pair:
        return text[: pair[0].start_mark.index] + new + text[_end_in_braces(text, *pair) :]
    end = mapping.end_mark.index - 1
    start = _end_in_braces(text, *mapping.value[-1]) if mapping.value else end
    between = re.sub(r"(^|\s)#[^\n\r]*", "", text[start:end])
    gap = ", " if mapping.value and "," not in between else ""
    return text[:end] + gap + new + text[end:]


def _find(mapping: MappingNode, key: str) -> tuple[Any, Any] | None:
    """Return the nodes of a key that the mapping has itself."""
    for own, value in mapping.value:
        if isinstance(own, ScalarNode) and own.value == key and not is_merge(own):
            return own, value
    return None


def _start_of_line(text: str, node: Node) -> int:
    start = int(node.start_mark.index)
    return start - int(node.start_mark.column)


def _indent_of(text: str, key: Node) -> int:
    line = text[_start_of_line(text, key) : key.end_mark.index]
    return len(line) - len(line.lstrip(" "))


def _end_of_line(text: str, place: int) -> int:
    match = _BREAK.search(text, place)
    return match.end() if match else len(text)


def _ends_in_break(text: str) -> bool:
    return not text or bool(_BREAK.fullmatch(text[-1]))


def _end_in_braces(text: str, key: Node, value: Node) -> int:
    """Return the place behind a value; that of an alias is elsewhere."""
    if value.start_mark.index >= key.end_mark.index:
        return int(value.end_mark.index)
    match = _ALIAS.match(text, key.end_mark.index)
    return match.end() if match else int(key.end_mark.index)


def _end_of_item(text: str, key: Node, value: Node, *, with_comments: bool = True) -> int:
    """Return the place of the line behind a key of a block and its value.

    Comments right behind it that are indented further than the key belong to it.
    """
    end = _end_of_value(text, key, value)
    if end and not _BREAK.fullmatch(text[end - 1]):
        end = _end_of_line(text, end)
    while with_comments and (match := _COMMENT_LINE.match(text, end)):
        if len(match[1]) <= key.start_mark.column:
            break
        end = _end_of_line(text, end)
    return end


def _end_of_value(text: str, key: Node, value: Node) -> int:
    """Return the place behind the last text of a key's value."""
    if value.start_mark.index < key.end_mark.index:  # an alias, in the line of the key
        return int(key.end_mark.index)
    return _end_of_node(text, value)


def _end_of_node(text: str, node: Node) -> int:
    if isinstance(node, ScalarNode) and node.style in ("|", ">"):
        return _end_of_block_text(text, node)
    if not isinstance(node, CollectionNode) or node.flow_style or not node.value:
        return int(node.end_mark.index)
    if isinstance(node, MappingNode):
        return _end_of_value(text, *node.value[-1])
    is_alias = node.value[-1].start_mark.index < node.start_mark.index
    return int(node.start_mark.index) if is_alias else _end_of_node(text, node.value[-1])


def _end_of_block_text(text: str, value: ScalarNode) -> int:
    """Return the place behind the lines of a text; empty ones count only if it keeps them (+)."""
    start, end = int(value.start_mark.index), int(value.end_mark.index)
    first = text[start : _end_of_line(text, start)].split("#")[0]
    if "+" in first:
        return end
    return start + len(text[start:end].rstrip(" \t\n\r\x85\u2028\u2029"))


def _comment_of(text: str, key: Node, value: Node) -> str:
    """Return the comment in the line of a key."""
    colon = _COLON.match(text, key.end_mark.index)
    in_line = value.start_mark.line == value.end_mark.line == key.start_mark.line
    place = value.end_mark.index if in_line else colon.end() if colon else None
    match = _COMMENT.match(text, place) if place is not None else None
    return match[0].rstrip("\r") if match else ""
