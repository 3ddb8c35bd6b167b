"""A job for tests of child jobs; runs in a child process."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

from qdraft.errors import UsageError


def job(task: dict[str, Any], progress: Callable[[str, float, float], None]) -> dict[str, Any]:
    progress("half", 1, 2)
    if task["do"] == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if task["do"] == "fail":
        raise UsageError("the job's own words")
    if task["do"] == "bug":
        return {"never": 1 // 0}
    return {"did": task["do"]}
