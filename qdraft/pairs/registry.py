"""The pairs that models.yaml names: what an entry holds, and how qdraft reads it."""

from __future__ import annotations

import functools
import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from ruamel.yaml.nodes import MappingNode

from qdraft.errors import UsageError
from qdraft.pairs.document import (
    Items,
    compose,
    is_null,
    line_of,
    read_items,
    read_list,
    read_scalar,
    shorten,
)
from qdraft.paths import config_dir, is_missing, is_same_file, why_closed
from qdraft.text_file import decode, read_bytes, read_text

log = logging.getLogger(__name__)

MAX_BYTES = 1 << 18  # of models.yaml; a larger file is something else, for example a model
_MAX_NAME = 200  # bytes of a pair's name, a part of the names of files
_FILE_TYPE = re.compile(r"[A-Za-z0-9_]+")
_SHA256 = re.compile(r"[0-9A-Fa-f]{64}")
_PACKAGE = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")

Value = str | int | float
Setting = TypeVar("Setting")

# The options that an entry may set: those that place layers, and those that tune the pair.
DEVICES = (
    "gpu-layers",
    "gpu-layers-draft",
    "device",
    "device-draft",
    "split-mode",
    "main-gpu",
    "tensor-split",
    "override-tensor",
    "override-tensor-draft",
    "rpc",
)
HOW_TO_DRAFT = ("drafter", "draft-policy", "n-draft", "p-min", "verification")
TUNED = (
    *HOW_TO_DRAFT,
    "share-kv",
    "threads",
    "threads-batch",
    "cache-type-k",
    "cache-type-v",
    "cache-type-k-draft",
    "cache-type-v-draft",
    "flash-attn",
)
EVIDENCE = "evidence"  # beside the tuned settings: the speed-up that qdraft measured with them
OLD_NAMES = {"verify": "verification"}  # keys of an earlier version, which qdraft still reads

# The keys of an entry beside ``target``.
_OPTIONAL = (
    "draft",
    "source",
    "description",
    "license",
    "template",
    "origin",
    "context",
    "devices",
    "tuned",
)


@dataclass(frozen=True, slots=True)
class PackagedFile:
    """A file that an installed distribution carries, by its path below site-packages."""

    package: str
    path: str


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A GGUF file that installed packages carry.

    ``files`` are its parts in order, ``sha256`` is the checksum of the whole, and ``extra`` is the
    pip extra that installs the packages.
    """

    files: tuple[PackagedFile, ...]
    sha256: str
    extra: str


@dataclass(frozen=True, slots=True)
class Entry:
    """A named pair; ``target`` and ``draft`` are file types if it is ``packaged``, else paths."""

    name: str
    target: str
    draft: str | None
    packaged: PackagedModel | None
    description: str = ""
    license: str = ""
    template: str = ""  # a Jinja file that replaces the model's own chat template
    origin: str = ""  # where the files come from
    context: int | None = None
    devices: Mapping[str, Value] = field(default_factory=dict)
    tuned: Mapping[str, Value] = field(default_factory=dict)

    @property
    def options(self) -> dict[str, str]:
        """The options that the entry sets, by long name; the command line overrides them."""
        context = {} if self.context is None else {"ctx-size": self.context}
        settings = {**context, **self.devices, **self.tuned}
        return {key: str(value) for key, value in settings.items() if key != EVIDENCE}


@dataclass(frozen=True, slots=True)
class Registry:
    """All entries by name, and the name of the default one."""

    entries: Mapping[str, Entry] = field(default_factory=dict)
    default: str | None = None

    def find(self, name: str | None = None) -> Entry:
        """Return the entry of this name, or the default. Raises UsageError with the known names."""
        name = name or self.default
        if name is None or name not in self.entries:
            names = ", ".join(sorted(self.entries)) or "none"
            problem = "no default pair is set" if name is None else f"no pair is called {name}"
            raise UsageError(problem, hint=f"known pairs: {names}")
        return self.entries[name]


def load(user_file: Path | None = None, *, new: bool = False) -> Registry:
    """Return the shipped pairs and the user's; of two pairs of one name, the user's.

    The user's file is ``user_file``, else QDRAFT_MODELS, else models.yaml in the user's
    configuration directory. Only that last file may be missing; with ``new``, any of them may. If
    that last file is closed to this user, qdraft warns and goes on without it. Raises UsageError
    for a named file that cannot be read, an unknown key, or an invalid entry.
    """
    shipped = read(shipped_path())
    is_named = bool(user_file or os.environ.get("QDRAFT_MODELS"))
    try:
        path = user_path(user_file)
    except OSError:  # there is no home directory, and so no file in it
        return shipped
    may_be_missing = new or not is_named
    if may_be_missing and is_missing(path):
        return shipped
    if not is_named and not new and (why := why_closed(path)):
        _warn_once(f"{path} cannot be read, so qdraft leaves your own pairs out: {why}")
        return shipped
    own = read(path)
    return Registry({**shipped.entries, **own.entries}, own.default or shipped.default)


def user_path(user_file: Path | None = None) -> Path:
    """Return the path of the user's models.yaml, which may be missing.

    Raises OSError if it should be in the configuration directory, and there is no home.
    """
    path = os.environ.get("QDRAFT_MODELS")
    return user_file or (Path(path) if path else config_dir() / "models.yaml")


def find_entries(target: Path, user_file: Path | None = None) -> list[Entry]:
    """Return the pairs of files in models.yaml with this target and a draft that exists.

    Warns of a draft that is closed to this user, and leaves its pair out.
    """
    entries = []
    for entry in load(user_file).entries.values():
        if entry.packaged or not entry.draft or not is_same_file(entry.target, target):
            continue
        if why := why_closed(entry.draft):
            _warn_once(
                f"{entry.draft} cannot be read, so qdraft leaves out the pair {entry.name}: {why}"
            )
        elif os.path.isfile(entry.draft):
            entries.append(entry)
    return entries


@functools.cache
def _warn_once(message: str) -> None:
    """Warn once a process: a command looks up its pair several times."""
    log.warning("%s", message)


def find_entry(
    target: Path | None, draft: Path | None, pair: str | None, user_file: Path | None = None
) -> Entry | None:
    """Return the entry of a pair by its name or its files; None if no entry names the files.

    Raises UsageError as ``load`` does, and for an unknown name.
    """
    if target is None:
        return load(user_file).find(pair)
    entries = find_entries(target, user_file)
    if draft is not None:
        entries = [e for e in entries if e.draft and is_same_file(draft, e.draft)]
    return entries[0] if entries else None


def find_missing(entry: Entry) -> list[str]:
    """The paths of the entry that lead to no file; none for a packaged pair."""
    return [path for path in _paths(entry) if not os.path.isfile(path) and not why_closed(path)]


def find_closed(entry: Entry) -> list[str]:
    """The paths of the entry that this user may not read; none for a packaged pair."""
    return [path for path in _paths(entry) if why_closed(path)]


def _paths(entry: Entry) -> list[str]:
    paths = () if entry.packaged else (entry.target, entry.draft)
    return [path for path in paths if path]


def read_template(entry: Entry | None) -> str | None:
    """Return the text of the entry's chat template; None if it has none. Raises UsageError."""
    if entry is None or not entry.template:
        return None
    return read_text(entry.template, f"the template {entry.template}")


def shipped_path() -> Path:
    """Return the shipped models.yaml: in the installed package, or at the top of the repository."""
    package = Path(__file__).parent.parent
    inside = package / "models.yaml"
    return inside if inside.exists() else package.parent / "models.yaml"


def read(path: Path) -> Registry:
    """Return the pairs of a file. Raises UsageError if it cannot be read or is not valid."""
    return parse(decode(read_bytes(path, limit=MAX_BYTES), str(path)), path)


def parse(text: str, path: Path) -> Registry:
    """Return the pairs of the text of a file. Raises UsageError if it is not valid."""
    root = compose(text, str(path))
    if is_null(root):
        return Registry()
    top = _mapping(root, str(path), required=(), optional=("default", "pairs"))
    entries: dict[str, Entry] = {}
    pairs = _value(top, "pairs")
    if not is_null(pairs):
        if not isinstance(pairs, MappingNode):
            raise UsageError(f"{path}: pairs must map names to entries")
        for name, (key, value) in read_items(pairs, f"{path}: pairs").items():
            require_name(name, f"{path}: the name in line {line_of(key)}")
            entries[name] = _entry(name, value, path)
    return Registry(entries, _text(top, "default", str(path)) or None)


def require_name(name: str, what: str) -> None:
    """Raise UsageError unless ``name`` can be a pair's: files in the cache are called by it."""
    is_right = name.isprintable() and name.strip() and not any(c in name for c in "/\\")
    if not is_right or name in (".", "..") or len(name.encode()) > _MAX_NAME:
        raise UsageError(
            f"{what} is {shorten(name)} but must be a name without slashes",
            hint=f"use at most {_MAX_NAME} letters, digits and signs",
        )


def _entry(name: str, node: Any, path: Path) -> Entry:
    where = f"{path}: pair {name}"
    data = _mapping(node, where, required=("target",), optional=_OPTIONAL)
    packaged = _packaged(data["source"][1], where) if "source" in data else None
    entry = Entry(
        name=name,
        target=_text(data, "target", where),
        draft=_text(data, "draft", where) or None,
        packaged=packaged,
        description=_text(data, "description", where),
        license=_text(data, "license", where),
        template=_text(data, "template", where),
        origin=_text(data, "origin", where),
        context=_context(data, where),
        devices=_options(data, "devices", DEVICES, where),
        tuned=rename_old(_options(data, "tuned", (*TUNED, *OLD_NAMES, EVIDENCE), where)),
    )
    if not entry.target:
        raise UsageError(f"{where}: the key target is empty")
    if entry.template:
        entry = replace(entry, template=_resolve(path, entry.template))
    if packaged:
        for key in ("target", "draft"):
            _require_match(_FILE_TYPE, data, key, where, "a file type, for example Q2_K")
        return entry
    draft = _resolve(path, entry.draft) if entry.draft else None
    return replace(entry, target=_resolve(path, entry.target), draft=draft)


def rename_old(tuned: Mapping[str, Setting]) -> dict[str, Setting]:
    """Return tuned settings by today's names, with the keys of an earlier version renamed."""
    current = {key: value for key, value in tuned.items() if key not in OLD_NAMES}
    old = {OLD_NAMES[key]: value for key, value in tuned.items() if key in OLD_NAMES}
    return {**old, **current}


def _packaged(node: Any, where: str) -> PackagedModel:
    where = f"{where}, source"
    data = _mapping(node, where, required=("files", "sha256"), optional=("extra",))
    nodes = read_list(data["files"][1], f"{where}: files")
    if not nodes:
        raise UsageError(f"{where}: files must be a list of at least one file")
    files = tuple(_packaged_file(each, f"{where} file") for each in nodes)
    _require_match(_SHA256, data, "sha256", where, "64 hexadecimal digits")
    _require_match(_PACKAGE, data, "extra", where, "the name of an extra")
    return PackagedModel(files, _text(data, "sha256", where).lower(), _text(data, "extra", where))


def _packaged_file(node: Any, where: str) -> PackagedFile:
    """Return one file of a source, which lies inside of its package."""
    data = _mapping(node, where, required=("package", "path"), optional=())
    _require_match(_PACKAGE, data, "package", where, "the name of a package")
    package, path = _text(data, "package", where), _text(data, "path", where)
    parts = path.split("/")
    if ".." in parts or not parts[0] or any(c in path for c in "\\:"):
        raise UsageError(
            f"{where}: path{_line(data, 'path')} is {shorten(path)} but must be inside the package"
        )
    return PackagedFile(package, path)


def _require_match(pattern: re.Pattern[str], data: Items, key: str, where: str, rule: str) -> None:
    """Raise UsageError unless the text of the key, if it has one, is as ``rule`` says."""
    text = _text(data, key, where)
    if text and not pattern.fullmatch(text):
        place = f"{where}: {key}{_line(data, key)}"
        raise UsageError(f"{place} is {shorten(text)} but must be {rule}")


def _context(data: Items, where: str) -> int | None:
    if "context" not in data:
        return None
    value = read_scalar(data["context"][1], f"{where}: context")
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 0):
        return value
    raise UsageError(f"{where}: context{_line(data, 'context')} must be a number, not {value!r}")


def _options(data: Items, key: str, known: tuple[str, ...], where: str) -> dict[str, Value]:
    """Return the settings under ``key``, by the long names of options. Raises UsageError."""
    if is_null(_value(data, key)):
        return {}
    items = _mapping(data[key][1], f"{where}, {key}", required=(), optional=known)
    settings: dict[str, Value] = {}
    for name, (_, node) in items.items():
        value = read_scalar(node, f"{where}, {key}: {name}")
        if value is None or isinstance(value, bool):
            place = f"{where}, {key}: {name}{_line(items, name)}"
            raise UsageError(f"{place} must be text or a number, not {node.value or 'empty'}")
        settings[name] = value
    return settings


def _value(data: Items, key: str) -> Any:
    """Return the node of a key's value; None if there is no such key."""
    return data[key][1] if key in data else None


def _line(data: Items, key: str) -> str:
    """Return the line of a key as a part of a message; empty if there is no such key."""
    return f" (line {line_of(data[key][0])})" if key in data else ""


def _mapping(
    node: Any, where: str, *, required: tuple[str, ...], optional: tuple[str, ...]
) -> Items:
    """Return the items of a mapping with these keys only. Raises UsageError."""
    known = (*required, *optional)
    hint = f"known keys: {', '.join(known)}"
    if not isinstance(node, MappingNode):
        raise UsageError(f"{where} must be a mapping of keys to values", hint=hint)
    items = read_items(node, where)
    for key in items:
        if key not in known:
            raise UsageError(f"{where}: unknown key {key}{_line(items, key)}", hint=hint)
    for key in required:
        if key not in items:
            place = f"(in the entry that starts at line {line_of(node)})"
            raise UsageError(f"{where}: the key {key} is missing {place}")
    return items


def _text(data: Items, key: str, where: str) -> str:
    if key not in data:
        return ""
    node = data[key][1]
    value = read_scalar(node, f"{where}: {key}")
    if not isinstance(value, str):
        place = f"{where}: {key}{_line(data, key)}"
        raise UsageError(
            f"{place} must be text, not {shorten(node.value) if node.value else 'empty'}",
            hint="put text that looks like a number in quotes",
        )
    return value


def _resolve(file: Path, path: str) -> str:
    """Return a path of an entry; a relative one starts at the folder of models.yaml.

    ``~`` of a user who has no home stays as it is, as in a shell, and leads to no file.
    """
    return str(file.parent / os.path.expanduser(path))
