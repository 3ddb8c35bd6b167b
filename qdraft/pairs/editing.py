"""Editing the user's models.yaml: a pair comes or goes, every other line stays as it is."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap

from qdraft.errors import UsageError
from qdraft.pairs import registry
from qdraft.pairs.registry import Entry, Value
from qdraft.paths import new_file


def add(
    name: str,
    target: Path,
    draft: Path | None,
    *,
    user_file: Path | None = None,
    **notes: str | int,
) -> Path:
    """Add a pair of files to the user's models.yaml, or replace the one of that name.

    The file is whole at every moment; returns its path. ``notes`` may hold a description, a
    license, an origin, a template and a context. Raises UsageError for a file that is not valid,
    which is then left as it is.
    """
    # Not resolved: the hub's cache and people's folders name files by links.
    files = {"target": os.path.abspath(target), "draft": os.path.abspath(draft) if draft else ""}
    return _put(name, {**notes, **files}, user_file)


def set_tuned(
    entry: Entry, tuned: Mapping[str, Value | None], *, user_file: Path | None = None
) -> Path:
    """Write settings for a pair into the user's models.yaml; a shipped pair is copied there.

    They come beside, or in place of, the tuned settings that it has; None takes one away.
    Everything else of the entry stays as it is, but for comments inside it. Raises UsageError
    as ``add`` does.
    """
    path = registry.user_path(user_file)
    own = _parse(path.read_text(encoding="utf-8")).get("pairs") if path.exists() else None
    key = _key(own, entry.name) if own else None
    merged = {k: x for k, x in {**entry.tuned, **tuned}.items() if x is not None}
    if own and key in own:
        return _put(entry.name, {**own[key], "tuned": merged}, user_file)
    told: dict[str, Any] = {
        "description": entry.description, "license": entry.license, "template": entry.template,
        "origin": entry.origin, "target": entry.target, "draft": entry.draft or "",
        "context": entry.context, "devices": dict(entry.devices), "tuned": merged,
    }  # fmt: skip
    if entry.source:
        files = [{"package": f.package, "path": f.path} for f in entry.source.files]
        told["source"] = {
            "extra": entry.source.extra, "sha256": entry.source.sha256, "files": files,
        }  # fmt: skip
    return _put(entry.name, told, user_file)


def _put(name: str, entry: dict[str, Any], user_file: Path | None) -> Path:
    path = registry.user_path(user_file)
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    if text:
        registry.read(path)
    kept = {
        key: value for key, value in entry.items()
        if value not in (None, "", {}) and not (isinstance(value, str) and not value.strip())
    }  # fmt: skip
    _write(path, _with(text, name, kept))
    return path


def remove(name: str, *, user_file: Path | None = None) -> Path:
    """Take a pair out of the user's models.yaml, and the default if it was that one.

    Returns the path of the file. Raises UsageError where the file has no such pair.
    """
    path = registry.user_path(user_file)
    known = registry.read(path) if path.exists() else registry.Registry()
    if name not in known.entries:
        hint = "shipped pairs stay" if name in registry.load(user_file, new=True).entries else None
        raise UsageError(f"{path} has no pair {name}", hint=hint)
    text = _without(path.read_text(encoding="utf-8"), name)
    data = _parse(text)
    if data.get("default") == name:
        lines = text.splitlines(keepends=True)
        del lines[data.lc.key("default")[0]]
        text = "".join(lines)
    _write(path, text)
    return path


def _write(path: Path, text: str) -> None:
    """In place of the file that ``path`` leads to, once it is seen to be valid."""
    with new_file(path.resolve()) as part:
        part.write_text(text, encoding="utf-8")
        registry.read(part)


def _with(text: str, name: str, entry: dict[str, Any]) -> str:
    data = _parse(text)
    pairs = data.get("pairs")
    if not pairs:
        if "pairs" in data:  # there, and empty
            lines = text.splitlines(keepends=True)
            del lines[data.lc.key("pairs")[0]]
            text = "".join(lines)
        gap = "" if not text or text.endswith("\n") else "\n"
        return f"{text}{gap}pairs:\n{_block(name, entry, 2)}"
    if _flow(data):
        pairs[_key(pairs, name)] = entry
        return _dump(data)
    lines = text.splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n"):
        lines[-1] += "\n"
    keys = [str(key) for key in pairs]
    replaced = name in keys
    start, indent = pairs.lc.key(_key(pairs, name) if replaced else list(pairs)[-1])
    end = _end(lines, start, indent)
    lines[start if replaced else end : end] = [_block(name, entry, indent)]
    return "".join(lines)


def _without(text: str, name: str) -> str:
    data = _parse(text)
    pairs = data["pairs"]
    if _flow(data):
        del pairs[_key(pairs, name)]
        return _dump(data)
    lines = text.splitlines(keepends=True)
    start, indent = pairs.lc.key(_key(pairs, name))
    del lines[start : _end(lines, start, indent)]
    return "".join(lines)


def _end(lines: list[str], start: int, indent: int) -> int:
    """The line after an entry: comments and blank lines behind it belong to what follows."""
    end = place = start + 1
    while place < len(lines):
        content = lines[place].strip()
        if content and not content.startswith("#"):
            if len(lines[place]) - len(lines[place].lstrip()) <= indent:
                break
            end = place + 1
        place += 1
    return end


def _key(pairs: CommentedMap, name: str) -> Any:
    """The key as the file has it: names may look like numbers."""
    return next((key for key in pairs if str(key) == name), name)


def _flow(data: CommentedMap) -> bool:
    """True where the pairs stand in braces, which lines cannot be cut out of."""
    return bool(data.fa.flow_style() or data["pairs"].fa.flow_style())


def _block(name: str, entry: dict[str, Any], indent: int) -> str:
    lines = _dump({name: entry}).splitlines(keepends=True)
    return "".join(" " * indent + line for line in lines)


def _parse(text: str) -> CommentedMap:
    data = _yaml().load(text)
    return CommentedMap() if data is None else data


def _dump(data: Any) -> str:
    out = io.StringIO()
    _yaml().dump(data, out)
    return out.getvalue()


def _yaml() -> YAML:
    yaml = YAML()
    yaml.preserve_quotes = True
    yaml.width = 1 << 16  # long paths stay on one line
    return yaml
