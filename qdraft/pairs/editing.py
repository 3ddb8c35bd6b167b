"""Edits of the user's models.yaml, which leave the lines of other pairs as they are."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from qdraft.errors import UsageError
from qdraft.pairs import registry
from qdraft.pairs.document import compose, is_null, read_items
from qdraft.pairs.lock import locked
from qdraft.pairs.registry import Entry, Registry, Value
from qdraft.pairs.splice import cut_key, render_key, set_key
from qdraft.paths import new_file
from qdraft.text_file import decode, find_encoding, read_bytes, require_unicode

Edited = tuple[str, Registry]  # the new text, and what it has to say


def add(
    name: str,
    target: Path,
    draft: Path | None,
    *,
    user_file: Path | None = None,
    must_be_new: bool = False,
    **notes: str | int,
) -> Path:
    """Add a pair of files to the user's models.yaml, or replace the pair of that name.

    Returns the path of models.yaml. The file is complete at every moment, and another process that
    edits it waits. ``notes`` may hold a description, a license, an origin, a template and a
    context. Raises UsageError if models.yaml is not valid, and then leaves it as it is, and if
    ``must_be_new`` and it has a pair of that name.
    """
    registry.require_name(name, "the name of a pair")
    # Links stay links: the hub's cache and people's folders name files by links.
    files = {"target": os.path.abspath(target), "draft": os.path.abspath(draft) if draft else ""}
    fields = {**notes, **files}
    for key, value in fields.items():
        require_unicode(str(value), f"the {key} of the pair {name}")

    def change(text: str, known: Registry, path: Path) -> Edited:
        if must_be_new and name in known.entries:
            raise UsageError(f"a pair named {name} already exists", hint="replace it with --force")
        return _with_entry(text, known, path, (name, fields))

    return _edit(user_file, change)


def set_tuned(
    entry: Entry, tuned: Mapping[str, Value | None], *, user_file: Path | None = None
) -> Path:
    """Write tuned settings of a pair into the user's models.yaml, with a copy of a shipped pair.

    ``tuned`` changes the settings that it names and leaves the others; None removes a setting. The
    rest of the entry stays as it is. Raises UsageError as ``add`` does.
    """

    def change(text: str, known: Registry, path: Path) -> Edited:
        own = known.entries.get(entry.name)
        settings = {**(own or entry).tuned, **registry.rename_old(tuned)}
        merged = {name: value for name, value in settings.items() if value is not None}
        if own is None:
            fields = {**_fields(entry), "tuned": merged}
            return _with_entry(text, known, path, (entry.name, fields))
        node = _pairs(text, path)[entry.name][1]
        expected = Registry({**known.entries, own.name: replace(own, tuned=merged)}, known.default)
        return set_key(text, node, "tuned", merged), expected

    return _edit(user_file, change)


def remove(name: str, *, user_file: Path | None = None) -> Path:
    """Remove a pair from the user's models.yaml, also if it is the default; return the file's path.

    Raises UsageError if the file has no such pair.
    """

    def change(text: str, known: Registry, path: Path) -> Edited:
        if name not in known.entries:
            is_shipped = name in registry.load(user_file, new=True).entries
            hint = "shipped pairs stay; only your own can be removed" if is_shipped else None
            raise UsageError(f"{path} has no pair {name}", hint=hint)
        default = known.default
        if default == name:
            text, default = cut_key(text, compose(text, str(path)), "default"), None
        others = {key: entry for key, entry in known.entries.items() if key != name}
        return cut_key(text, _top(text, path)["pairs"][1], name), Registry(others, default)

    return _edit(user_file, change)


def _edit(user_file: Path | None, change: Callable[[str, Registry, Path], Edited]) -> Path:
    """Change models.yaml under a lock, if the new text says what it should and nothing else."""
    try:
        path = registry.user_path(user_file)
    except OSError as error:
        hint = "name a file with --models-file"
        raise UsageError(error.strerror or str(error), hint=hint) from error
    try:
        with locked(path):
            is_there = os.path.lexists(path) and os.path.exists(path)
            data = read_bytes(path, limit=registry.MAX_BYTES) if is_there else b""
            if is_there and not os.access(path, os.W_OK):
                raise UsageError(f"{path} cannot be written: it is read-only")
            mark, encoding = find_encoding(data)
            text = decode(data, str(path))
            edited, expected = change(text, registry.parse(text, path), path)
            _require_meaning(edited, expected, path)
            with new_file(path) as part:
                part.write_bytes(mark + edited.encode(encoding))
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror or error}") from error
    return path


def _require_meaning(text: str, expected: Registry, path: Path) -> None:
    """Raise UsageError unless the text says what is expected, of all pairs."""
    try:
        is_right = registry.parse(text, path) == expected
    except UsageError:
        is_right = False
    if not is_right:
        raise UsageError(
            f"qdraft cannot edit {path} without changing other lines", hint="edit it by hand"
        )


def _with_entry(text: str, known: Registry, path: Path, new: tuple[str, dict[str, Any]]) -> Edited:
    """Return the text with this entry, without its empty fields, added or replaced."""
    name, entry = new
    fields = {key: value for key, value in entry.items() if not _is_empty(value)}
    pairs = {name: fields}
    expected = registry.parse(render_key("pairs", pairs), path)
    root = compose(text, str(path))
    if root is None or is_null(root):
        gap = "" if not text or text.endswith("\n") else "\n"
        edited = text + gap + render_key("pairs", pairs)
    else:
        node = _top(text, path).get("pairs", (None, None))[1]
        if is_null(node) or not node.value:
            edited = set_key(text, root, "pairs", pairs)
        else:
            edited = set_key(text, node, name, fields)
    return edited, Registry({**known.entries, **expected.entries}, known.default)


def _top(text: str, path: Path) -> dict[str, tuple[Any, Any]]:
    return read_items(compose(text, str(path)), str(path))


def _pairs(text: str, path: Path) -> dict[str, tuple[Any, Any]]:
    return read_items(_top(text, path)["pairs"][1], str(path))


def _is_empty(value: Any) -> bool:
    return value in (None, {}) or (isinstance(value, str) and not value.strip())


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
