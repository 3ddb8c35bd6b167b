"""From what a user asks for to a grammar that llguidance reads, or to a line that says why not."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from typing import Any

from qdraft.constraints.gbnf import to_llguidance
from qdraft.constraints.library import llguidance
from qdraft.decoding.constraint import ConstraintSpec
from qdraft.errors import ParameterError

log = logging.getLogger(__name__)

# One line, with the spaces of Python's json.dumps: whitespace without a bound may never end.
_LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_REGEX_MISTAKE = re.compile(r"regex parse error:\n {4}.*\n {4}( *)\^.*\nerror: (.*)")
_IN_REGEX = re.compile(r"\(in regex\): (.*?)(?: in regex /|\n|$)")
_NAMED = ("$defs", "definitions", "properties", "patternProperties", "dependentSchemas")
_LISTED = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE = ("items", "additionalProperties", "not", "contains", "propertyNames")


def compile_grammar(spec: ConstraintSpec) -> str:
    """Return the grammar of a constraint in llguidance's form, which needs no vocabulary.

    Raises ParameterError, with the place, for a mistake in a schema, a grammar or a regex, and
    UsageError without llguidance.
    """
    matcher = llguidance().LLMatcher
    if spec.kind == "regex":
        grammar = matcher.grammar_from_regex(spec.text)
    elif spec.kind == "grammar":
        form, text = to_llguidance(spec.text, spec.called)
        grammar = matcher.grammar_from_regex(text) if form == "regex" else text
    else:
        schema = {"type": "object"} if spec.kind == "json_object" else _read_schema(spec)
        grammar = _of_whole_schema(schema, spec.called)
        if mistake := _problem(grammar):
            pointer, mistake = _locate(schema, schema, "", mistake)
            raise ParameterError(f"{spec.called}, at {pointer or 'the root'}: {mistake}")
    if mistake := _problem(grammar):
        place = ", " if mistake.startswith("column") else ": "
        raise ParameterError(f"{spec.called}{place}{mistake}")
    return str(grammar)


def _read_schema(spec: ConstraintSpec) -> Any:
    """Return the JSON value of a schema. Raises ParameterError."""
    try:
        schema = json.loads(spec.text)
    except json.JSONDecodeError as error:
        mistake = error.msg[:1].lower() + error.msg[1:]
        raise ParameterError(
            f"{spec.called}, line {error.lineno}, column {error.colno}: {mistake}",
            hint="a schema is JSON; a name or path is read as a file if that file exists",
        ) from error
    if not isinstance(schema, (dict, bool)):
        raise ParameterError(f"{spec.called} must be a JSON object or a boolean")
    if isinstance(schema, dict) and "x-guidance" in schema:
        raise ParameterError(f"{spec.called} has x-guidance, which qdraft sets itself")
    return schema


def _of_schema(schema: Any) -> str:
    text = json.dumps(schema)
    return str(llguidance().LLMatcher.grammar_from_json_schema(text, overrides=_LAYOUT))


def _of_whole_schema(schema: Any, called: str) -> str:
    """Return the grammar. Raises ParameterError for JSON that llguidance cannot read."""
    try:
        return _of_schema(schema)
    except ValueError as error:
        raise ParameterError(f"{called}: llguidance cannot read the schema: {error}") from error
    except RecursionError as error:
        raise ParameterError(f"{called} is nested too deep") from error


def _problem(grammar: str) -> str:
    """Return one line on what is wrong with a grammar; empty if nothing is."""
    is_error, messages = llguidance().LLMatcher.validate_grammar_with_warnings(grammar)
    if not is_error:
        for message in messages:
            log.warning("constraint: %s", _one_line(message))
        return ""
    return _one_line(messages[0])


def _one_line(message: str) -> str:
    if match := _REGEX_MISTAKE.search(message):
        return f"column {len(match[1]) + 1}: {match[2]}"
    if match := _IN_REGEX.search(message):
        return match[1].replace(";", ":")
    first = message.strip().splitlines()[0] if message.strip() else "llguidance refuses it"
    return first[:1].lower() + first[1:]


def _locate(schema: Any, root: Any, pointer: str, mistake: str) -> tuple[str, str]:
    """Return the pointer to the smallest part of a schema that has a mistake, and the mistake."""
    for name, part in _parts(schema):
        shared = {key: root[key] for key in ("$defs", "definitions") if key in root}
        alone = {**shared, **part} if isinstance(part, dict) and name[:1] != "$" else part
        if inner := _problem(_of_schema(alone)):
            return _locate(part, root, f"{pointer}/{name}", inner)
    return pointer, mistake


def _parts(schema: Any) -> Iterator[tuple[str, Any]]:
    """Give the schemas within a schema, each with its pointer from there."""
    if not isinstance(schema, dict):
        return
    for key in _NAMED:
        named = schema.get(key)
        for name, part in named.items() if isinstance(named, dict) else ():
            yield f"{key}/{name}", part
    for key in _LISTED:
        listed = schema.get(key)
        for i, part in enumerate(listed if isinstance(listed, list) else ()):
            yield f"{key}/{i}", part
    for key in _SINGLE:
        if isinstance(schema.get(key), dict):
            yield key, schema[key]
