"""The importance matrix to quantize with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from qdraft.cli.options.group import Group, option
from qdraft.errors import UsageError

PANEL = "Importance matrix"


@dataclass(frozen=True, kw_only=True)
class ImatrixOptions(Group):
    """The importance matrix to quantize with, or none."""

    matrix: Annotated[
        Path | None,
        option(
            PANEL,
            "--imatrix",
            help="Use this importance matrix, a GGUF or .dat file.",
            default="qdraft collects one",
        ),
    ] = None
    no_matrix: Annotated[
        bool, option(PANEL, "--no-imatrix", help="Quantize without an importance matrix.")
    ] = False

    def __post_init__(self) -> None:
        if self.matrix and self.no_matrix:
            raise UsageError("--imatrix cannot be combined with --no-imatrix")
