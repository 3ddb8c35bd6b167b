"""The form that a request holds its answer to: a JSON schema, a grammar, or the call of a tool."""

from __future__ import annotations

import json
from collections.abc import Sequence

from qdraft.constraints.grammar import compile_grammar
from qdraft.decoding.constraint import ConstraintSpec
from qdraft.errors import ParameterError, UsageError
from qdraft.serve.errors import invalid, not_supported
from qdraft.serve.fields import Fields
from qdraft.serve.tools import AUTO, Json, call_schema

_FORMAT = "response_format"


def read_form(
    fields: Fields, tools: Sequence[Json] = (), choice: str = AUTO
) -> ConstraintSpec | None:
    """Return the constraint of a request, None if it has none.

    ``tools`` and ``choice`` are those of ``read_tools``. Raises ApiError for more than one form, or
    for a mistake in it, and for any without the package that forms need.
    """
    try:
        form = _read_one(fields, tools, choice)
    except RecursionError as error:
        raise invalid("the schema is nested too deep") from error
    if form is None:
        return None
    if fields.flag("ignore_eos"):
        raise invalid(f"ignore_eos cannot be combined with {form.name}", "ignore_eos")
    try:
        compile_grammar(form)
    except ParameterError as error:
        raise invalid(str(error), form.name) from error
    except UsageError as error:
        raise not_supported(f"{error}: {error.hint}", form.name) from error
    return form


def _read_one(fields: Fields, tools: Sequence[Json], choice: str) -> ConstraintSpec | None:
    """Return the form of a request, unchecked. Raises ApiError for more than one."""
    forms = [form for form in (_read_format(fields), *_read_native(fields)) if form]
    if tools and choice != AUTO:
        schema = json.dumps(call_schema(tools, choice))
        forms.append(ConstraintSpec("json_schema", schema, "tool_choice"))
    if not forms:
        return None
    first, *others = forms
    if others:
        raise invalid(f"{others[0].name} cannot be combined with {first.name}", others[0].name)
    return first


def _read_format(fields: Fields) -> ConstraintSpec | None:
    """Return the form that OpenAI's field asks for."""
    form = Fields(fields.mapping(_FORMAT) or {}, _FORMAT)
    kind = form.text("type")
    if kind in (None, "text"):
        return None
    if kind == "json_object":
        schema = form.mapping("schema")  # as llama-server has it
        if schema is None:
            return ConstraintSpec("json_object", name=_FORMAT)
        return ConstraintSpec("json_schema", json.dumps(schema), _FORMAT)
    if kind != "json_schema":
        raise fields.wrong(_FORMAT, "of type text, json_object or json_schema")
    schema = Fields(form.mapping("json_schema") or {}, f"{_FORMAT}.json_schema").mapping("schema")
    if schema is None:
        raise invalid(f"{_FORMAT}.json_schema.schema is missing", _FORMAT)
    return ConstraintSpec("json_schema", json.dumps(schema), _FORMAT)


def _read_native(fields: Fields) -> list[ConstraintSpec]:
    """Return the forms that llama-server's own fields ask for."""
    forms = []
    if grammar := fields.text("grammar"):
        forms.append(ConstraintSpec("grammar", grammar, "grammar"))
    if (schema := fields.mapping("json_schema")) is not None:
        forms.append(ConstraintSpec("json_schema", json.dumps(schema), "json_schema"))
    return forms
