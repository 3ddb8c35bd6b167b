"""Where the layers of loaded models are, for people and as JSON."""

from __future__ import annotations

import dataclasses
from typing import Any

from rich.console import Group, RenderableType

from qdraft.llama.placed import describe_placed
from qdraft.render.layout import line
from qdraft.session.pair import Pair


def placed_view(pair: Pair) -> RenderableType | None:
    """A line for each model; None if no model has layers on a device."""
    if not any(placed.n_offloaded for placed in pair.placed):
        return None
    names = ("target", "draft")
    return Group(
        *(
            line("placed" if i == 0 else "", f"{names[i]} {describe_placed(placed)}")
            for i, placed in enumerate(pair.placed)
        )
    )


def placed_report(pair: Pair) -> list[dict[str, Any]]:
    """The bytes on each device, and the tensors that are not where their layer is."""
    return [
        {
            "n_offloaded": placed.n_offloaded,
            "devices": {name: dataclasses.asdict(share) for name, share in placed.shares.items()},
            "moved": dict(placed.moved),
            "surprises": list(placed.surprises),
        }
        for placed in pair.placed
    ]
