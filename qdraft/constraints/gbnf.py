"""GBNF, llama.cpp's grammar format: read, and written again for llguidance.

llguidance reads a text as lexemes, each as long as it can be, and GBNF knows no lexemes. So a
grammar without recursion becomes one regex, and any other becomes rules over single characters:
then the longest lexeme is the only one, and both accept the same texts.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from qdraft.errors import ParameterError

_MOST_REPEATS = 2000  # as in llama.cpp
_LONGEST_REGEX = 20_000  # characters; a longer regex becomes rules
_LAST = 0x10FFFF
_NAME = frozenset(string.ascii_letters + string.digits + "-_")
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "\\": "\\", '"': '"', "[": "[", "]": "]"}
_HEX = {"x": 2, "u": 4, "U": 8}


@dataclass(frozen=True, slots=True)
class Characters:
    """One character of some ranges, or one of none of them."""

    ranges: tuple[tuple[int, int], ...]
    negated: bool = False

    @property
    def regex(self) -> str:
        parts = "".join(rf"\x{{{low:x}}}-\x{{{high:x}}}" for low, high in self.ranges)
        return f"[{'^' if self.negated else ''}{parts}]"


@dataclass(frozen=True, slots=True)
class Reference:
    """Another rule; ``place`` is where it is named."""

    name: str
    place: int


@dataclass(frozen=True, slots=True)
class Repeat:
    """``node`` from ``least`` to ``most`` times; None: without a limit."""

    node: Node
    least: int
    most: int | None


@dataclass(frozen=True, slots=True)
class Sequence:
    nodes: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    nodes: tuple[Node, ...]


Node = Characters | Reference | Repeat | Sequence | Choice


def to_llguidance(text: str, name: str = "grammar") -> tuple[str, str]:
    """Return "regex" or "lark", and the grammar in that form.

    Raises ParameterError, with line and column, for a mistake in the grammar.
    """
    rules = _Parser(text, name).read_rules()
    regex = _Regexes(rules).of_rule("root")
    return ("regex", regex) if regex is not None else ("lark", _to_lark(rules))


class _Parser:
    """Reads rules; ``place`` is the index of the next character."""

    def __init__(self, text: str, name: str) -> None:
        self._text = text
        self._name = name
        self._place = 0

    def read_rules(self) -> dict[str, Node]:
        """Return all rules by name. Raises ParameterError."""
        rules: dict[str, Node] = {}
        self._skip_space(newlines=True)
        while self._place < len(self._text):
            start = self._place
            name = self._read_name("the name of a rule")
            if name in rules:
                raise self._mistake(f"the rule {name} is defined twice", start)
            self._skip_space()
            self._expect("::=", f"after {name}")
            self._skip_space(newlines=True)
            rules[name] = self._read_choice(nested=False)
            if self._place < len(self._text) and self._peek() not in "\r\n":
                raise self._mistake(f"{self._peek()!r} cannot stand here")
            self._skip_space(newlines=True)
        self._require_rules(rules)
        return rules

    def _require_rules(self, rules: Mapping[str, Node]) -> None:
        """Raise ParameterError unless ``root`` and each rule that is named exist."""
        if "root" not in rules:
            raise ParameterError(
                f"{self._name} has no rule root",
                hint='name the rule that the whole text must match root, as in root ::= "yes"',
            )
        for node in rules.values():
            for reference in _references(node):
                if reference.name not in rules:
                    raise self._mistake(
                        f"the rule {reference.name} is not defined", reference.place
                    )

    def _read_choice(self, *, nested: bool) -> Node:
        nodes = [self._read_sequence(nested=nested)]
        while self._peek() == "|":
            self._place += 1
            self._skip_space(newlines=True)
            nodes.append(self._read_sequence(nested=nested))
        return nodes[0] if len(nodes) == 1 else Choice(tuple(nodes))

    def _read_sequence(self, *, nested: bool) -> Node:
        nodes: list[Node] = []
        while node := self._read_item():
            self._skip_space(newlines=nested)
            while self._peek() in ("*", "+", "?", "{"):
                node = self._read_repeat(node)
                self._skip_space(newlines=nested)
            nodes.append(node)
        if self._peek() in ("*", "+", "?", "{"):
            raise self._mistake(f"there is nothing before {self._peek()!r} to repeat")
        return nodes[0] if len(nodes) == 1 else Sequence(tuple(nodes))

    def _read_item(self) -> Node | None:
        """Return the next item of a sequence; None at its end."""
        start, character = self._place, self._peek()
        if character in _NAME:
            return Reference(self._read_name("the name of a rule"), start)
        if character in ("<", "!"):
            raise self._mistake("qdraft does not know tokens in a grammar")
        if character == ".":
            self._place += 1
            return Characters(((0, _LAST),))
        readers: dict[str, Callable[[], Node]] = {
            '"': self._read_literal,
            "[": self._read_class,
            "(": self._read_group,
        }
        return readers[character]() if character in readers else None

    def _read_literal(self) -> Node:
        start = self._place
        self._place += 1
        nodes: list[Node] = []
        while self._peek() != '"':
            code = self._read_character(start, "literal")
            nodes.append(Characters(((code, code),)))
        self._place += 1
        return nodes[0] if len(nodes) == 1 else Sequence(tuple(nodes))

    def _read_class(self) -> Node:
        start = self._place
        self._place += 1
        negated = self._peek() == "^"
        self._place += negated
        ranges: list[tuple[int, int]] = []
        while self._peek() != "]":
            low = high = self._read_character(start, "class")
            if self._peek() == "-" and self._peek(1) != "]":
                self._place += 1
                high = self._read_character(start, "class")
            if high < low:
                raise self._mistake("a range of characters ends before it begins", start)
            ranges.append((low, high))
        self._place += 1
        if not ranges:
            raise self._mistake("a class of characters is empty", start)
        return Characters(tuple(ranges), negated)

    def _read_group(self) -> Node:
        start = self._place
        self._place += 1
        self._skip_space(newlines=True)
        node = self._read_choice(nested=True)
        if self._peek() != ")":
            what = f"{self._peek()!r} cannot stand here" if self._peek() else "the ( has no )"
            raise self._mistake(what, self._place if self._peek() else start)
        self._place += 1
        return node

    def _read_repeat(self, node: Node) -> Node:
        sign = self._peek()
        start = self._place
        self._place += 1
        if sign != "{":
            return Repeat(node, int(sign == "+"), 1 if sign == "?" else None)
        self._skip_space()
        least = most = self._read_number()
        self._skip_space()
        limit: int | None = most
        if self._peek() == ",":
            self._place += 1
            self._skip_space()
            limit = self._read_number() if self._peek() in string.digits and self._peek() else None
            self._skip_space()
        self._expect("}", "after the number of repetitions")
        if least > _MOST_REPEATS or (limit or 0) > _MOST_REPEATS:
            raise self._mistake(f"more than {_MOST_REPEATS} repetitions", start)
        if limit is not None and limit < least:
            raise self._mistake("the most repetitions are fewer than the least", start)
        return Repeat(node, least, limit)

    def _read_number(self) -> int:
        start = self._place
        while self._peek() and self._peek() in string.digits:
            self._place += 1
        if start == self._place:
            raise self._mistake("a number of repetitions is missing")
        return int(self._text[start : self._place])

    def _read_name(self, what: str) -> str:
        start = self._place
        while self._peek() in _NAME:
            self._place += 1
        if start == self._place:
            raise self._mistake(f"{what} is missing")
        return self._text[start : self._place]

    def _read_character(self, start: int, what: str) -> int:
        """Return the code of the next character or escape of a literal or a class."""
        character, escaped = self._peek(), self._peek(1)
        if not character or (character == "\\" and not escaped):
            raise self._mistake(f"a {what} has no end", start)
        if character != "\\":
            self._place += 1
            return ord(character)
        if escaped in _ESCAPES:
            self._place += 2
            return ord(_ESCAPES[escaped])
        n_digits = _HEX.get(escaped, 0)
        digits = self._text[self._place + 2 : self._place + 2 + n_digits]
        is_code = len(digits) == n_digits and all(c in string.hexdigits for c in digits)
        if not n_digits or not is_code or int(digits, 16) > _LAST:
            raise self._mistake(f"the escape \\{escaped} is not valid")
        self._place += 2 + n_digits
        return int(digits, 16)

    def _peek(self, ahead: int = 0) -> str:
        """Return the next character; empty at the end."""
        return self._text[self._place + ahead : self._place + ahead + 1]

    def _expect(self, sign: str, where: str) -> None:
        if not self._text.startswith(sign, self._place):
            raise self._mistake(f"{sign} is missing {where}")
        self._place += len(sign)

    def _skip_space(self, *, newlines: bool = False) -> None:
        while character := self._peek():
            if character == "#":
                while self._peek() and self._peek() not in "\r\n":
                    self._place += 1
            elif character in " \t" or (newlines and character in "\r\n"):
                self._place += 1
            else:
                return

    def _mistake(self, what: str, place: int | None = None) -> ParameterError:
        before = self._text[: self._place if place is None else place]
        line, column = before.count("\n") + 1, len(before) - before.rfind("\n")
        return ParameterError(f"{self._name}, line {line}, column {column}: {what}")


def _references(node: Node) -> list[Reference]:
    """Return all references within a node."""
    if isinstance(node, Reference):
        return [node]
    if isinstance(node, Repeat):
        return _references(node.node)
    if isinstance(node, Characters):
        return []
    return [reference for each in node.nodes for reference in _references(each)]


class _Regexes:
    """Writes rules as regexes; None for one that refers to itself, or is too long."""

    def __init__(self, rules: Mapping[str, Node]) -> None:
        self._rules = rules
        self._known: dict[str, str | None] = {}

    def of_rule(self, name: str) -> str | None:
        if name not in self._known:
            self._known[name] = None  # what a rule finds that is asked for within itself
            regex = self._of(self._rules[name])
            too_long = regex is not None and len(regex) > _LONGEST_REGEX
            self._known[name] = None if too_long else regex
        return self._known[name]

    def _of(self, node: Node) -> str | None:
        if isinstance(node, Characters):
            return node.regex
        if isinstance(node, Reference):
            return self.of_rule(node.name)
        if isinstance(node, Repeat):
            inner = self._of(node.node)
            return None if inner is None else f"(?:{inner}){_times(node)}"
        parts: list[str] = []
        for each in node.nodes:
            part = self._of(each)
            if part is None:
                return None
            parts.append(part)
        return f"(?:{'|'.join(parts)})" if isinstance(node, Choice) else "".join(parts)


def _to_lark(rules: Mapping[str, Node]) -> str:
    """Write rules in Lark's form, over single characters; rules are numbered from the root on."""
    order = ["root", *(name for name in rules if name != "root")]
    names = {name: f"r{number}" for number, name in enumerate(order)}
    lines = ["%llguidance {}", "start: r0"]

    def write(node: Node) -> str:
        if isinstance(node, Characters):
            return f"/{node.regex}/"
        if isinstance(node, Reference):
            return names[node.name]
        if isinstance(node, Repeat):
            return f"({write(node.node)}){_times(node)}"
        if not node.nodes:
            return '""'
        return f"({(' | ' if isinstance(node, Choice) else ' ').join(map(write, node.nodes))})"

    lines += [f"{names[name]}: {write(rules[name])}" for name in order]
    return "\n".join(lines) + "\n"


def _times(node: Repeat) -> str:
    if node.most == node.least:
        return f"{{{node.least}}}"
    return f"{{{node.least},{'' if node.most is None else node.most}}}"
