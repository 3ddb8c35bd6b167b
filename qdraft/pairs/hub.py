"""Downloads from the Hugging Face hub into its cache; they need the extra `hub`."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from qdraft.disk import is_no_room, require_space
from qdraft.errors import DiskSpaceError, ModelFileError, QDraftError, UsageError
from qdraft.gguf.parts import read_parts

log = logging.getLogger(__name__)

_PIECE = re.compile(r"\.gguf[.-](part|split)[-_.]?\w+$", re.IGNORECASE)
_PART = re.compile(r"-\d{5}-of-\d{5}(?=\.gguf$)", re.IGNORECASE)
_HINT = "free some space, or set HF_HOME to a folder on another disk"


Choose = Callable[[Sequence[str], str | None], list[str]]

# Parts of names of files that are not language models, as llama.cpp knows them.
_OTHER_KINDS = ("mmproj", "imatrix", "mtp-", "eagle3-", "dflash-", "dspark-")


def pull(repo: str, wanted: str | None = None, choose: Choose | None = None) -> list[Path]:
    """Download all parts of one model of ``repo`` and return their paths in the hub's cache.

    ``wanted`` is a file of the repository or a file type such as Q4_K_M; None takes the only
    model. ``choose`` stands in for ``choose_files``. Raises UsageError if there is no such model,
    DiskSpaceError if the disk has too little space for it, and QDraftError if the hub cannot be
    reached and the cache lacks the model. If only the cache has it, this is a warning.
    """
    choose = choose or choose_files
    try:
        from huggingface_hub import HfApi, hf_hub_download
        from huggingface_hub.errors import (
            HfHubHTTPError,
            HFValidationError,
            RepositoryNotFoundError,
        )
    except ImportError as error:
        raise UsageError(
            "downloading needs the package huggingface_hub, which is not installed",
            hint="install it with pip install 'qdraft[hub]', then run "
            f"qdraft models pull {repo}:{wanted or 'Q4_K_M'}",
        ) from error
    try:
        info = HfApi().model_info(repo, files_metadata=True)
        siblings = {file.rfilename: file.size or 0 for file in info.siblings or ()}
        files = choose(list(siblings), wanted)
        _require_space(repo, info.sha, {file: siblings[file] for file in files})
        return [Path(hf_hub_download(repo, file, revision=info.sha)) for file in files]
    except RepositoryNotFoundError as error:
        raise UsageError(
            f"the hub has no repository {repo} that you may read",
            hint="log in for private and gated repositories: hf auth login",
        ) from error
    except HFValidationError as error:
        raise UsageError(f"{repo} is not a repository name (owner/name)") from error
    except (HfHubHTTPError, OSError) as error:
        if is_no_room(error):
            raise DiskSpaceError(f"{repo} does not fit the hub's cache", hint=_HINT) from error
        reason = (str(error) or type(error).__name__).splitlines()[0]
    except Exception as error:
        # These are errors of the HTTP client, which differs between versions of huggingface_hub.
        if type(error).__module__.split(".")[0] not in ("httpx", "httpx2", "httpcore", "requests"):
            raise
        reason = str(error)
    return _find_cached(repo, wanted, choose, reason)


def _find_cached(repo: str, wanted: str | None, choose: Choose, reason: str) -> list[Path]:
    """Return the files of a model in the hub's cache, from the newest snapshot that has it."""
    from huggingface_hub.constants import HF_HUB_CACHE, HF_HUB_OFFLINE

    what = "HF_HUB_OFFLINE is set" if HF_HUB_OFFLINE else f"the hub cannot be reached: {reason}"
    for snapshot in _snapshots(Path(HF_HUB_CACHE) / f"models--{repo.replace('/', '--')}"):
        names = [path.relative_to(snapshot).as_posix() for path in snapshot.rglob("*")]
        try:
            paths = [snapshot / name for name in choose(names, wanted)]
            read_parts(paths[0])  # all of them, or an error
        except (UsageError, ModelFileError) as error:
            log.debug("%s: %s", snapshot, error)
            continue
        if all(map(os.path.isfile, paths)):
            log.warning("%s: this is the copy in the cache, which may be old", what)
            return paths
    model = f"{repo}:{wanted}" if wanted else repo
    raise QDraftError(f"{what}, and the cache has no {model}")


def _snapshots(folder: Path) -> list[Path]:
    """Return the snapshots of a repository in the cache: that of its main branch, then newer first.

    A download by its commit, as qdraft does it, leaves no reference to the branch.
    """
    try:
        main = (folder / "refs" / "main").read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        main = ""
    try:
        snapshots = [path for path in (folder / "snapshots").iterdir() if path.is_dir()]
        return sorted(snapshots, key=lambda path: (path.name != main, -path.stat().st_mtime))
    except OSError:
        return []


def _require_space(repo: str, revision: str | None, sizes: Mapping[str, int]) -> None:
    """Raise DiskSpaceError unless what the hub's cache lacks of these files fits its disk."""
    from huggingface_hub import constants, try_to_load_from_cache

    missing = [
        size
        for file, size in sizes.items()
        if not isinstance(try_to_load_from_cache(repo, file, revision=revision), str)
    ]
    require_space(Path(constants.HF_HUB_CACHE), sum(missing), f"the download of {repo}", _HINT)


def choose_files(files: Sequence[str], wanted: str | None) -> list[str]:
    """Return the files of the wanted model. Raises UsageError, which lists the models."""
    names = [name for name in files if name.lower().endswith(".gguf")]
    _refuse_pieces(files, names, wanted)
    if not names:
        raise UsageError("this repository has no GGUF files")
    if wanted and wanted in names:
        chosen = [wanted]
    elif wanted:
        # The type ends the name of the file, or of a folder that it is in.
        ends = re.compile(rf"(^|[-._/]){re.escape(wanted)}(\.gguf$|/|$)", re.IGNORECASE)
        chosen = [name for name in names if ends.search(_model(name)) and not _is_projector(name)]
    else:
        chosen = [name for name in names if not _is_projector(name)]
    models = {_model(name) for name in chosen}
    if len(models) != 1:
        known = ", ".join(sorted({_model(name) for name in names}))
        what = wanted or "language model"
        how_many = "more than one" if models else "no"
        raise UsageError(
            f"this repository has {how_many} {what}",
            hint=f"choose one with REPO:FILE or REPO:TYPE; there are {known}",
        )
    (model,) = models
    return sorted(name for name in names if _model(name) == model)


def _refuse_pieces(files: Sequence[str], names: Sequence[str], wanted: str | None) -> None:
    """Raise UsageError if the wanted model is there only as pieces of one file, which cat joins."""
    pieces = sorted(file for file in files if _PIECE.search(file))
    if wanted:
        pieces = [piece for piece in pieces if wanted.lower() in piece.lower()]
        names = [name for name in names if wanted.lower() in name.lower()]
    if pieces and not names:
        whole = _PIECE.sub(".gguf", Path(pieces[0]).name)
        raise UsageError(
            f"{whole} is there in pieces, which qdraft does not join: {', '.join(pieces)}",
            hint=f"download its pieces and join them in this order with cat PIECE... > {whole}",
        )


def choose_as_llama_cpp(files: Sequence[str], wanted: str | None) -> list[str]:
    """Return the files of the wanted model; of Q4_K_M, Q8_0 or the first if none is named.

    Raises UsageError as ``choose_files`` does.
    """
    models = [
        name
        for name in files
        if name.lower().endswith(".gguf") and not any(kind in name for kind in _OTHER_KINDS)
    ]
    if wanted or not models:
        return choose_files(files, wanted)
    preferred = (re.compile(f"{kind}[.-]", re.IGNORECASE) for kind in ("Q4_K_M", "Q8_0", ""))
    first = next(name for kind in preferred for name in models if kind.search(name))
    return sorted(name for name in models if _model(name) == _model(first))


def _model(name: str) -> str:
    """Return the name of a file without its part number."""
    return _PART.sub("", name)


def _is_projector(name: str) -> bool:
    return "mmproj" in name.lower()
