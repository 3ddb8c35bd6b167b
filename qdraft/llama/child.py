"""Jobs in child processes: their memory comes back, and a crash costs only the job.

A child reports in lines of JSON, and it ends when its parent does, whatever ends the parent.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import IO, Any

from qdraft import errors
from qdraft.errors import EngineError, QDraftError
from qdraft.llama.interrupts import STOP_SIGNALS
from qdraft.llama.progress import Progress, no_progress

log = logging.getLogger(__name__)

RunJob = Callable[[str, dict[str, Any], Progress], dict[str, Any]]
"""Takes a module, the request to its ``job``, and the progress; returns the job's result."""

_N_WORDS = 20  # lines of stderr to remember
_PR_SET_PDEATHSIG = 1  # of sys/prctl.h


def command(module: str, *args: str) -> list[str]:
    """Return the command line that calls ``main(args)`` of ``module`` and exits with its status.

    The process leaves signals that stop a command to this process, and on Linux dies with it.
    ``python -m`` would put the user's working directory first on the path.
    """
    code = (
        f"import sys; sys.path[:] = {sys.path!r}; from qdraft.llama.child import enter; "
        f"enter({os.getpid()}); from {module} import main; sys.exit(main(sys.argv[1:]))"
    )
    return [sys.executable, "-c", code, *args]


def run_job(
    module: str,
    request: dict[str, Any],
    progress: Progress = no_progress,
    *,
    what: str = "a child process",
) -> dict[str, Any]:
    """Call ``job(request, progress)`` of ``module`` in a child process and return its result.

    Request and result are JSON. Raises the QDraftError that the job raises, and EngineError, which
    names the job as ``what``, if the child ends in another way. An interrupt ends the child.
    """
    words: deque[str] = deque(maxlen=_N_WORDS)  # what it writes besides messages
    last: dict[str, Any] = {}
    with _started(command(__name__, module), words) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        with suppress(BrokenPipeError):  # the child died at once: its status says why
            child.stdin.write(json.dumps(request, default=str) + "\n")
            child.stdin.flush()
        for message in _messages(child.stdout, words):
            last = message
            if "progress" in message:
                progress(*message["progress"])
            if "log" in message:
                log.log(*message["log"])
        status = child.wait()
    if "answer" in last:
        return dict(last["answer"])
    if "error" in last:
        kind, text, hint = last["error"]
        raise getattr(errors, kind, EngineError)(text, hint=hint)
    if status < 0:
        raise EngineError(f"{what} died: {signal.Signals(-status).name}")
    reasons = [line.strip() for line in words if line.strip()]
    raise EngineError(f"{what} failed: {reasons[-1] if reasons else f'status {status}'}")


@contextmanager
def _started(command: list[str], words: deque[str]) -> Iterator[subprocess.Popen[str]]:
    """Start a child, collect the last lines of its stderr in ``words``, and kill it at the end."""
    child = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,  # open until the child ends: a child that reads its end is alone
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        errors="replace",
    )
    # Read along on a thread: a child whose stderr is full would wait for ever.
    reader = threading.Thread(target=words.extend, args=(child.stderr,), daemon=True)
    reader.start()
    try:
        yield child
    finally:
        child.kill()
        child.wait()
        reader.join()
        for stream in (child.stdin, child.stdout, child.stderr):
            if stream:
                with suppress(BrokenPipeError):  # a request that a dead child has not read
                    stream.close()


def _messages(stream: IO[str], words: deque[str]) -> Iterator[dict[str, Any]]:
    """Give the child's messages; any other line goes to ``words``."""
    for line in stream:
        try:
            message = json.loads(line)
        except ValueError:
            message = None
        if isinstance(message, dict):
            yield message
        else:
            words.append(line)


def enter(parent: int) -> None:
    """Prepare a child: it ignores what stops a command, since the parent then ends the child.

    On Linux the system kills it with ``parent``, the id of the process that started it.
    """
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
        if os.getppid() != parent:  # it has died already
            os._exit(1)


class _SendLog(logging.Handler):
    """Sends warnings to the parent."""

    def __init__(self, send: Callable[[dict[str, Any]], None]) -> None:
        super().__init__(logging.WARNING)
        self._send = send

    def emit(self, record: logging.LogRecord) -> None:
        self._send({"log": [record.levelno, record.getMessage()]})


def main(args: list[str]) -> int:
    """Run the job of the module that ``args`` names, and return the exit status.

    The request is the first line of stdin; each message to the parent is a line of JSON on what was
    stdout. Native code that prints to stdout prints to stderr instead.
    """
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def send(message: dict[str, Any]) -> None:
        print(json.dumps(message), file=out, flush=True)

    logger = logging.getLogger("qdraft")
    logger.addHandler(_SendLog(send))
    logger.setLevel(logging.WARNING)
    logger.propagate = False
    request = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        answer = import_module(args[0]).job(request, lambda *step: send({"progress": step}))
    except QDraftError as error:
        send({"error": [type(error).__name__, str(error), error.hint]})
        return error.exit_code
    except OSError as error:
        named = f": {error.filename}" if error.filename else ""
        send({"error": ["QDraftError", f"{error.strerror or error}{named}", None]})
        return QDraftError.exit_code
    send({"answer": answer})
    return 0


def _end_with_parent() -> None:
    """End this process when the parent, which holds the other end of stdin, is gone."""
    while os.read(0, 1):
        pass
    os._exit(1)
