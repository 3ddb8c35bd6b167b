"""`qdraft inspect`: what a GGUF file is, and whether two of them belong together."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer

from qdraft.cli import options as opt
from qdraft.errors import UsageError
from qdraft.gguf.facts import Facts, read_facts
from qdraft.gguf.pairing import Pairing, compare
from qdraft.gguf.template import template_renders
from qdraft.render.console import show_json, table_console
from qdraft.render.inspect import facts_view, pairing_view

Files = Annotated[list[Path], typer.Argument(metavar="FILE...", help="One GGUF file, or two.")]


def inspect(files: Files, as_json: opt.Json = False) -> None:
    """Show what a GGUF file really is; of two files also whether they are one model.

    Reads headers, and a few rows of the weights of two files of the same shape.
    """
    if len(files) > 2:
        raise UsageError(f"one or two files can be inspected, not {len(files)}")
    facts = [read_facts(path) for path in files]
    pairing = compare(*facts) if len(facts) == 2 else None
    renders = [template_renders(f.chat_template) if f.chat_template else None for f in facts]
    if as_json:
        show_json(_report(facts, renders, pairing))
        return
    out = table_console()
    for one, works in zip(facts, renders, strict=True):
        out.print(facts_view(one, works))
    if pairing:
        out.print(pairing_view(pairing))


def _report(
    facts: list[Facts], renders: list[bool | None], pairing: Pairing | None
) -> dict[str, Any]:
    files = [
        {**dataclasses.asdict(one), "chat_template_renders": works}
        for one, works in zip(facts, renders, strict=True)
    ]
    return {"files": files, **(dataclasses.asdict(pairing) if pairing else {})}
