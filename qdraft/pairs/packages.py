"""The model files of an entry of models.yaml: joined, checked and quantized into the cache."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from qdraft.disk import require_space
from qdraft.errors import ModelFileError, UsageError
from qdraft.llama.progress import Progress, no_progress
from qdraft.llama.quantize import Quantized, Recipe, quantize
from qdraft.pairs.registry import Entry, PackagedModel
from qdraft.paths import cache_dir, new_file

Report = Callable[[Quantized], None]


def materialize(
    entry: Entry, *, threads: int, progress: Progress = no_progress, report: Report | None = None
) -> tuple[Path, Path | None]:
    """Return the paths of target and draft; quantize a packaged model the first time.

    The files stay in the cache; a build that fails or is interrupted leaves none. ``report`` gets
    the result of each quantization. Raises UsageError if the package is not installed, and
    ModelFileError if its content does not match the checksum in models.yaml.
    """
    if entry.packaged is None:
        return Path(entry.target), Path(entry.draft) if entry.draft else None
    folder = cache_dir() / "models" / f"{entry.name}-{entry.packaged.sha256[:12]}"
    target = folder / f"{entry.name}-{entry.target}.gguf"
    draft = folder / f"{entry.name}-{entry.draft}.gguf" if entry.draft else None

    def build(original: Path, path: Path, file_type: str) -> None:
        result = quantize(original, path, Recipe(file_type), threads=threads, progress=progress)
        if report:
            report(result)

    if not target.exists():
        build(packaged_file(entry, entry.packaged, folder), target, entry.target)
    if draft and entry.draft and not draft.exists():
        build(target, draft, entry.draft)
    return target, draft


def packaged_file(entry: Entry, packaged: PackagedModel, folder: Path) -> Path:
    """Check the packaged GGUF file and return its path; join its parts in ``folder`` first."""
    parts = [_locate(entry, packaged, f.package, f.path) for f in packaged.files]
    if len(parts) == 1:
        _require_sha256(parts[0], packaged.sha256)
        return parts[0]
    joined = folder / "source.gguf"
    if not joined.exists():
        size = sum(part.stat().st_size for part in parts)
        hint = "free some space, or set QDRAFT_CACHE_DIR to a folder on another disk"
        require_space(folder, size, f"the model of the pair {entry.name}", hint)
        with new_file(joined) as path:
            with path.open("wb") as out:
                for part in parts:
                    with part.open("rb") as data:
                        shutil.copyfileobj(data, out, 1 << 20)
            _require_sha256(path, packaged.sha256)
    return joined


def _locate(entry: Entry, packaged: PackagedModel, package: str, path: str) -> Path:
    """Return the path of this file in an installed package."""
    try:
        located = Path(str(distribution(package).locate_file(path)))
    except PackageNotFoundError as error:
        what = f"'qdraft[{packaged.extra}]'" if packaged.extra else package
        raise UsageError(
            f"the pair {entry.name} needs the package {package}, which is not installed",
            hint=f"install it with pip install {what}, or give your own files with -m and -d",
        ) from error
    if not os.path.isfile(located):
        raise ModelFileError(f"the package {package} lacks {path}", hint=f"reinstall {package}")
    return located


def _require_sha256(path: Path, expected: str) -> None:
    digest = hashlib.sha256()
    with path.open("rb") as data:
        while block := data.read(1 << 20):
            digest.update(block)
    if digest.hexdigest() != expected:
        raise ModelFileError(
            f"{path.name} does not match the SHA-256 in models.yaml",
            hint="reinstall the package: it may be damaged or of another version",
        )
