"""A job for tests of child jobs; runs in a child process."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

from qdraft.errors import ModelFileError


def job(task: dict[str, Any], progress: Callable[[str, float, float], None]) -> dict[str, Any]:
    progress("half", 1, 2)
    if task["do"] == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if task["do"] == "fail":
        raise ModelFileError("the job's own words", hint="its hint")
    if task["do"] == "bug":
        return {"never": 1 // 0}
    if task["do"] == "no space":
        raise OSError(28, "No space left on device", "logits.bin")
    if task["do"] == "wait":
        _lock(task["path"])
        progress("waiting", 1, 2)
        time.sleep(60)
    if task["do"] == "talk":
        sys.stderr.write("a line of stderr\n" * 20_000)
        os.write(1, b"native code prints without a newline")
        print("and Python does too")
    return {"did": task["do"]}


def _lock(path: str) -> None:
    """Hold a lock on a file as long as this process lives."""
    import fcntl

    fcntl.flock(os.open(path, os.O_RDWR | os.O_CREAT), fcntl.LOCK_EX)
