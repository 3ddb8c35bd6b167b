"""Which models: two files, or a pair of models.yaml."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from qdraft.cli.options.group import Group, option
from qdraft.errors import UsageError

_PANEL = "Models"


@dataclass(frozen=True, kw_only=True)
class ModelOptions(Group):
    """The options that name models."""

    target: Annotated[Path | None, option(_PANEL, "-m", "--model", help="Target GGUF file.")] = None
    draft: Annotated[
        Path | None, option(_PANEL, "-d", "-md", "--model-draft", help="Draft GGUF file.")
    ] = None
    hf_repo: Annotated[
        str | None,
        option(
            _PANEL,
            "-hf",
            "-hfr",
            "--hf-repo",
            help="Download the target from the Hugging Face hub: OWNER/NAME or OWNER/NAME:TYPE. "
            "Without a type, Q4_K_M, else Q8_0, else the first file.",
        ),
    ] = None
    hf_file: Annotated[
        str | None,
        option(_PANEL, "-hff", "--hf-file", help="File of --hf-repo to download."),
    ] = None
    hf_repo_draft: Annotated[
        str | None,
        option(
            _PANEL,
            "-hfd",
            "-hfrd",
            "--hf-repo-draft",
            help="Download the draft from the Hugging Face hub: OWNER/NAME or OWNER/NAME:TYPE.",
        ),
    ] = None
    pair: Annotated[
        str | None,
        option(_PANEL, "--pair", help="Use this pair of models.yaml.", default="your default pair"),
    ] = None
    models_file: Annotated[
        Path | None,
        option(
            _PANEL,
            "--models-file",
            help="Read your pairs from this file.",
            default="models.yaml in your configuration folder",
        ),
    ] = None
    no_draft: Annotated[bool, option(_PANEL, "--no-draft", help="Run the target alone.")] = False

    def __post_init__(self) -> None:
        if self.draft and not self.target:
            raise UsageError("--model-draft needs a target", hint="name one with --model")
        if self.target and self.pair:
            raise UsageError("--pair cannot be combined with --model")
        if self.draft and self.no_draft:
            raise UsageError("--model-draft cannot be combined with --no-draft")
        if self.target and self.models_file:
            raise UsageError("--models-file cannot be combined with --model, which names a file")
