"""The YAML of models.yaml as nodes, and the few values that an entry may hold.

qdraft reads the nodes itself. It never builds what a file describes, such as nested aliases, dates
or numbers of a million digits, so every file takes time and memory by its size only. The nodes also
know their places in the text, which edits need.
"""

from __future__ import annotations

from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode
from ruamel.yaml.scanner import Scanner

from qdraft.errors import UsageError
from qdraft.text_file import require_unicode

Scalar = str | int | float | bool | None
Items = dict[str, tuple[Any, Any]]  # the key and the value as nodes, by the text of the key

_TAG = "tag:yaml.org,2002:"
_MAX_DEPTH = 64  # of brackets: an entry has three levels
_MAX_DIGITS = 30  # of a number: no setting is larger


class _TooDeep(Exception):
    """More brackets are open than any entry needs."""


class _Scanner(Scanner):
    """Refuses deep brackets, which take time by the square of their number."""

    def fetch_flow_collection_start(self, TokenClass: Any, to_push: str) -> None:
        if self.flow_level > _MAX_DEPTH:
            raise _TooDeep
        super().fetch_flow_collection_start(TokenClass, to_push)


def compose(text: str, where: str) -> Node | None:
    """Return the root of the text; None if it is empty. Raises UsageError for invalid YAML."""
    try:
        yaml = YAML(typ="safe", pure=True)
        yaml.Scanner = _Scanner
        yaml.composer.warn_double_anchors = False
        root: Node | None = yaml.compose(text)
    except (RecursionError, _TooDeep):
        raise UsageError(f"{where} is not a list of pairs: it is nested too deeply") from None
    except YAMLError as error:
        why = " ".join(str(error).split())[:400]
        raise UsageError(f"{where} is not valid YAML: {why}") from error
    except Exception as error:  # the parser's own mistakes: "\U99999999" is a ValueError
        raise UsageError(f"{where} is not valid YAML: {error}") from error
    return root


def is_null(node: Node | None) -> bool:
    return node is None or (isinstance(node, ScalarNode) and str(node.tag) == f"{_TAG}null")


def is_merge(key: Node) -> bool:
    """Tell whether a key is ``<<``, which takes the keys of other mappings."""
    return isinstance(key, ScalarNode) and str(key.tag) == f"{_TAG}merge"


def read_items(node: Node | None, where: str) -> Items:
    """Return keys and values of a mapping, with those that ``<<`` takes from other mappings.

    Raises UsageError if the node is not a mapping, or if a key is not text or is there twice.
    """
    items: Items = {}
    waiting: list[Any] = [node]
    visited = {id(node)}
    while waiting:
        mapping = waiting.pop()
        own: Items = {}
        merged: list[Node] = []
        if not isinstance(mapping, MappingNode) or str(mapping.tag) != f"{_TAG}map":
            place = f"line {line_of(mapping)}"
            raise UsageError(f"{where}: {place} must be a mapping of keys to values")
        for key, value in mapping.value:
            if is_merge(key):
                merged += value.value if isinstance(value, SequenceNode) else [value]
                continue
            name = _read_key(key, where)
            if name in own:
                raise UsageError(f"{where}: the key {name} is there twice (line {line_of(key)})")
            own[name] = key, value
        items = {**own, **items}
        # The first mapping that has a key wins, and each needs to be taken once only.
        fresh = [each for each in merged if id(each) not in visited]
        visited |= {id(each) for each in fresh}
        waiting += reversed(fresh)
    return items


def _read_key(key: Node, where: str) -> str:
    if not isinstance(key, ScalarNode):
        raise UsageError(f"{where}: the key in line {line_of(key)} must be text")
    return key.value if len(key.value) <= 250 else f"{key.value[:250]}..."


def read_list(node: Node, where: str) -> list[Node]:
    """Return the nodes of a list. Raises UsageError if the node is none."""
    if not isinstance(node, SequenceNode):
        raise UsageError(f"{where} must be a list")
    return list(node.value)


def read_scalar(node: Node, where: str) -> Scalar:
    """Return the text, number or truth value of a node; None for an empty one.

    Raises UsageError, in which ``where`` names the key, for everything else.
    """
    if not isinstance(node, ScalarNode):
        raise UsageError(f"{where} (line {line_of(node)}) must be text or a number, not a list")
    kind, text = str(node.tag).removeprefix(_TAG), str(node.value)
    if kind == "str":
        if "\0" in text:
            raise UsageError(f"{where} (line {line_of(node)}) holds a null character")
        require_unicode(text, f"{where} (line {line_of(node)})")
        return text
    if kind == "null":
        return None
    if kind == "bool" and text.lower() in _TRUTHS:
        return _TRUTHS[text.lower()]
    if kind in ("int", "float") and len(text) <= _MAX_DIGITS:
        try:
            return _read_int(text) if kind == "int" else _read_float(text)
        except ValueError:
            pass
    raise UsageError(
        f"{where} (line {line_of(node)}) must be text or a number, not {shorten(text)}",
        hint="put text that looks like a date or a number in quotes",
    )


_TRUTHS = {
    **dict.fromkeys(("true", "yes", "on"), True),
    **dict.fromkeys(("false", "no", "off"), False),
}


def _read_int(text: str) -> int:
    digits = text.replace("_", "")
    return int(digits, 0 if digits.lstrip("+-")[:2].lower() in ("0x", "0o", "0b") else 10)


def _read_float(text: str) -> float:
    digits = text.replace("_", "").lower()
    return float(digits.replace(".inf", "inf").replace(".nan", "nan"))


def shorten(text: str) -> str:
    """Return the start of a text for a message, in quotes."""
    return repr(text if len(text) <= 60 else f"{text[:60]}...")


def line_of(node: Node) -> int:
    """Return the line in which a node starts, from 1 on."""
    return int(node.start_mark.line) + 1
