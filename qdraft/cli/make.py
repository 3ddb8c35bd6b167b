"""`qdraft make`: a draft from a target, with an importance matrix of its own, as a named pair."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from qdraft.cli import machine_options as mach
from qdraft.cli import options as opt
from qdraft.errors import UsageError
from qdraft.gguf.facts import require_model
from qdraft.llama.quantize import Planned, Recipe, plan
from qdraft.making.calibration import MAX_WRITTEN
from qdraft.making.job import DraftJob, NamedDraft
from qdraft.making.try_recipes import TriedRecipe
from qdraft.render.console import show_json, talk_console
from qdraft.render.make import ladder_view, made_view, planned_view
from qdraft.render.progress import Bars

_DRAFT, _MATRIX = "Draft", "Importance matrix"

TargetFile = Annotated[Path, typer.Argument(metavar="TARGET.gguf", help="The file to make it of.")]
Types = Annotated[
    list[str] | None,
    opt.option(_DRAFT, "--type", help="llama.cpp's file type (repeatable).", default="Q2_K"),
]
Out = Annotated[
    Path | None,
    opt.option(_DRAFT, "--out", help="Where to write it.", default="beside the target"),
]
Name = Annotated[
    str | None, opt.option(_DRAFT, "--name", help="Name of the pair.", default="as the file")
]
Force = Annotated[bool, opt.option(_DRAFT, "--force", help="Overwrite what is there.")]
DryRun = Annotated[bool, opt.option(_DRAFT, "--dry-run", help="Only show what it would be.")]
Search = Annotated[
    bool,
    opt.option(
        _DRAFT, "--search", help="Try several recipes (or the --type given) and make the fastest."
    ),
]
Measure = Annotated[
    int,
    opt.option(
        _DRAFT,
        "--measure",
        min=0,
        max=2048,
        help="Tokens to compare with the target over; 0: none.",
    ),
]
Prune = Annotated[
    str | None, opt.option(_DRAFT, "--prune-layers", help="Layers to leave out, as 20,21.")
]
TensorTypes = Annotated[
    list[str] | None,
    opt.option(_DRAFT, "--tensor-type", help="NAME=TYPE for tensors by pattern (repeatable)."),
]
OutputType = Annotated[
    str | None, opt.option(_DRAFT, "--output-tensor-type", help="Type of the output tensor.")
]
EmbeddingType = Annotated[
    str | None, opt.option(_DRAFT, "--token-embedding-type", help="Type of the embeddings.")
]
Matrix = Annotated[
    Path | None, opt.option(_MATRIX, "--imatrix", help="A given one, GGUF or legacy .dat.")
]
NoMatrix = Annotated[bool, opt.option(_MATRIX, "--no-imatrix", help="Quantize without one.")]
Calibration = Annotated[
    Path | None,
    opt.option(
        _MATRIX, "--calibration", help="Text to collect it over.", default="a small built-in one"
    ),
]
Written = Annotated[
    int | None,
    opt.option(
        _MATRIX,
        "--written",
        min=0,
        max=MAX_WRITTEN,
        help="Tokens that the target writes for it besides.",
        default="2048",
    ),
]


def make(
    target: TargetFile,
    types: Types = None,
    out: Out = None,
    name: Name = None,
    force: Force = False,
    dry_run: DryRun = False,
    search: Search = False,
    n_places: Measure = 180,
    prune_layers: Prune = None,
    tensor_type: TensorTypes = None,
    output_tensor_type: OutputType = None,
    token_embedding_type: EmbeddingType = None,
    matrix: Matrix = None,
    no_matrix: NoMatrix = False,
    calibration: Calibration = None,
    written: Written = None,
    threads: mach.Threads = 0,
    models_file: opt.ModelsFile = None,
    as_json: opt.Json = False,
    quiet: opt.Quiet = False,
) -> None:
    """Make a draft of a target: importance matrix, quantization, proof, a pair by name.

    The matrix is collected from the target itself, over a built-in text and text of its own.
    """
    if no_matrix and (matrix or calibration or written is not None):
        raise UsageError("--no-imatrix and options of the matrix do not go together")
    if matrix and (calibration or written is not None):
        raise UsageError("give either --imatrix or a text to collect it over, not both")
    own = (tensor_type, prune_layers, output_tensor_type, token_embedding_type)
    if search and (dry_run or any(own)):
        raise UsageError("--search and a recipe of your own do not go together")
    if not search and len(types or ()) > 1 and (out or name):
        raise UsageError("--out and --name are for one --type")
    facts = require_model(target)
    wanted = [
        Recipe(
            kind.upper(),
            matrix,
            parse_tensor_types(tensor_type),
            output_tensor_type and output_tensor_type.lower(),
            token_embedding_type and token_embedding_type.lower(),
            parse_layers(prune_layers),
        )
        for kind in dict.fromkeys(types or ["Q2_K"])
    ]
    if dry_run:
        _show_planned([plan(facts.path, recipe) for recipe in wanted], as_json=as_json)
        return
    job = DraftJob(facts, out, name, models_file, threads, force, n_places)
    job.check(wanted)
    text = opt.read_text_file(calibration) if calibration else None
    with Bars(quiet=quiet) as bars:
        if not (matrix or no_matrix):
            matrix = job.collect_matrix(text, 2048 if written is None else written, bars.step)
        wanted = [dataclasses.replace(recipe, imatrix=matrix) for recipe in wanted]
        ladder = job.search(wanted if types else None, matrix, bars.step) if search else []
        if search:
            wanted = [rung.recipe for rung in ladder[:1] if rung.n_draft]
            job.check(wanted)
        made = [job.make(recipe, bars.step) for recipe in wanted]
    _show(ladder, made, as_json=as_json, quiet=quiet)


def _show_planned(planned: Sequence[Planned], *, as_json: bool) -> None:
    if as_json:
        show_json({"planned": planned})
    else:
        talk_console().print(planned_view(planned))


def _show(
    ladder: Sequence[TriedRecipe], made: Sequence[NamedDraft], *, as_json: bool, quiet: bool
) -> None:
    if as_json:
        show_json({"drafts": made, "ladder": ladder})
    elif not quiet:
        if ladder:
            talk_console().print(ladder_view(ladder))
        for draft in made:
            talk_console().print(made_view(draft.made, draft.pair, draft.models_file))


def parse_tensor_types(items: list[str] | None) -> tuple[tuple[str, str], ...]:
    """NAME=TYPE, as llama-quantize has it."""
    pairs = []
    for item in items or []:
        pattern, found, kind = item.rpartition("=")
        if not (found and pattern and kind):
            raise UsageError(f"--tensor-type is {item}, but must be NAME=TYPE, as attn_v=q4_K")
        pairs.append((pattern, kind.lower()))
    return tuple(pairs)


def parse_layers(text: str | None) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(",")) if text else ()
    except ValueError:
        raise UsageError(f"--prune-layers is {text}, but must be numbers such as 20,21") from None
