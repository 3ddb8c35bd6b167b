"""Where loaded models are, in words and for JSON."""

from __future__ import annotations

import dataclasses
from typing import Any

from rich.console import Group, RenderableType

from qdraft.llama.placed import CPU, Placed
from qdraft.render.summary import line
from qdraft.session.pair import Pair

_GIB = 2**30


def placed_view(pair: Pair) -> RenderableType | None:
    """A line for each model, where any of them has layers on a device; else None."""
    if not any(placed.n_offloaded for placed in pair.placed):
        return None
    names = ("target", "draft")
    return Group(
        *(
            line("placed" if i == 0 else "", f"{names[i]} {in_words(placed)}")
            for i, placed in enumerate(pair.placed)
        )
    )


def in_words(placed: Placed) -> str:
    """The devices that hold layers, with what they hold."""
    return ", ".join(
        f"{share.n_layers} layers on {name} ({share.total / _GIB:.2f} GiB)"
        for name, share in sorted(placed.shares.items(), key=lambda item: item[0] == CPU)
        if share.n_layers
    )


def placed_report(pair: Pair) -> list[dict[str, Any]]:
    """The same for JSON: bytes by device, and what is not where its layer is."""
    return [
        {
            "n_offloaded": placed.n_offloaded,
            "devices": {name: dataclasses.asdict(share) for name, share in placed.shares.items()},
            "moved": dict(placed.moved),
            "surprises": list(placed.surprises),
        }
        for placed in pair.placed
    ]
