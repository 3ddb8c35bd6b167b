"""Progress bars on stderr for loading and building."""

from __future__ import annotations

from types import TracebackType

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


class _Rate(ProgressColumn):
    """Steps a second."""

    def render(self, task: Task) -> Text:
        return Text("" if task.speed is None or task.total == 1 else f"{task.speed:.1f}/s")


class Bars:
    """One bar for each file that is loaded or built; gone when done. ``quiet`` shows nothing.

    Where stderr is no terminal, a build is told in one line instead.
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
            redirect_stdout=False,  # what is piped from stdout is no talk
            disable=quiet or not self._console.is_terminal,
        )

    def __enter__(self) -> Bars:
        if not self._progress.disable:  # rich's start and stop print even when disabled
            self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._progress.disable:
            self._progress.stop()

    def building(self, name: str, done: int, of: int) -> None:
        self.step(f"building {name}", done, of)

    def step(self, what: str, done: float, of: float) -> None:
        """Progress of whatever takes long."""
        silent = self._quiet or what.startswith("loading ")
        if what not in self._tasks and not (silent or self._console.is_terminal):
            self._console.print(what)
        self._step(what, done, of)

    def built(self, made: Quantized) -> None:
        """Say what a quantization really gave."""
        if self._quiet:
            return
        types = ", ".join(f"{n} {name}" for name, n in made.types.items())
        line = f"built {made.path.name}: {made.n_bytes / 1e6:.0f} MB, matrices: {types}"
        if made.n_fallback:
            line += (
                f"; {made.n_fallback} fell back from {made.file_type} (rows not divisible by 256)"
            )
        self._console.print(line, soft_wrap=not self._console.is_terminal)

    def _step(self, what: str, done: float, of: float) -> None:
        if what not in self._tasks:
            self._tasks[what] = self._progress.add_task(what, total=of)
        self._progress.update(self._tasks[what], completed=done, visible=done < of)
