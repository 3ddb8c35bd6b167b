"""`qdraft make`: a draft from a target, with an importance matrix of its own, as a named pair."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from qdraft.cli import machine_options as mach
from qdraft.cli import options as opt
from qdraft.errors import PairError, UsageError
from qdraft.gguf.facts import Facts, require_model
from qdraft.llama.params import EngineParams
from qdraft.llama.quantize import Planned, Recipe, plan
from qdraft.making.calibration import MAX_WRITTEN
from qdraft.making.make import make_draft, make_matrix, search_draft
from qdraft.making.try_recipes import Rung
from qdraft.pairs import editing as file_of_models
from qdraft.pairs import registry
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
    job = Job(facts, out, name, models_file, threads, force, n_places)
    job.check(wanted)
    text = opt.read_text_file(calibration) if calibration else None
    with Bars(quiet=quiet) as bars:
        if not (matrix or no_matrix):
            matrix = job.collect(text, 2048 if written is None else written, bars)
        wanted = [dataclasses.replace(recipe, imatrix=matrix) for recipe in wanted]
        ladder = job.search(wanted if types else None, matrix, bars) if search else []
        if search:
            wanted = [rung.recipe for rung in ladder[:1] if rung.n_draft]
            job.check(wanted)
        made = [job.make(recipe, bars) for recipe in wanted]
    _show(ladder, made, as_json=as_json, quiet=quiet)


def _show_planned(planned: Sequence[Planned], *, as_json: bool) -> None:
    if as_json:
        show_json({"planned": planned})
    else:
        talk_console().print(planned_view(planned))


def _show(
    ladder: Sequence[Rung], made: Sequence[dict[str, Any]], *, as_json: bool, quiet: bool
) -> None:
    if as_json:
        show_json({"drafts": made, "ladder": ladder})
    elif not quiet:
        if ladder:
            talk_console().print(ladder_view(ladder))
        for one in made:
            talk_console().print(made_view(one["made"], one["pair"], one["models_file"]))


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """Drafts of one target: where they go, and under which name."""

    facts: Facts
    out: Path | None
    name: str | None
    models_file: Path | None
    threads: int
    force: bool
    n_places: int

    def __post_init__(self) -> None:
        EngineParams(n_threads=self.threads)  # refuses what no engine takes

    @property
    def target(self) -> Path:
        return self.facts.path

    @property
    def folder(self) -> Path:
        return self.out.parent if self.out else self.target.parent

    def path(self, recipe: Recipe) -> Path:
        return self.out or beside(self.target, recipe.file_type)

    def check(self, recipes: Sequence[Recipe]) -> None:
        """What can be refused before any work is. Raises QDraftError."""
        if self.facts.recurrent:
            raise PairError(f"{self.target.name} is recurrent or hybrid: no draft can serve it")
        if not os.access(self.folder, os.W_OK):
            raise UsageError(
                f"{self.folder} cannot be written to", hint="--out names another place"
            )
        known = registry.load(self.models_file, new=True).entries
        for path in map(self.path, recipes):
            if path.is_dir():
                raise UsageError(f"{path} is a folder", hint="--out names the file")
            self.require_free(path)
            entry = known.get(self.name or path.stem)
            if entry and not self.force and entry.draft != str(path.absolute()):
                raise UsageError(
                    f"there is a pair {entry.name} already", hint="--name, or --force replaces it"
                )

    def require_free(self, path: Path, *, is_matrix: bool = False) -> None:
        """Raises UsageError where something would be overwritten that should not be."""
        if not path.exists():
            return
        if path.samefile(self.target):
            raise UsageError(f"{path} is the target itself: it would be overwritten", hint="--out")
        if not self.force:
            hint = "--force overwrites it"
            if is_matrix:
                hint = f"--imatrix {path} uses it, --force collects it again"
            raise UsageError(f"{path} is there already", hint=hint)

    def collect(self, text: str | None, n_written: int, bars: Bars) -> Path:
        """The importance matrix, beside the draft."""
        path = self.folder / beside(self.target, "imatrix").name
        self.require_free(path, is_matrix=True)
        return make_matrix(
            self.target, path,
            text=text, n_written=n_written, threads=self.threads, progress=bars.step,
        )  # fmt: skip

    def search(
        self, candidates: list[Recipe] | None, matrix: Path | None, bars: Bars
    ) -> list[Rung]:
        """What was tried, the fastest first."""
        return search_draft(
            self.target, candidates, matrix,
            folder=self.folder, threads=self.threads, progress=bars.step,
        )  # fmt: skip

    def make(self, recipe: Recipe, bars: Bars) -> dict[str, Any]:
        """Make, measure and register one draft."""
        path = self.path(recipe)
        made = make_draft(
            self.target, path, recipe,
            threads=self.threads, n_places=self.n_places, progress=bars.step,
        )  # fmt: skip
        name = self.name or path.stem
        where = file_of_models.add(
            name, self.target, path,
            user_file=self.models_file, origin=f"qdraft make {self.target.name}",
        )  # fmt: skip
        return {"pair": name, "models_file": where, "made": made}


def beside(target: Path, kind: str) -> Path:
    """A file next to the target: its name with another type at the end."""
    stem = re.sub(r"[-._]?(BF16|I?Q\d\w*|TQ\d\w*|MXFP4|F16|F32)$", "", target.stem, flags=re.I)
    stem = stem or target.stem
    return target.with_name(f"{stem}.imatrix.gguf" if kind == "imatrix" else f"{stem}-{kind}.gguf")


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
