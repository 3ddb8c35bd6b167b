"""Models that options name by their repository on the Hugging Face hub, as llama.cpp does."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from qdraft.errors import UsageError
from qdraft.pairs import hub

_REPOSITORY = re.compile(r"([^/:\s]+/[^/:\s]+)(?::([^:\s]+))?")


def use_downloads(params: dict[str, Any]) -> None:
    """Download what ``hf_repo`` and ``hf_repo_draft`` name, and make it ``target`` and ``draft``.

    ``params`` are the parameters of a command. Raises UsageError for options that contradict each
    other, and what ``hub.pull`` raises.
    """
    target, draft = params.get("hf_repo"), params.get("hf_repo_draft")
    clashes = {
        "--hf-repo": (target, {"target": "--model", "pair": "--pair"}),
        "--hf-repo-draft": (draft, {"draft": "--model-draft", "no_draft": "--no-draft"}),
    }
    for option, (value, others) in clashes.items():
        for name, other in others.items():
            if value and params.get(name):
                raise UsageError(f"{option} cannot be combined with {other}")
    if params.get("hf_file") and not target:
        raise UsageError("--hf-file needs --hf-repo")
    if draft and not (target or params.get("target")):
        raise UsageError("--hf-repo-draft needs a target", hint="name one with --hf-repo")
    if target:
        params["target"] = _download(target, "--hf-repo", params.get("hf_file"))
    if draft:
        params["draft"] = _download(draft, "--hf-repo-draft")


def _download(text: str, option: str, file: str | None = None) -> Path:
    """Return the path of the model of OWNER/NAME[:TYPE], in the cache of the hub."""
    match = _REPOSITORY.fullmatch(text)
    if not match:
        raise UsageError(f"{option} is {text} but must be OWNER/NAME or OWNER/NAME:TYPE")
    repo, file_type = match.groups()
    return hub.pull(repo, file or file_type, hub.choose_as_llama_cpp)[0]
