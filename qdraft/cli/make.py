"""`qdraft make`: a draft from a target, with an importance matrix of its own, as a named pair."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from qdraft.cli.options.devices import DeviceOptions
from qdraft.cli.options.group import Group, Only, option, takes_options
from qdraft.cli.options.models import ModelOptions
from qdraft.cli.options.output import OutputOptions
from qdraft.cli.options.text import read_text_file
from qdraft.errors import UsageError
from qdraft.gguf.facts import require_model
from qdraft.llama.quantize import Planned, Recipe
from qdraft.llama.quantize import plan as preview
from qdraft.making.calibration import MAX_WRITTEN
from qdraft.making.job import DraftJob, NamedDraft
from qdraft.making.try_recipes import TriedRecipe
from qdraft.render.console import show_json, talk_console
from qdraft.render.make import ladder_view, made_view, planned_view
from qdraft.render.progress import ProgressBars

_DRAFT, _RECIPE, _MATRIX = "Draft", "Recipe", "Importance matrix"
_TYPE = "Q2_K"
_N_WRITTEN = 2048

TargetFile = Annotated[
    Path, typer.Argument(metavar="TARGET.gguf", help="GGUF file to make a draft of.")
]


@dataclass(frozen=True, kw_only=True)
class DraftOptions(Group):
    """Where the draft goes, under which name, and how it is judged."""

    out: Annotated[
        Path | None,
        option(_DRAFT, "--out", help="Write the draft to this file.", default="beside the target"),
    ] = None
    name: Annotated[
        str | None,
        option(_DRAFT, "--name", help="Name of the pair.", default="name of the draft's file"),
    ] = None
    force: Annotated[
        bool, option(_DRAFT, "--force", help="Overwrite existing files and pairs.")
    ] = False
    dry_run: Annotated[
        bool, option(_DRAFT, "--dry-run", help="Show what the draft would be, and write nothing.")
    ] = False
    search: Annotated[
        bool,
        option(
            _DRAFT,
            "--search",
            help="Try several recipes, or each --type, and make the draft that is fastest.",
        ),
    ] = False
    n_places: Annotated[
        int,
        option(
            _DRAFT,
            "--measure",
            min=0,
            max=2048,
            help="Held-out tokens to compare the draft with the target over; 0 skips the "
            "comparison.",
        ),
    ] = 180


@dataclass(frozen=True, kw_only=True)
class RecipeOptions(Group):
    """How the target is quantized, under llama-quantize's names."""

    types: Annotated[
        list[str] | None,
        option(_RECIPE, "--type", help="File type of the draft (repeatable).", default=_TYPE),
    ] = None
    prune_layers: Annotated[
        str | None,
        option(_RECIPE, "--prune-layers", help="Layers to leave out, for example 20,21."),
    ] = None
    tensor_type: Annotated[
        list[str] | None,
        option(
            _RECIPE,
            "--tensor-type",
            help="Type of the tensors whose names match: NAME=TYPE (repeatable).",
        ),
    ] = None
    output_tensor_type: Annotated[
        str | None, option(_RECIPE, "--output-tensor-type", help="Type of the output tensor.")
    ] = None
    token_embedding_type: Annotated[
        str | None,
        option(_RECIPE, "--token-embedding-type", help="Type of the token embeddings."),
    ] = None

    @property
    def is_own(self) -> bool:
        """Does the user give more of a recipe than types?"""
        return any(
            (
                self.tensor_type,
                self.prune_layers,
                self.output_tensor_type,
                self.token_embedding_type,
            )
        )

    def recipes(self, matrix: Path | None) -> list[Recipe]:
        """Return a recipe for each type. Raises UsageError."""
        return [
            Recipe(
                file_type.upper(),
                matrix,
                parse_tensor_types(self.tensor_type),
                self.output_tensor_type and self.output_tensor_type.lower(),
                self.token_embedding_type and self.token_embedding_type.lower(),
                parse_layers(self.prune_layers),
            )
            for file_type in dict.fromkeys(self.types or [_TYPE])
        ]


@dataclass(frozen=True, kw_only=True)
class MatrixOptions(Group):
    """Where the importance matrix comes from."""

    matrix: Annotated[
        Path | None,
        option(_MATRIX, "--imatrix", help="Use this importance matrix: GGUF, or .dat."),
    ] = None
    no_matrix: Annotated[
        bool, option(_MATRIX, "--no-imatrix", help="Quantize without an importance matrix.")
    ] = False
    calibration: Annotated[
        Path | None,
        option(
            _MATRIX,
            "--calibration",
            help="Text to collect the importance matrix over.",
            default="a small built-in text",
        ),
    ] = None
    written: Annotated[
        int | None,
        option(
            _MATRIX,
            "--written",
            min=0,
            max=MAX_WRITTEN,
            help="Extra calibration tokens generated by the target.",
            default=str(_N_WRITTEN),
        ),
    ] = None

    def __post_init__(self) -> None:
        of_collecting = self.first_given("calibration", "written")
        if self.no_matrix and (other := self.first_given("matrix") or of_collecting):
            raise UsageError(f"{other} cannot be combined with --no-imatrix")
        if self.matrix and of_collecting:
            raise UsageError(f"{of_collecting} cannot be combined with --imatrix")


@takes_options
def make(
    target: TargetFile,
    draft: DraftOptions,
    recipe: RecipeOptions,
    matrix: MatrixOptions,
    devices: Annotated[DeviceOptions, Only("threads")],
    models: Annotated[ModelOptions, Only("models_file")],
    output: OutputOptions,
) -> None:
    """Make a draft of a target and register the pair.

    qdraft collects an importance matrix, quantizes the target, compares the draft with the target,
    and adds the pair to models.yaml. The importance matrix comes from the target itself, over a
    built-in text and text that the target generates.
    """
    _refuse_combinations(draft, recipe)
    facts = require_model(target)
    recipes = recipe.recipes(matrix.matrix)
    if draft.dry_run:
        _show_previews([preview(facts.path, each) for each in recipes], output)
        return
    job = DraftJob(
        facts,
        draft.out,
        draft.name,
        models.models_file,
        devices.threads,
        draft.force,
        draft.n_places,
    )
    job.check(recipes)
    ladder: list[TriedRecipe] = []
    with ProgressBars(quiet=output.quiet) as bars:
        matrix_file = _find_matrix(job, matrix, bars)
        recipes = [replace(each, imatrix=matrix_file) for each in recipes]
        if draft.search:
            ladder = job.search(recipes if recipe.types else None, matrix_file, bars.report)
            recipes = [rung.recipe for rung in ladder[:1] if rung.n_draft]
            job.check(recipes)
        made = [job.make(each, bars.report) for each in recipes]
    _show(ladder, made, output)


def _refuse_combinations(draft: DraftOptions, recipe: RecipeOptions) -> None:
    if draft.search and draft.dry_run:
        raise UsageError("--dry-run cannot be combined with --search")
    if draft.search and recipe.is_own:
        names = ("tensor_type", "prune_layers", "output_tensor_type", "token_embedding_type")
        raise UsageError(f"{recipe.first_given(*names)} cannot be combined with --search")
    if not draft.search and len(recipe.types or ()) > 1 and (draft.out or draft.name):
        option = draft.first_given("out", "name")
        raise UsageError(f"{option} cannot be combined with more than one --type")


def _find_matrix(job: DraftJob, matrix: MatrixOptions, bars: ProgressBars) -> Path | None:
    """The importance matrix that was given, or one that is collected now, or none."""
    if matrix.matrix or matrix.no_matrix:
        return matrix.matrix
    text = read_text_file(matrix.calibration) if matrix.calibration else None
    n_written = _N_WRITTEN if matrix.written is None else matrix.written
    return job.collect_matrix(text, n_written, bars.report)


def _show_previews(previews: Sequence[Planned], output: OutputOptions) -> None:
    if output.as_json:
        show_json({"planned": previews})
    else:
        talk_console().print(planned_view(previews))


def _show(ladder: Sequence[TriedRecipe], made: Sequence[NamedDraft], output: OutputOptions) -> None:
    if output.as_json:
        show_json({"drafts": made, "ladder": ladder})
    elif not output.quiet:
        if ladder:
            talk_console().print(ladder_view(ladder))
        for draft in made:
            talk_console().print(made_view(draft.made, draft.pair, draft.models_file))


def parse_tensor_types(items: list[str] | None) -> tuple[tuple[str, str], ...]:
    """Return the pattern and the type of each NAME=TYPE. Raises UsageError."""
    pairs = []
    for item in items or []:
        pattern, sign, kind = item.rpartition("=")
        if not (sign and pattern and kind):
            raise UsageError(
                f"--tensor-type is {item} but must be NAME=TYPE",
                hint="for example --tensor-type attn_v=q4_K",
            )
        pairs.append((pattern, kind.lower()))
    return tuple(pairs)


def parse_layers(text: str | None) -> tuple[int, ...]:
    """Return the numbers of a list such as 20,21. Raises UsageError."""
    try:
        return tuple(int(part) for part in text.split(",")) if text else ()
    except ValueError:
        raise UsageError(f"--prune-layers is {text} but must be numbers such as 20,21") from None
