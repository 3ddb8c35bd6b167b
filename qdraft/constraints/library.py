"""llguidance, which computes the masks; an optional package."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from qdraft.errors import UsageError


def llguidance() -> Any:
    """Return the module llguidance. Raises UsageError if it is not installed."""
    try:
        module = import_module("llguidance")
        import_module("llguidance.numpy")
    except ImportError as error:
        raise UsageError(
            "a constraint needs the package llguidance",
            hint="install it with pip install 'qdraft[json]'",
        ) from error
    return module
