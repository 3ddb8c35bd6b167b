"""The pairs that models.yaml names: what an entry holds, and how qdraft reads it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap
from ruamel.yaml.error import YAMLError

from qdraft.errors import UsageError
from qdraft.paths import config_dir

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
    configuration directory. Only that last file may be missing; with ``new``, any of them may.
    Raises UsageError for a file that cannot be read, an unknown key, or an invalid entry.
    """
    shipped = read(shipped_path())
    path = user_path(user_file)
    if (new or path == config_dir() / "models.yaml") and not path.exists():
        return shipped
    own = read(path)
    return Registry({**shipped.entries, **own.entries}, own.default or shipped.default)


def user_path(user_file: Path | None = None) -> Path:
    """Return the path of the user's models.yaml, which may be missing."""
    path = os.environ.get("QDRAFT_MODELS")
    return user_file or (Path(path) if path else config_dir() / "models.yaml")


def find_entries(target: Path, user_file: Path | None = None) -> list[Entry]:
    """Return the pairs of files in models.yaml with this target and a draft that exists."""
    return [
        entry
        for entry in load(user_file).entries.values()
        if entry.packaged is None
        and entry.draft
        and Path(entry.draft).is_file()
        and _is_same_file(Path(entry.target), target)
    ]


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
        entries = [e for e in entries if e.draft and _is_same_file(draft, Path(e.draft))]
    return entries[0] if entries else None


def find_missing(entry: Entry) -> list[str]:
    """The paths of the entry that lead to no file; none for a packaged pair."""
    paths = () if entry.packaged else (entry.target, entry.draft)
    return [path for path in paths if path and not Path(path).is_file()]


def _is_same_file(first: Path, second: Path) -> bool:
    return first.is_file() and second.is_file() and first.samefile(second)


def read_template(entry: Entry | None) -> str | None:
    """Return the text of the entry's chat template; None if it has none. Raises UsageError."""
    if entry is None or not entry.template:
        return None
    try:
        return Path(entry.template).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise UsageError(f"the template {entry.template} cannot be read: {why}") from error


def shipped_path() -> Path:
    """Return the shipped models.yaml: in the installed package, or at the top of the repository."""
    package = Path(__file__).parent.parent
    inside = package / "models.yaml"
    return inside if inside.exists() else package.parent / "models.yaml"


def read(path: Path) -> Registry:
    """Return the pairs of a file. Raises UsageError if it cannot be read or is not valid."""
    try:
        data = YAML().load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    except (YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
    top = _mapping(
        data if data is not None else {}, str(path), required=(), optional=("default", "pairs")
    )
    pairs = top.get("pairs") or {}
    if not isinstance(pairs, dict):
        raise UsageError(f"{path}: pairs must map names to entries")
    entries = {str(name): _entry(str(name), value, path) for name, value in pairs.items()}
    return Registry(entries, _text(top, "default", str(path)) or None)


def _entry(name: str, value: Any, path: Path) -> Entry:
    where = f"{path}: pair {name}"
    data = _mapping(value, where, required=("target",), optional=_OPTIONAL)
    packaged = _packaged(data["source"], where) if "source" in data else None
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
    if entry.template:
        entry = replace(entry, template=_resolve(path, entry.template))
    if packaged:
        return entry
    draft = _resolve(path, entry.draft) if entry.draft else None
    return replace(entry, target=_resolve(path, entry.target), draft=draft)


def rename_old(tuned: Mapping[str, Setting]) -> dict[str, Setting]:
    """Return tuned settings by today's names, with the keys of an earlier version renamed."""
    current = {key: value for key, value in tuned.items() if key not in OLD_NAMES}
    old = {OLD_NAMES[key]: value for key, value in tuned.items() if key in OLD_NAMES}
    return {**old, **current}


def _packaged(value: Any, where: str) -> PackagedModel:
    data = _mapping(value, f"{where}, source", required=("files", "sha256"), optional=("extra",))
    if not isinstance(data["files"], list) or not data["files"]:
        raise UsageError(f"{where}, source: files must be a list")
    files = [
        _mapping(f, f"{where}, source file", required=("package", "path"), optional=())
        for f in data["files"]
    ]
    return PackagedModel(
        tuple(PackagedFile(_text(f, "package", where), _text(f, "path", where)) for f in files),
        _text(data, "sha256", where),
        _text(data, "extra", where),
    )


def _context(data: dict[str, Any], where: str) -> int | None:
    value = data.get("context")
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 0):
        return value
    raise UsageError(f"{where}: context{_line(data, 'context')} must be a number, not {value!r}")


def _options(
    data: dict[str, Any], key: str, known: tuple[str, ...], where: str
) -> dict[str, Value]:
    """Return the settings under ``key``, by the long names of options. Raises UsageError."""
    if data.get(key) is None:
        return {}
    settings = _mapping(data[key], f"{where}, {key}", required=(), optional=known)
    for name, value in settings.items():
        if isinstance(value, bool) or not isinstance(value, (str, int, float)):
            place = f"{where}, {key}: {name}{_line(settings, name)}"
            raise UsageError(f"{place} must be text or a number, not {value!r}")
    return dict(settings)


def _line(data: Any, key: str) -> str:
    """Return the line of a key as the end of a message; empty if the line is unknown."""
    has_line = isinstance(data, CommentedMap) and key in data
    return f" (line {data.lc.key(key)[0] + 1})" if has_line else ""


def _mapping(
    value: Any, where: str, *, required: tuple[str, ...], optional: tuple[str, ...]
) -> dict[str, Any]:
    """Return ``value`` as a mapping with these keys only. Raises UsageError."""
    known = (*required, *optional)
    hint = f"known keys: {', '.join(known)}"
    if not isinstance(value, dict):
        raise UsageError(f"{where} must be a mapping of keys to values", hint=hint)
    for key in value:
        if key not in known:
            raise UsageError(f"{where}: unknown key {key}{_line(value, key)}", hint=hint)
    for key in required:
        if key not in value:
            place = ""
            if value and isinstance(value, CommentedMap):
                place = f" (in the entry that starts at line {value.lc.line + 1})"
            raise UsageError(f"{where}: the key {key} is missing{place}")
    return value


def _text(data: Mapping[str, Any], key: str, where: str) -> str:
    value = data.get(key, "")
    if not isinstance(value, str):
        raise UsageError(f"{where}: {key}{_line(data, key)} must be text, not {value!r}")
    return value


def _resolve(file: Path, path: str) -> str:
    """Return a path of an entry; a relative one starts at the folder of models.yaml."""
    return str(file.parent / Path(path).expanduser())
