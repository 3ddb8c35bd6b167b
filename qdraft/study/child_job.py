"""A job of a study in a child process: its memory comes back, and a crash costs only that job."""

from __future__ import annotations

import json
import logging
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from qdraft.errors import EngineError, QDraftError
from qdraft.llama.child import command

log = logging.getLogger(__name__)

Progress = Callable[[str, float, float], None]


def run_job(module: str, task: dict[str, Any], progress: Progress | None = None) -> dict[str, Any]:
    """Call ``job(task, progress)`` of ``module`` in a child process and return its result.

    Task and answer are JSON. Raises EngineError with the child's own words when it fails, or with
    how it died. An interrupt ends the child.
    """
    child = subprocess.Popen(
        command(__name__, module),
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        encoding="utf-8",
    )  # fmt: skip
    assert child.stdin is not None
    assert child.stdout is not None
    assert child.stderr is not None
    answer: dict[str, Any] = {}
    try:
        try:
            child.stdin.write(json.dumps(task, default=str))
            child.stdin.close()
        except BrokenPipeError:
            pass  # it died at once: its status tells
        for line in child.stdout:
            told = json.loads(line)
            if "progress" in told and progress:
                progress(*told["progress"])
            if "log" in told:
                log.log(*told["log"])
            answer = told
        said = child.stderr.read()
        status = child.wait()
    finally:
        child.kill()
        child.wait()
        for stream in (child.stdin, child.stdout, child.stderr):
            stream.close()
    if "answer" in answer:
        return dict(answer["answer"])
    if "error" in answer:
        raise EngineError(answer["error"])
    if status < 0:
        raise EngineError(f"a child process died: {signal.Signals(-status).name}")
    reason = (said.strip().splitlines() or [f"status {status}"])[-1]
    raise EngineError(f"a child process failed: {reason}")


class _Pass(logging.Handler):
    """Warnings to the parent."""

    def emit(self, record: logging.LogRecord) -> None:
        _tell({"log": [record.levelno, record.getMessage()]})


def _tell(what: dict[str, Any]) -> None:
    print(json.dumps(what), flush=True)


def main(args: list[str]) -> int:
    """The child, given the module; the task comes on stdin, JSON lines go to stdout."""
    import importlib

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    logger = logging.getLogger("qdraft")
    logger.addHandler(_Pass())
    logger.setLevel(logging.WARNING)
    logger.propagate = False
    task = json.loads(sys.stdin.read())

    def progress(what: str, done: float, of: float) -> None:
        _tell({"progress": [what, done, of]})

    try:
        found = importlib.import_module(args[0]).job(task, progress)
    except QDraftError as error:
        _tell({"error": str(error)})
        return error.exit_code
    _tell({"answer": found})
    return 0
