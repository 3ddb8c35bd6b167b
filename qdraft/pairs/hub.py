"""Downloads from the Hugging Face hub into its cache; they need the extra `hub`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from qdraft.disk import is_no_room, require_space
from qdraft.errors import DiskSpaceError, QDraftError, UsageError

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
    reached.
    """
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
        files = (choose or choose_files)(list(siblings), wanted)
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
        raise QDraftError(f"the hub cannot be reached: {reason}") from error
    except Exception as error:
        # These are errors of the HTTP client, which differs between versions of huggingface_hub.
        if type(error).__module__.split(".")[0] in ("httpx", "httpx2", "httpcore", "requests"):
            raise QDraftError(f"the hub cannot be reached: {error}") from error
        raise


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
    if not names:
        raise UsageError("this repository has no GGUF files")
    if wanted and wanted in names:
        chosen = [wanted]
    elif wanted:
        ends = re.compile(rf"(^|[-._/]){re.escape(wanted)}(\.gguf)?$", re.IGNORECASE)
        chosen = [name for name in names if ends.search(_model(name)) and not _is_projector(name)]
    else:
        chosen = [name for name in names if not _is_projector(name)]
    models = {_model(name) for name in chosen}
    if len(models) != 1:
        known = ", ".join(sorted({Path(_model(name)).name for name in names}))
        what = wanted or "language model"
        how_many = "more than one" if models else "no"
        raise UsageError(
            f"this repository has {how_many} {what}",
            hint=f"choose one with REPO:FILE or REPO:TYPE; there are {known}",
        )
    (model,) = models
    return sorted(name for name in names if _model(name) == model)


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
