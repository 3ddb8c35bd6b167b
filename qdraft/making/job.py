"""One job of making drafts of a target: paths, names, and the checks before any work."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from qdraft.disk import free_bytes, require_space
from qdraft.errors import UsageError
from qdraft.gguf.facts import Facts
from qdraft.llama.params import EngineParams
from qdraft.llama.progress import Progress
from qdraft.llama.quantize import MOST_BYTES, Recipe, preview
from qdraft.making.calibration import N_WRITTEN
from qdraft.making.make import N_CTX, Made, make_draft, search_draft
from qdraft.making.matrix import make_matrix
from qdraft.making.try_recipes import TriedRecipe, list_recipes, prunable_layers, require_prunable
from qdraft.pairs import editing, registry

DEFAULT_TYPE = "Q2_K"  # of a draft if no type is asked for


@dataclass(frozen=True, slots=True)
class NamedDraft:
    """A draft that was made, the pair that names it, and the file that holds the pair."""

    pair: str
    models_file: Path
    made: Made


@dataclass(frozen=True, slots=True)
class DraftJob:
    """Drafts of one target: where they go, and under which name.

    ``out`` and ``name`` None derive the draft's path and the pair's name from the target's.
    ``n_measured`` is the number of held-out tokens to compare each draft over; 0 skips that.
    """

    facts: Facts
    out: Path | None
    name: str | None
    models_file: Path | None
    threads: int
    force: bool
    n_measured: int

    def __post_init__(self) -> None:
        EngineParams(n_threads=self.threads)  # raises UsageError for a bad number of threads

    @property
    def target(self) -> Path:
        return self.facts.path

    @property
    def folder(self) -> Path:
        return self.out.parent if self.out else self.target.parent

    @property
    def matrix_path(self) -> Path:
        """The file that a collected importance matrix is written to."""
        return self.folder / path_beside(self.target, "imatrix").name

    def path_of(self, recipe: Recipe) -> Path:
        """The file that ``recipe`` is written to."""
        return self.out or path_beside(self.target, recipe.file_type)

    def check(self, recipes: Sequence[Recipe]) -> None:
        """Check that all drafts can be made, before any work is done. Raises QDraftError."""
        if not os.access(self.folder, os.W_OK):
            raise UsageError(
                f"{self.folder} is not writable", hint="choose another folder with --out"
            )
        known = registry.load(self.models_file, new=True).entries
        for recipe in recipes:
            require_prunable(self.facts, recipe)
            path = self.path_of(recipe)
            registry.require_name(self.name or path.stem, "the name of the pair")
            if path.is_dir():
                raise UsageError(f"{path} is a folder", hint="name a file with --out")
            self.require_free(path)
            matrix = recipe.imatrix or self.matrix_path
            if path == matrix or (path.exists() and matrix.exists() and path.samefile(matrix)):
                raise UsageError(
                    f"{path} is the importance matrix and would be overwritten",
                    hint="choose another file with --out",
                )
            entry = known.get(self.name or path.stem)
            if entry and not self.force and entry.draft != str(path.absolute()):
                raise UsageError(
                    f"a pair named {entry.name} already exists",
                    hint="choose another name with --name, or replace the pair with --force",
                )

    def require_space(self, recipes: Sequence[Recipe], *, search: bool, collects: bool) -> None:
        """Raise DiskSpaceError unless the folder has room for all drafts.

        A ``search`` tries ``recipes``, none: the default ones, and makes one of them. A draft with
        an importance matrix, which is given or ``collects``, is compared with one without.
        """
        recipes = recipes or list_recipes(None, prunable_layers(self.facts))
        n_files = 1 if search else len(recipes)
        if (n_files + 1) * MOST_BYTES * self.facts.n_parameters < free_bytes(self.folder):
            return
        planned = [preview(self.target, replace(recipe, imatrix=None)) for recipe in recipes]
        sizes = [each.n_bytes for each in planned]
        needed = max(sizes) if search else sum(sizes)
        if self.n_measured and (collects or any(recipe.imatrix for recipe in recipes)):
            needed += max([each.n_bytes for each in planned if not each.needs_matrix], default=0)
        what = "the draft" if n_files == 1 else f"making {n_files} drafts"
        require_space(self.folder, needed, what, "choose another folder with --out")

    def require_free(self, path: Path, *, is_matrix: bool = False) -> None:
        """Raise UsageError if writing ``path`` would overwrite something that should stay."""
        if not path.exists():
            return
        if any(path.samefile(part) for part in self.facts.parts):
            raise UsageError(
                f"{path} is the target itself, or a part of it, and would be overwritten",
                hint="choose another file with --out",
            )
        if not self.force:
            hint = "overwrite it with --force"
            if is_matrix:
                hint = f"use it with --imatrix {path}, or collect it again with --force"
            raise UsageError(f"{path} already exists", hint=hint)

    def collect_matrix(
        self,
        text: str | None,
        n_written: int | None,
        progress: Progress,
        *,
        parse_special: bool = False,
    ) -> Path:
        """Collect the importance matrix and write it beside the draft.

        ``text`` None takes the built-in calibration text; the target writes about ``n_written``
        tokens more, ``N_WRITTEN`` if that is None. Names of control tokens in ``text`` are
        text unless ``parse_special``. Raises what ``make_matrix`` raises.
        """
        path = self.matrix_path
        self.require_free(path, is_matrix=True)
        try:
            return make_matrix(
                self.target,
                path,
                EngineParams(n_ctx=N_CTX, n_threads=self.threads),
                text=text,
                parse_special=parse_special,
                n_written=N_WRITTEN if n_written is None else n_written,
                progress=progress,
                overwrite=self.force,
            )
        except FileExistsError:  # it has appeared meanwhile
            self.require_free(path, is_matrix=True)
            raise

    def search(
        self, candidates: list[Recipe] | None, matrix: Path | None, progress: Progress
    ) -> tuple[list[TriedRecipe], list[Recipe]]:
        """Try ``candidates`` (None: the default recipes) and choose the recipe to make.

        Returns those that were tried, the fastest first, and the winner: none if no recipe is
        expected to pay off. Raises what ``check`` raises for the winner.
        """
        ladder = search_draft(
            self.target,
            candidates,
            matrix,
            folder=self.folder,
            threads=self.threads,
            progress=progress,
        )
        chosen = [ladder[0].recipe] if ladder and ladder[0].pays_off else []
        self.check(chosen)
        return ladder, chosen

    def make(self, recipe: Recipe, progress: Progress) -> NamedDraft:
        """Make and measure one draft, and name the pair in models.yaml."""
        path = self.path_of(recipe)
        try:
            made = make_draft(
                self.target,
                path,
                recipe,
                threads=self.threads,
                n_measured=self.n_measured,
                progress=progress,
                overwrite=self.force,
            )
        except FileExistsError:  # it has appeared meanwhile
            self.require_free(path)
            raise
        name = self.name or path.stem
        models_file = editing.add(
            name,
            self.target,
            path,
            user_file=self.models_file,
            origin=f"qdraft make {self.target.name}",
        )
        return NamedDraft(name, models_file, made)


def path_beside(target: Path, kind: str) -> Path:
    """A file next to the target: the target's name with ``kind`` in place of its type."""
    stem = re.sub(r"[-._]?(BF16|I?Q\d\w*|TQ\d\w*|MXFP4|F16|F32)$", "", target.stem, flags=re.I)
    stem = stem or target.stem
    return target.with_name(f"{stem}.imatrix.gguf" if kind == "imatrix" else f"{stem}-{kind}.gguf")
