"""A pass over the weights that takes long: Ctrl-C ends it, and it shows how far it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from qdraft.llama.native import lib
from qdraft.llama.progress import Progress, no_progress

_SLOW_S = 0.25  # seconds of a pass from which on the next ones are watched


class SlowPass:
    """Watches the passes of one context, node by node of the graph, once one has been slow.

    Only the CPU asks before each node, so passes of other devices end when they end. ``progress``
    gets the tokens of an eval that are done, by the nodes of the pass before. Of an eval of several
    fast passes it gets them after each pass, once they have taken as long together.
    """

    def __init__(self) -> None:
        self.progress: Progress = no_progress
        self._native: Any = None  # the callback; llama.cpp has its address
        self._interrupted: Callable[[], bool] = lambda: False
        self._start = self._size = self._total = 0  # tokens of an eval
        self._n_nodes, self._n_before = 0, 1
        self._eval_s = 0.0  # seconds of the passes of this eval

    def expect(self, start: int, size: int, total: int) -> None:
        """Say that the next pass takes ``size`` of ``total`` tokens, after ``start`` of them."""
        self._start, self._size, self._total = start, size, total
        if start == 0:
            self._eval_s = 0.0

    def begin(self, context: Any, interrupted: Callable[[], bool]) -> None:
        """Watch the next pass of ``context`` if an earlier one was slow."""
        self._interrupted, self._n_nodes = interrupted, 0
        if self._native is not None:
            lib().llama_set_abort_callback(context, self._native, None)

    def end(self, seconds: float) -> None:
        """Note how long the pass took."""
        self._eval_s += seconds
        if self._n_nodes:
            self._n_before = self._n_nodes
        if self._n_nodes or (self._size < self._total and self._eval_s > _SLOW_S):
            self._show(1.0)
        if seconds > _SLOW_S and self._native is None:
            self._native = lib().ggml_abort_callback(self._visit)

    def _visit(self, _data: object) -> bool:
        """Take one node; return True to end the pass."""
        self._n_nodes += 1
        if self._interrupted():
            return True
        if self._n_nodes % 16 == 0:
            self._show(min(1.0, self._n_nodes / self._n_before))
        return False

    def _show(self, share: float) -> None:
        what = f"decoding {self._total} token{'s' if self._total > 1 else ''}"
        self.progress(what, self._start + share * self._size, self._total)
