"""Edits of the user's models.yaml, which leave the lines of other pairs as they are."""

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
    """Add a pair of files to the user's models.yaml, or replace the pair of that name.

    Returns the path of models.yaml. The file is complete at every moment. ``notes`` may hold a
    description, a license, an origin, a template and a context. Raises UsageError if models.yaml is
    not valid, and then leaves it as it is.
    """
    # Links stay links: the hub's cache and people's folders name files by links.
    files = {"target": os.path.abspath(target), "draft": os.path.abspath(draft) if draft else ""}
    return _put(name, {**notes, **files}, user_file)


def set_tuned(
    entry: Entry, tuned: Mapping[str, Value | None], *, user_file: Path | None = None
) -> Path:
    """Write tuned settings of a pair into the user's models.yaml, with a copy of a shipped pair.

    ``tuned`` changes the settings that it names and leaves the others; None removes a setting. The
    rest of the entry stays as it is, except for comments inside it. Raises UsageError as ``add``
    does.
    """
    path = registry.user_path(user_file)
    own = _parse(path.read_text(encoding="utf-8")).get("pairs") if path.exists() else None
    key = _find_key(own, entry.name) if own else None
    settings = {**entry.tuned, **registry.rename_old(tuned)}
    merged = {name: value for name, value in settings.items() if value is not None}
    fields = own[key] if own and key in own else _fields(entry)
    return _put(entry.name, {**fields, "tuned": merged}, user_file)


def _fields(entry: Entry) -> dict[str, Any]:
    """Return an entry as models.yaml writes it, except for its tuned settings."""
    fields: dict[str, Any] = {
        "description": entry.description,
        "license": entry.license,
        "template": entry.template,
        "origin": entry.origin,
        "target": entry.target,
        "draft": entry.draft or "",
        "context": entry.context,
        "devices": dict(entry.devices),
    }
    if entry.packaged:
        files = [{"package": f.package, "path": f.path} for f in entry.packaged.files]
        fields["source"] = {
            "extra": entry.packaged.extra,
            "sha256": entry.packaged.sha256,
            "files": files,
        }
    return fields


def _put(name: str, entry: dict[str, Any], user_file: Path | None) -> Path:
    """Write the entry without its empty fields, and return the path of models.yaml."""
    path = registry.user_path(user_file)
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    if text:
        registry.read(path)
    fields = {key: value for key, value in entry.items() if not _is_empty(value)}
    _write(path, _replace_entry(text, name, fields))
    return path


def _is_empty(value: Any) -> bool:
    return value in (None, {}) or (isinstance(value, str) and not value.strip())


def remove(name: str, *, user_file: Path | None = None) -> Path:
    """Remove a pair from the user's models.yaml, also if it is the default; return the file's path.

    Raises UsageError if the file has no such pair.
    """
    path = registry.user_path(user_file)
    own = registry.read(path) if path.exists() else registry.Registry()
    if name not in own.entries:
        is_shipped = name in registry.load(user_file, new=True).entries
        hint = "shipped pairs stay; only your own can be removed" if is_shipped else None
        raise UsageError(f"{path} has no pair {name}", hint=hint)
    text = _cut_entry(path.read_text(encoding="utf-8"), name)
    data = _parse(text)
    if data.get("default") == name:
        text = _drop_key(text, data, "default")
    _write(path, text)
    return path


def _drop_key(text: str, data: CommentedMap, key: str) -> str:
    """Return the text without a key of the top level whose value is on the same line."""
    if data.fa.flow_style():
        del data[key]
        return _dump(data)
    lines = text.splitlines(keepends=True)
    del lines[data.lc.key(key)[0]]
    return "".join(lines)


def _write(path: Path, text: str) -> None:
    """Replace the file that ``path`` leads to, after a check that the new text is valid."""
    with new_file(path.resolve()) as part:
        part.write_text(text, encoding="utf-8")
        registry.read(part)


def _replace_entry(text: str, name: str, entry: dict[str, Any]) -> str:
    """Return the text of models.yaml with this entry added or replaced."""
    data = _parse(text)
    pairs = data.get("pairs")
    if not pairs:
        if data.fa.flow_style():  # all in braces: there is no line to add to
            data["pairs"] = {name: entry}
            return _dump(data)
        if "pairs" in data:  # the key is there, and empty
            text = _drop_key(text, data, "pairs")
        gap = "" if not text or text.endswith("\n") else "\n"
        return f"{text}{gap}pairs:\n{_render_entry(name, entry, 2)}"
    if _is_in_braces(data):
        pairs[_find_key(pairs, name)] = entry
        return _dump(data)
    lines = text.splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n"):
        lines[-1] += "\n"
    keys = [str(key) for key in pairs]
    replaced = name in keys
    start, indent = pairs.lc.key(_find_key(pairs, name) if replaced else list(pairs)[-1])
    end = _find_end(lines, start, indent)
    lines[start if replaced else end : end] = [_render_entry(name, entry, indent)]
    return "".join(lines)


def _cut_entry(text: str, name: str) -> str:
    """Return the text of models.yaml without this entry."""
    data = _parse(text)
    pairs = data["pairs"]
    if _is_in_braces(data):
        del pairs[_find_key(pairs, name)]
        return _dump(data)
    lines = text.splitlines(keepends=True)
    start, indent = pairs.lc.key(_find_key(pairs, name))
    del lines[start : _find_end(lines, start, indent)]
    return "".join(lines)


def _find_end(lines: list[str], start: int, indent: int) -> int:
    """Return the line after an entry; comments and blank lines there belong to the next entry."""
    end = place = start + 1
    while place < len(lines):
        content = lines[place].strip()
        if content and not content.startswith("#"):
            if len(lines[place]) - len(lines[place].lstrip()) <= indent:
                break
            end = place + 1
        place += 1
    return end


def _find_key(pairs: CommentedMap, name: str) -> Any:
    """Return the key as YAML reads it, which may be a number; ``name`` if there is none."""
    return next((key for key in pairs if str(key) == name), name)


def _is_in_braces(data: CommentedMap) -> bool:
    """Tell whether the pairs are in braces, so that their lines cannot be cut out."""
    return bool(data.fa.flow_style() or data["pairs"].fa.flow_style())


def _render_entry(name: str, entry: dict[str, Any], indent: int) -> str:
    """Return the lines of one entry."""
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
