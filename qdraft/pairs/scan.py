"""The GGUF files that other programs keep on this machine, and the pairs among them."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from qdraft.decoding.policy.model import speedup
from qdraft.errors import ModelFileError
from qdraft.gguf.facts import Facts, read_facts

log = logging.getLogger(__name__)

_OLLAMA_MODEL = "application/vnd.ollama.image.model"
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


def known_folders() -> list[Path]:
    """Return the folders of the Hugging Face hub, LM Studio and llama.cpp that exist."""
    home = Path.home()
    hub = os.environ.get("HF_HOME")
    candidates = (
        os.environ.get("HF_HUB_CACHE") or (Path(hub) / "hub" if hub else None),
        home / ".cache" / "huggingface" / "hub",
        home / ".lmstudio" / "models",
        home / ".cache" / "lm-studio" / "models",
        os.environ.get("LLAMA_CACHE"),
        home / ".cache" / "llama.cpp",
        home / "Library" / "Caches" / "llama.cpp",
    )
    folders = dict.fromkeys(Path(folder) for folder in candidates if folder)
    return [folder for folder in folders if folder.is_dir()]


def ollama_models(folder: Path | None = None) -> Iterator[Path]:
    """Give the model files of Ollama; only its manifests tell them from its other blobs."""
    root = folder or Path(os.environ.get("OLLAMA_MODELS") or Path.home() / ".ollama" / "models")
    for manifest in sorted((root / "manifests").rglob("*")):
        if not manifest.is_file():
            continue
        try:
            layers = json.loads(manifest.read_text(encoding="utf-8"))["layers"]
            digests = [x["digest"] for x in layers if x["mediaType"] == _OLLAMA_MODEL]
        except (OSError, ValueError, KeyError, TypeError):
            log.debug("%s is not a manifest", manifest)
            continue
        for digest in digests:
            blob = root / "blobs" / str(digest).replace(":", "-")
            if blob.is_file():
                yield blob


def gguf_files(folders: Iterable[Path]) -> Iterator[Path]:
    """Give the files below ``folders`` whose names end in .gguf in any case, also through links."""
    for folder in folders:
        for path in sorted(folder.rglob("*")):
            if path.suffix.lower() == ".gguf" and path.is_file():
                yield path


def read_all(paths: Iterable[Path]) -> tuple[list[Facts], list[str]]:
    """Return the models among ``paths``, and the errors of files that cannot be read.

    A split model counts once, and so does a file with several names.
    """
    models: dict[Path, Facts] = {}
    errors: list[str] = []
    for path in paths:
        real = path.resolve()
        if real in models or real.stat().st_size < _MODEL_BYTES:
            continue
        try:
            facts = read_facts(path)
        except ModelFileError as error:
            errors.append(str(error))
            continue
        if not facts.refusal:
            models.setdefault(facts.path.resolve(), facts)
    return list(models.values()), errors


def propose(models: Sequence[Facts]) -> list[Proposal]:
    """Return pairs of files with one model's metadata, the largest expected speed-up first."""
    pairs = []
    for target in models:
        for draft in models:
            smaller = draft.bits_per_weight < 0.8 * target.bits_per_weight
            if smaller and not target.recurrent and _model(target) == _model(draft):
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
