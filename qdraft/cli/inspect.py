"""`qdraft inspect`: what a GGUF file is, and whether two files belong together."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer

from qdraft.cli.options.group import Only, takes_options
from qdraft.cli.options.output import OutputOptions
from qdraft.errors import UsageError
from qdraft.gguf.facts import Facts, read_facts
from qdraft.gguf.pairing import Pairing, relate
from qdraft.llama.chat_template import template_renders
from qdraft.render.console import show_json, table_console
from qdraft.render.inspect import facts_view, pairing_view

Files = Annotated[list[Path], typer.Argument(metavar="FILE...", help="One or two GGUF files.")]


@takes_options
def inspect(files: Files, output: Annotated[OutputOptions, Only("as_json")]) -> None:
    """Show what a GGUF file is, and whether two files are one model.

    qdraft reads the headers, and a few rows of the weights if two files have the same shape.
    """
    if len(files) > 2:
        raise UsageError(f"qdraft inspect takes one or two files, not {len(files)}")
    facts = [read_facts(path) for path in files]
    pairing = relate(*facts) if len(facts) == 2 else None
    renders = [
        template_renders(each.chat_template) if each.chat_template else None for each in facts
    ]
    if output.as_json:
        show_json(_report(facts, renders, pairing))
        return
    console = table_console()
    for each, works in zip(facts, renders, strict=True):
        console.print(facts_view(each, works))
    if pairing:
        console.print(pairing_view(pairing))


def _report(
    facts: list[Facts], renders: list[bool | None], pairing: Pairing | None
) -> dict[str, Any]:
    files = [
        {**dataclasses.asdict(each), "chat_template_renders": works}
        for each, works in zip(facts, renders, strict=True)
    ]
    if pairing is None:
        return {"files": files}
    related = dataclasses.asdict(pairing)
    return {"files": files, "verdict": related.pop("relation"), **related}
