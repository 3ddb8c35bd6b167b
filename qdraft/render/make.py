"""A draft that was made, or that would be made, for people."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Group, RenderableType
from rich.text import Text

from qdraft.llama.quantize import QuantizePreview
from qdraft.making.make import Made, Quality
from qdraft.making.overlap import Overlap
from qdraft.making.try_recipes import TriedRecipe, conclude_search
from qdraft.render.layout import PlainTable, line, wrapped


def made_view(made: Made, name: str, models_file: Path) -> RenderableType:
    """The draft, its quality beside a plain quantization, and how to run it."""
    draft = made.draft
    types = ", ".join(f"{n} {kind}" for kind, n in draft.types.items())
    if draft.n_fallback:
        types += f"; {draft.n_fallback} fell back from {draft.file_type} (rows not divisible)"
    lines = [
        line(
            "draft",
            draft.path.name,
            f"{draft.n_bytes / 1e6:.0f} MB",
            f"{draft.bits_per_weight:.2f} bits per weight",
        ),
        *wrapped("matrices", types),
    ]
    if made.quality:
        lines += _quality("quality", made.quality)
    if made.plain:
        lines += _quality("plain", made.plain)
    lines += wrapped("pair", f'{name}, in {models_file}: qdraft run --pair {name} -p "..."')
    return Group(*lines)


def previews_view(previews: Sequence[QuantizePreview]) -> RenderableType:
    """One line for each recipe."""
    lines: list[Text] = []
    for preview in previews:
        parts = (
            f"{preview.n_bytes / 1e6:.0f} MB",
            f"{preview.bits_per_weight:.2f} bits per weight",
            f"{preview.n_fallback} tensors fall back" if preview.n_fallback else "",
            "needs an importance matrix" if preview.needs_matrix else "",
        )
        lines += wrapped(f"{preview.file_type:<8}", ", ".join(part for part in parts if part))
    return Group(*lines)


def ladder_view(ladder: Sequence[TriedRecipe]) -> RenderableType:
    """The recipes that were tried, the fastest first, and why the first one wins."""
    table = PlainTable()
    for column in ("recipe", "MB", "alpha", "c", "n_draft", "predicted"):
        table.add_column(column, justify="left" if column == "recipe" else "right")
    for tried in ladder:
        table.add_row(
            tried.recipe.label,
            f"{tried.n_bytes / 1e6:.0f}",
            f"{tried.alpha:.3f}",
            f"{tried.c:.2f}",
            str(tried.n_draft),
            f"{tried.predicted:.2f}",
        )
    return Group(table, *wrapped("winner", conclude_search(ladder)))


def _quality(label: str, quality: Quality) -> list[Text]:
    lines: list[Text] = []
    for kv, overlap in (("shared KV", quality.shared), ("own KV", quality.own)):
        if overlap:
            lines.append(line(label if not lines else "", f"{kv:<9} {_overlap(overlap)}"))
    return lines


def _overlap(overlap: Overlap) -> str:
    return (
        f"same top token {overlap.same_top:.3f}, sum min(p, q) {overlap.sum_min:.3f} "
        f"± {overlap.sum_min_error:.3f}"
    )
