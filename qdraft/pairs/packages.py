"""From an entry of models.yaml to files on disk: join, verify, quantize into the cache."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from qdraft.errors import ModelFileError, UsageError
from qdraft.llama.quantize import Quantized, Recipe, quantize
from qdraft.pairs.registry import Entry, Source
from qdraft.paths import cache_dir, new_file

Progress = Callable[[str, int, int], None]  # what is built, done, of
Report = Callable[[Quantized], None]


def materialize(
    entry: Entry, *, threads: int, progress: Progress | None = None, report: Report | None = None
) -> tuple[Path, Path | None]:
    """Paths of target and draft; with a source they are built on first use and kept.

    Interrupted or failing builds leave nothing behind. ``report`` gets what each
    quantization really gave. Raises UsageError when the package is not installed and
    ModelFileError when its content is not what models.yaml says.
    """
    if entry.source is None:
        return Path(entry.target), Path(entry.draft) if entry.draft else None
    folder = cache_dir() / "models" / f"{entry.name}-{entry.source.sha256[:12]}"
    target = folder / f"{entry.name}-{entry.target}.gguf"
    draft = folder / f"{entry.name}-{entry.draft}.gguf" if entry.draft else None

    def build(source: Path, path: Path, file_type: str) -> None:
        def step(done: int, of: int) -> None:
            if progress:
                progress(path.name, done, of)

        made = quantize(source, path, Recipe(file_type), threads=threads, progress=step)
        if report:
            report(made)

    if not target.exists():
        build(_source_file(entry, entry.source, folder), target, entry.target)
    if draft and entry.draft and not draft.exists():
        build(target, draft, entry.draft)
    return target, draft


def _source_file(entry: Entry, source: Source, folder: Path) -> Path:
    """The packaged GGUF itself, or its parts joined into the cache; the checksum holds."""
    parts = [_locate(entry, source, f.package, f.path) for f in source.files]
    if len(parts) == 1:
        _require_sha256(parts[0], source.sha256)
        return parts[0]
    joined = folder / "source.gguf"
    if not joined.exists():
        with new_file(joined) as path:
            with path.open("wb") as out:
                for part in parts:
                    with part.open("rb") as data:
                        shutil.copyfileobj(data, out, 1 << 20)
            _require_sha256(path, source.sha256)
    return joined


def _locate(entry: Entry, source: Source, package: str, path: str) -> Path:
    try:
        found = Path(str(distribution(package).locate_file(path)))
    except PackageNotFoundError as error:
        extra = (
            f"pip install 'qdraft[{source.extra}]'" if source.extra else f"pip install {package}"
        )
        raise UsageError(
            f"the pair {entry.name} needs the package {package}, which is not installed",
            hint=f"{extra}, or give your own files with -m and -d",
        ) from error
    if not found.is_file():
        raise ModelFileError(f"the package {package} lacks {path}", hint=f"reinstall {package}")
    return found


def _require_sha256(path: Path, expected: str) -> None:
    digest = hashlib.sha256()
    with path.open("rb") as data:
        while block := data.read(1 << 20):
            digest.update(block)
    if digest.hexdigest() != expected:
        raise ModelFileError(
            f"{path.name} has another content than models.yaml says (its SHA-256 differs)",
            hint="the package may be another version or damaged: reinstall it",
        )
