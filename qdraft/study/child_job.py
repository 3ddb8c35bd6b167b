"""A job of a study in a child process: its memory comes back, and a crash costs only that job."""

from __future__ import annotations

import json
import logging
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import IO, Any

from qdraft.errors import EngineError, QDraftError
from qdraft.llama.child import command
from qdraft.llama.progress import Progress, no_progress

log = logging.getLogger(__name__)

RunJob = Callable[[str, dict[str, Any], Progress], dict[str, Any]]
"""Takes a module, the request to its ``job``, and the progress; returns the job's result."""


def run_job(
    module: str, request: dict[str, Any], progress: Progress = no_progress
) -> dict[str, Any]:
    """Call ``job(request, progress)`` of ``module`` in a child process and return its result.

    Request and result are JSON. If the job fails, raises EngineError with the child's own words, or
    with the signal or status that the child ended with. An interrupt ends the child.
    """
    child = subprocess.Popen(
        command(__name__, module),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
    )
    assert child.stdin is not None
    assert child.stdout is not None
    assert child.stderr is not None
    try:
        try:
            child.stdin.write(json.dumps(request, default=str))
            child.stdin.close()
        except BrokenPipeError:
            pass  # the child died at once: its status says why
        last = _read_messages(child.stdout, progress)
        errors = child.stderr.read()
        status = child.wait()
    finally:
        child.kill()
        child.wait()
        for stream in (child.stdin, child.stdout, child.stderr):
            stream.close()
    if "answer" in last:
        return dict(last["answer"])
    if "error" in last:
        raise EngineError(last["error"])
    if status < 0:
        raise EngineError(f"a child process died: {signal.Signals(-status).name}")
    reason = (errors.strip().splitlines() or [f"status {status}"])[-1]
    raise EngineError(f"a child process failed: {reason}")


def _read_messages(stream: IO[str], progress: Progress) -> dict[str, Any]:
    """Pass on progress and warnings until the child is done; return its last message."""
    message: dict[str, Any] = {}
    for line in stream:
        message = json.loads(line)
        if "progress" in message:
            progress(*message["progress"])
        if "log" in message:
            log.log(*message["log"])
    return message


class _SendLog(logging.Handler):
    """Sends warnings to the parent."""

    def emit(self, record: logging.LogRecord) -> None:
        _send({"log": [record.levelno, record.getMessage()]})


def _send(message: dict[str, Any]) -> None:
    print(json.dumps(message), flush=True)


def main(args: list[str]) -> int:
    """Run the job of the module that ``args`` names, and return the exit status.

    The request comes on stdin as JSON; each message to the parent is a line of JSON on stdout.
    """
    import importlib

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles an interrupt
    logger = logging.getLogger("qdraft")
    logger.addHandler(_SendLog())
    logger.setLevel(logging.WARNING)
    logger.propagate = False
    request = json.loads(sys.stdin.read())

    def progress(what: str, done: float, of: float) -> None:
        _send({"progress": [what, done, of]})

    try:
        answer = importlib.import_module(args[0]).job(request, progress)
    except QDraftError as error:
        _send({"error": str(error)})
        return error.exit_code
    _send({"answer": answer})
    return 0
