"""Progress of work that takes long: the one type for it in qdraft."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, float, float], None]
"""Takes what is being done, how much of it is done, and the total."""


def no_progress(what: str, done: float, of: float) -> None:
    """Report nothing: the default wherever a ``Progress`` is taken."""


def renamed(progress: Progress, what: str) -> Progress:
    """Return a progress that reports ``what``, whatever name its caller gives."""
    return lambda _, done, of: progress(what, done, of)
