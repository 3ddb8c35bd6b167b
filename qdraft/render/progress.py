"""Progress bars on stderr for everything that takes long."""

from __future__ import annotations

from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from qdraft.llama.quantize import Quantized
from qdraft.render.console import talk_console
from qdraft.render.foreign import one_line


class _Rate(ProgressColumn):
    """Steps per second."""

    def render(self, task: Task) -> Text:
        return Text("" if task.speed is None or task.total == 1 else f"{task.speed:.1f}/s")


class ProgressBars:
    """One bar for each thing that takes long; gone when done. ``quiet`` shows nothing.

    If stderr is not a terminal, each thing but loading is announced in one line instead.
    """

    def __init__(self, *, quiet: bool = False) -> None:
        self._console = talk_console()
        self._quiet = quiet
        self._tasks: dict[str, TaskID] = {}
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f}%"),
            _Rate(),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
            redirect_stdout=False,  # stdout carries what is piped
            disable=quiet or not self._console.is_terminal,
        )

    def __enter__(self) -> ProgressBars:
        if not self._progress.disable:  # rich's start and stop print even if disabled
            self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        if not self._progress.disable:
            self._progress.stop()

    def report(self, what: str, done: float, of: float) -> None:
        """Show how far something is: a ``qdraft.llama.progress.Progress``."""
        what = one_line(what)
        if what not in self._tasks:
            is_line = not (self._quiet or self._console.is_terminal)
            if is_line and not what.startswith(("loading ", "decoding ")):
                self._console.print(what, soft_wrap=True)
            self._tasks[what] = self._progress.add_task(what, total=of)
        self._progress.update(self._tasks[what], completed=done, visible=done < of)

    def report_built(self, built: Quantized) -> None:
        """Say what a quantization gave, and which tensors fell back to another type."""
        if self._quiet:
            return
        types = ", ".join(f"{n} {name}" for name, n in built.types.items())
        line = f"built {built.path.name}: {built.n_bytes / 1e6:.0f} MB, matrices: {types}"
        if built.n_fallback:
            line += (
                f"; {built.n_fallback} fell back from {built.file_type}, which needs row lengths "
                "divisible by 256"
            )
        self._console.print(line, soft_wrap=not self._console.is_terminal)
