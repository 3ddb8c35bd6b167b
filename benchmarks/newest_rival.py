"""xllamacpp's server as a contender: the newest llama.cpp that installs as a wheel.

It runs newest.py in processes of their own, on the same token ids, files and threads as qdraft. At
a temperature it can verify drafts in two ways: sample-and-match, as llama.cpp's tools do, and
rejection by p/q, which it calls probabilistic. Its wheel is built for many CPUs, so its target
alone is a contender too.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rivals import N_CTX, Run

from qdraft.host import default_threads
from qdraft.llama.devices import devices
from qdraft.llama.repack_probe import extra_buffers_are_safe
from qdraft.paths import cache_dir

VERSION = "2026.10.11549"
WHEEL = f"xllamacpp {VERSION}"
_CHILD = Path(__file__).with_name("newest.py")


class NoWheel(Exception):
    """Why this rival cannot run here, in one line."""


@dataclass(frozen=True, slots=True)
class Drafting:
    """How it drafts: ``n_max`` tokens at most, and how it verifies them."""

    n_max: int
    probabilistic: bool = False

    def __str__(self) -> str:
        return f"n_max {self.n_max}" + (", p/q" if self.probabilistic else "")


def draftings(lengths: Sequence[int], temperature: float) -> list[Drafting]:
    """The settings to measure; without a temperature, p/q rejection is sample-and-match."""
    ways = (False, True) if temperature else (False,)
    return [Drafting(n, way) for way in ways for n in lengths]


def interpreter() -> Path:
    """The Python that has the wheel; installs it into the cache if it is missing.

    Raises NoWheel where it cannot be installed or loaded.
    """
    if any(device.takes_layers for device in devices()):
        raise NoWheel("its wheel is for the CPU, and here the others use a GPU")
    folder = cache_dir() / WHEEL.replace(" ", "-")
    python = folder / "bin" / "python"
    loads = [str(python), "-I", "-c", "import xllamacpp"]
    if not python.exists() or subprocess.run(loads, capture_output=True).returncode:
        print(f"installing {WHEEL}", file=sys.stderr, flush=True)
        _succeed(sys.executable, "-m", "venv", "--clear", str(folder))
        pip = (str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
        _succeed(*pip, "--no-deps", "--only-binary", ":all:", WHEEL.replace(" ", "=="))
        _succeed(*loads)
    return python


def _succeed(*command: str) -> None:
    done = subprocess.run(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if done.returncode:
        lines = done.stdout.strip().splitlines() or [f"{command[0]} failed"]
        raise NoWheel(lines[-1])


class Newest:
    """A process that has loaded a target, with or without a draft; ``close`` ends it."""

    def __init__(
        self,
        target: Path,
        draft: Path | None = None,
        drafting: Drafting | None = None,
        *,
        enter: Callable[[], None] | None = None,
    ) -> None:
        """``drafting`` goes with ``draft``. The process calls ``enter`` first."""
        python = interpreter()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the process)
        self._process = subprocess.Popen(
            [python, "-I", _CHILD],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            preexec_fn=enter,
        )
        self._ask(
            target=str(target),
            draft=str(draft) if draft else None,
            n_max=drafting.n_max if drafting else 0,
            probabilistic=bool(drafting and drafting.probabilistic),
            n_ctx=N_CTX,
            threads=default_threads(),
            repack=extra_buffers_are_safe(),
        )

    def run(self, prompt: Sequence[int], n_predict: int, temperature: float, seed: int) -> Run:
        answer = self._ask(
            prompt=list(prompt), n_predict=n_predict, temperature=temperature, seed=seed
        )
        return Run(**answer)

    def _ask(self, **asked: Any) -> dict[str, Any]:
        assert self._process.stdin
        assert self._process.stdout
        try:
            print(json.dumps(asked), file=self._process.stdin, flush=True)
            answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        except (BrokenPipeError, ValueError):  # it has ended without an answer
            self._process.kill()
            self._process.wait()
            self._log.seek(0)
            output = self._log.read().decode(errors="replace")[-2000:]
            raise RuntimeError(f"{WHEEL} failed:\n{output}") from None
        return answer

    def close(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()
        self._log.close()


if __name__ == "__main__":
    print(interpreter())
