"""The GGUF files that other programs keep on this machine, and the pairs among them."""

from __future__ import annotations

import json
import logging
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from qdraft.decoding.policy.model import speedup
from qdraft.errors import ModelFileError
from qdraft.gguf.facts import Facts, read_facts
from qdraft.paths import home_dir, why_closed

log = logging.getLogger(__name__)

_OLLAMA_MODEL = "application/vnd.ollama.image.model"
# The home of the user "ollama", whom the installer makes for the service on Linux.
_OLLAMA_SERVICE = Path("/usr/share/ollama")
_MODEL_BYTES = 1 << 20  # smaller files hold no weights

# The alpha to expect of a draft with at most so many bits per weight: sampled drafting, shared KV
# cells. It is low for large models, which lose less.
_ALPHA_BY_BITS = ((2.0, 0.50), (3.0, 0.66), (4.0, 0.80), (5.2, 0.92), (7.0, 0.96), (33.0, 0.99))
_FLAT_V = 1.15  # v of a target that waits for memory, at the widths that pay off


@dataclass(frozen=True, slots=True)
class Proposal:
    """Two files of one model; ``expected`` is the speed-up to expect from their sizes."""

    target: Facts
    draft: Facts
    expected: float


def known_folders(unreadable: list[str]) -> list[Path]:
    """Return the folders of the Hugging Face hub, LM Studio and llama.cpp that exist.

    Adds to ``unreadable`` a sentence about each that is closed to this user.
    """
    hub = os.environ.get("HF_HOME")
    candidates: list[str | Path | None] = [
        os.environ.get("HF_HUB_CACHE") or (Path(hub) / "hub" if hub else None),
        os.environ.get("LLAMA_CACHE"),
    ]
    if home := home_dir():
        candidates += [
            home / ".cache" / "huggingface" / "hub",
            home / ".lmstudio" / "models",
            home / ".cache" / "lm-studio" / "models",
            home / ".cache" / "llama.cpp",
            home / "Library" / "Caches" / "llama.cpp",
        ]
    folders = dict.fromkeys(Path(folder) for folder in candidates if folder)
    return [folder for folder in folders if _is_open(folder, unreadable)]


def _is_open(folder: Path, unreadable: list[str]) -> bool:
    """Tell whether a folder is there and open; add a sentence to ``unreadable`` if not open."""
    if why := why_closed(folder):
        unreadable.append(f"{folder} cannot be read: {why}")
        return False
    return os.path.isdir(folder)


def ollama_models(unreadable: list[str], folder: Path | None = None) -> Iterator[Path]:
    """Give the model files of Ollama; only its manifests tell them from its other blobs.

    Looks in ``folder``, else in OLLAMA_MODELS, else in the folders of the user and of the service
    that Ollama's installer sets up. Adds to ``unreadable`` a sentence about each file and folder
    that cannot be read.
    """
    named = folder or os.environ.get("OLLAMA_MODELS")
    home = home_dir()
    homes = [*([home] if home else []), _OLLAMA_SERVICE]
    roots = [Path(named)] if named else [each / ".ollama" / "models" for each in homes]
    for root in dict.fromkeys(roots):
        if _is_open(root, unreadable):
            for manifest in _files(root / "manifests", unreadable):
                yield from _blobs_of(manifest, root / "blobs", unreadable)


def _blobs_of(manifest: Path, blobs: Path, unreadable: list[str]) -> Iterator[Path]:
    """Give the models that one of Ollama's manifests names."""
    try:
        layers = json.loads(manifest.read_bytes())["layers"]
        digests = [str(x["digest"]) for x in layers if x["mediaType"] == _OLLAMA_MODEL]
    except OSError as error:
        unreadable.append(f"{manifest} cannot be read: {error.strerror or error}")
        return
    except (ValueError, KeyError, TypeError, RecursionError):
        log.debug("%s is not a manifest", manifest)
        return
    for digest in digests:
        name = digest.replace(":", "-")
        if name != os.path.basename(name):
            log.debug("%s names a file elsewhere", manifest)
            continue
        if why := why_closed(blobs / name):
            unreadable.append(f"{blobs / name} cannot be read: {why}")
        elif os.path.isfile(blobs / name):
            yield blobs / name


def gguf_files(folders: Iterable[Path], unreadable: list[str]) -> Iterator[Path]:
    """Give the files below ``folders`` whose names end in .gguf in any case, also through links.

    Adds to ``unreadable`` a sentence about each file and folder that cannot be read.
    """
    for folder in folders:
        for path in _files(folder, unreadable):
            if path.suffix.lower() != ".gguf":
                continue
            try:
                mode = os.stat(path).st_mode
            except OSError as error:  # a link to nowhere, to itself or into a closed folder
                unreadable.append(f"{path} cannot be read: {error.strerror or error}")
                continue
            if stat.S_ISREG(mode):
                yield path


def _files(folder: Path, unreadable: list[str]) -> Iterator[Path]:
    """Give everything below a folder that is no folder, in order."""

    def note(error: OSError) -> None:
        if not isinstance(error, (FileNotFoundError, NotADirectoryError)):
            unreadable.append(f"{error.filename} cannot be read: {error.strerror or error}")

    paths = (Path(top) / name for top, _, names in os.walk(folder, onerror=note) for name in names)
    return iter(sorted(paths))


def read_all(paths: Iterable[Path], unreadable: list[str]) -> list[Facts]:
    """Return the models among ``paths``. Adds to ``unreadable`` the errors of other files.

    A split model counts once, and so does a file with several names.
    """
    models: dict[str, Facts] = {}
    for path in paths:
        try:
            real = os.path.realpath(path)
            if real in models or os.stat(real).st_size < _MODEL_BYTES:
                continue
            facts = read_facts(path)
        except ModelFileError as error:
            unreadable.append(str(error))
            continue
        except OSError as error:
            unreadable.append(f"{path} cannot be read: {error.strerror or error}")
            continue
        if facts.kind == "model":
            models.setdefault(os.path.realpath(facts.path), facts)
    return list(models.values())


def propose(models: Sequence[Facts]) -> list[Proposal]:
    """Return pairs of files with one model's metadata, the largest expected speed-up first."""
    pairs = []
    for target in models:
        for draft in models:
            smaller = draft.bits_per_weight < 0.8 * target.bits_per_weight
            if smaller and _model(target) == _model(draft):
                pairs.append(Proposal(target, draft, _expected(target, draft)))
    return sorted(pairs, key=lambda pair: -pair.expected)


def _model(facts: Facts) -> tuple[object, ...]:
    """Return what all quantizations of one model have in common."""
    shape = (facts.n_layers, facts.n_embd, facts.n_ff, facts.n_head, facts.n_head_kv)
    return (facts.architecture, *shape, facts.n_experts, facts.tokens_sha256, facts.name)


def _expected(target: Facts, draft: Facts) -> float:
    """Return the expected speed-up with the best draft length up to 8."""
    alpha = next(a for bits, a in _ALPHA_BY_BITS if draft.bits_per_weight <= bits or bits > 32)
    c = draft.n_bytes / target.n_bytes
    return max(speedup(alpha, k, c, _FLAT_V) for k in range(1, 9))
