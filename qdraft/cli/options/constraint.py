"""What the text must match: a JSON schema, a grammar or a regex."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from qdraft.cli.options.group import Group, option
from qdraft.cli.options.text import read_text_file
from qdraft.constraints.grammar import compile_grammar
from qdraft.decoding.constraint import ConstraintSpec
from qdraft.errors import UsageError

_PANEL = "Constraint"


@dataclass(frozen=True, kw_only=True)
class ConstraintOptions(Group):
    """What the text must match."""

    json_schema: Annotated[
        str | None,
        option(
            _PANEL,
            "-j",
            "--json-schema",
            help="Generate JSON that a schema allows: the schema itself, or a file with it.",
        ),
    ] = None
    json_object: Annotated[
        bool, option(_PANEL, "--json-object", help="Generate any JSON object.")
    ] = False
    grammar: Annotated[
        str | None,
        option(_PANEL, "--grammar", help="Generate what this grammar in GBNF allows."),
    ] = None
    grammar_file: Annotated[
        str | None,
        option(_PANEL, "--grammar-file", help="Read the grammar from this file."),
    ] = None
    regex: Annotated[
        str | None,
        option(_PANEL, "--regex", help="Generate a text that this regex matches as a whole."),
    ] = None

    def read(self, *, ignores_eos: bool = False) -> ConstraintSpec | None:
        """Return what the text must match; None if no option asks for anything.

        Raises UsageError for two of them, for a mistake in what they say, or if the text must not
        end (``ignores_eos``).
        """
        specs = list(self._specs())
        if not specs:
            return None
        options = [spec.name.split()[0] for spec in specs]
        if len(options) > 1:
            raise UsageError(f"{options[1]} cannot be combined with {options[0]}")
        if ignores_eos:
            raise UsageError(f"--ignore-eos cannot be combined with {options[0]}")
        compile_grammar(specs[0])
        return specs[0]

    def _specs(self) -> Iterator[ConstraintSpec]:
        if self.json_schema is not None:
            yield _read_schema(self.json_schema)
        if self.json_object:
            yield ConstraintSpec("json_object", name="--json-object")
        if self.grammar is not None:
            yield ConstraintSpec("grammar", self.grammar, "--grammar")
        if (file := self.grammar_file) is not None:
            yield ConstraintSpec("grammar", read_text_file(Path(file)), f"--grammar-file {file}")
        if self.regex is not None:
            yield ConstraintSpec("regex", self.regex, "--regex")


def _read_schema(value: str) -> ConstraintSpec:
    """Return a schema, or that of a file: a schema is a JSON object or a boolean."""
    if value.lstrip()[:1] in ("{", "[", '"') or value.strip() in ("true", "false"):
        return ConstraintSpec("json_schema", value, "--json-schema")
    return ConstraintSpec("json_schema", read_text_file(Path(value)), f"--json-schema {value}")
