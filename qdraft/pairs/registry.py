"""models.yaml: the pairs that are known by name."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap
from ruamel.yaml.error import YAMLError

from qdraft.errors import UsageError
from qdraft.paths import config_dir

Value = str | int | float

# What an entry may say of qdraft's options: where the layers go, and how drafting is done.
DEVICES = ("gpu-layers", "gpu-layers-draft", "device", "device-draft", "split-mode", "main-gpu",
           "tensor-split", "override-tensor", "override-tensor-draft", "rpc")  # fmt: skip
TUNED = ("drafter", "draft-policy", "n-draft", "p-min", "verify", "share-kv", "threads",
         "threads-batch", "cache-type-k", "cache-type-v", "cache-type-k-draft",
         "cache-type-v-draft", "flash-attn")  # fmt: skip
EVIDENCE = "evidence"  # beside tuned settings: what they were measured to bring


@dataclass(frozen=True, slots=True)
class PackagedFile:
    """A file that an installed distribution carries, by its path below site-packages."""

    package: str
    path: str


@dataclass(frozen=True, slots=True)
class Source:
    """A GGUF from installed packages: its files in order, the checksum of the whole, the extra."""

    files: tuple[PackagedFile, ...]
    sha256: str
    extra: str


@dataclass(frozen=True, slots=True)
class Entry:
    """A named pair. With a source, ``target`` and ``draft`` are file types, else paths."""

    name: str
    target: str
    draft: str | None
    source: Source | None
    description: str = ""
    license: str = ""
    template: str = ""  # a Jinja file that stands in for the model's own chat template
    origin: str = ""  # where the files came from
    context: int | None = None
    devices: Mapping[str, Value] = field(default_factory=dict)
    tuned: Mapping[str, Value] = field(default_factory=dict)

    @property
    def options(self) -> dict[str, str]:
        """What the entry says of qdraft's options, by long name; the command line wins."""
        context = {} if self.context is None else {"ctx-size": self.context}
        told = {**context, **self.devices, **self.tuned}
        return {key: str(value) for key, value in told.items() if key != EVIDENCE}


@dataclass(frozen=True, slots=True)
class Registry:
    """All entries by name, and the name of the default one."""

    entries: Mapping[str, Entry] = field(default_factory=dict)
    default: str | None = None

    def find(self, name: str | None = None) -> Entry:
        """The entry of this name, or the default one. Raises UsageError with the known names."""
        name = name or self.default
        if name is None or name not in self.entries:
            known = ", ".join(sorted(self.entries)) or "none"
            raise UsageError(f"no pair is called {name}", hint=f"known pairs: {known}")
        return self.entries[name]


def load(user_file: Path | None = None, *, new: bool = False) -> Registry:
    """The shipped pairs and the user's own, which win where the names are equal.

    The user's file is ``user_file``, else QDRAFT_MODELS, else models.yaml in the user's
    configuration directory, which may be missing; under ``new`` any may. Raises UsageError for
    a file that cannot
    be read, an unknown key, or an entry that makes no sense.
    """
    shipped = read(_shipped())
    path = user_path(user_file)
    if (new or path == config_dir() / "models.yaml") and not path.exists():
        return shipped
    own = read(path)
    return Registry({**shipped.entries, **own.entries}, own.default or shipped.default)


def user_path(user_file: Path | None = None) -> Path:
    """The user's models.yaml, which may be missing."""
    named = os.environ.get("QDRAFT_MODELS")
    return user_file or (Path(named) if named else config_dir() / "models.yaml")


def entries_of(target: Path, user_file: Path | None = None) -> list[Entry]:
    """The pairs of files in the user's models.yaml that have this target and a draft."""
    found = []
    for entry in load(user_file).entries.values():
        if entry.source is None and entry.draft and Path(entry.draft).is_file():
            known = Path(entry.target)
            if known.is_file() and target.is_file() and known.samefile(target):
                found.append(entry)
    return found


def meant(
    target: Path | None, draft: Path | None, pair: str | None, user_file: Path | None = None
) -> Entry | None:
    """The entry that is meant by a pair's name, or by files; None for files that no entry names.

    Raises UsageError as ``load`` does, and for an unknown name.
    """
    if target is None:
        return load(user_file).find(pair)
    known = entries_of(target)
    if draft is not None:
        known = [e for e in known if e.draft and draft.is_file() and draft.samefile(e.draft)]
    return known[0] if known else None


def template_of(entry: Entry | None) -> str | None:
    """The text of the entry's own chat template; None where it has none. Raises UsageError."""
    if entry is None or not entry.template:
        return None
    try:
        return Path(entry.template).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise UsageError(f"the template {entry.template} cannot be read: {why}") from error


def _shipped() -> Path:
    """Inside the installed package; at the top of the repository when run from there."""
    package = Path(__file__).parent.parent
    inside = package / "models.yaml"
    return inside if inside.exists() else package.parent / "models.yaml"


def read(path: Path) -> Registry:
    """The pairs of one file. Raises UsageError for one that cannot be read or makes no sense."""
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
    data = _mapping(
        value,
        where,
        required=("target",),
        optional=(
            "draft", "source", "description", "license", "template", "origin", "context",
            "devices", "tuned",
        ),
    )  # fmt: skip
    source = _source(data["source"], where) if "source" in data else None
    entry = Entry(
        name=name,
        target=_text(data, "target", where),
        draft=_text(data, "draft", where) or None,
        source=source,
        description=_text(data, "description", where),
        license=_text(data, "license", where),
        template=_text(data, "template", where),
        origin=_text(data, "origin", where),
        context=_context(data, where),
        devices=_options(data, "devices", DEVICES, where),
        tuned=_options(data, "tuned", (*TUNED, EVIDENCE), where),
    )
    if entry.template:
        entry = replace(entry, template=str(_seen_from(path, entry.template)))
    if source:
        return entry
    draft = str(_seen_from(path, entry.draft)) if entry.draft else None
    return replace(entry, target=str(_seen_from(path, entry.target)), draft=draft)


def _source(value: Any, where: str) -> Source:
    data = _mapping(value, f"{where}, source", required=("files", "sha256"), optional=("extra",))
    if not isinstance(data["files"], list) or not data["files"]:
        raise UsageError(f"{where}, source: files must be a list")
    files = [
        _mapping(f, f"{where}, source file", required=("package", "path"), optional=())
        for f in data["files"]
    ]
    return Source(
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
    """Settings by the long names of qdraft's options."""
    if data.get(key) is None:
        return {}
    found = _mapping(data[key], f"{where}, {key}", required=(), optional=known)
    for name, value in found.items():
        if isinstance(value, bool) or not isinstance(value, (str, int, float)):
            place = f"{where}, {key}: {name}{_line(found, name)}"
            raise UsageError(f"{place} must be text or a number, not {value!r}")
    return dict(found)


def _line(data: Any, key: str) -> str:
    """Where a key stands in its file, in words."""
    known = isinstance(data, CommentedMap) and key in data
    return f" (line {data.lc.key(key)[0] + 1})" if known else ""


def _mapping(
    value: Any, where: str, *, required: tuple[str, ...], optional: tuple[str, ...]
) -> dict[str, Any]:
    """``value`` as a mapping with just these keys."""
    known = (*required, *optional)
    if not isinstance(value, dict):
        raise UsageError(
            f"{where}: expected keys and values", hint=f"known keys: {', '.join(known)}"
        )
    for key in value:
        if key not in known:
            raise UsageError(
                f"{where}: unknown key {key}{_line(value, key)}",
                hint=f"known keys: {', '.join(known)}",
            )
    for key in required:
        if key not in value:
            started = (
                f" (the entry of line {value.lc.line + 1})"
                if value and isinstance(value, CommentedMap)
                else ""
            )
            raise UsageError(f"{where}: the key {key} is missing{started}")
    return value


def _text(data: Mapping[str, Any], key: str, where: str) -> str:
    value = data.get(key, "")
    if not isinstance(value, str):
        raise UsageError(f"{where}: {key}{_line(data, key)} must be text, not {value!r}")
    return value


def _seen_from(file: Path, path: str) -> Path:
    return file.parent / Path(path).expanduser()
