"""The `qdraft` command as a test calls it: in this process, or in one of its own."""

from __future__ import annotations

import io
import json
import logging
import os
import subprocess
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any
from unittest.mock import patch

from qdraft.cli.main import main

_SCHEMAS = Path(__file__).parent.parent / "docs/schema"
_LOGGERS = ("qdraft", "qdraft.llama.cpp")


def schema(name: str, part: str = "") -> dict[str, Any]:
    """Return the JSON schema of a command's report, or of one of the parts that it defines.

    ``name`` is that of the file, for example "run" or "models-list".
    """
    whole: dict[str, Any] = json.loads((_SCHEMAS / f"{name}.json").read_text(encoding="utf-8"))
    if not part:
        return whole
    return {key: whole[key] for key in ("$schema", "$defs")} | {"$ref": f"#/$defs/{part}"}


def qdraft(*args: str, stdin: str | None = None, **env: str) -> CompletedProcess[str]:
    """Run the command in this process: its streams, its exit code and its log levels are its own.

    It does not hear of the load of this machine, of which a person would be warned.
    It starts no process and does not load the library again, which saves about a second a call.
    A test of what belongs to a process (signals, broken pipes, RPC servers, the state of
    llama.cpp) calls ``qdraft_process``.
    """
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for _ in range(2))
    given = io.TextIOWrapper(io.BytesIO((stdin or "").encode()), encoding="utf-8")
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    levels = [(logger, logger.level, logger.propagate) for logger in loggers]
    module = types.ModuleType("__main__")  # its package is the name of the program in a usage line
    module.__package__ = "qdraft"
    outer = sys.modules["__main__"]
    status: object = None
    try:
        sys.modules["__main__"] = module
        with (
            patch.multiple(sys, stdin=given, stdout=out, stderr=err, argv=["__main__.py"]),
            patch.object(os, "getloadavg", lambda: (0.0, 0.0, 0.0), create=True),
            patch.dict(os.environ, {"COLUMNS": "80", "LINES": "25", **env}),
        ):
            main(args)
    except SystemExit as end:
        status = end.code
    finally:
        sys.modules["__main__"] = outer
        for logger, level, propagate in levels:
            logger.setLevel(level)
            logger.propagate = propagate
    assert isinstance(status, int), "the command ends with an exit code"
    return CompletedProcess(["qdraft", *args], status, _text(out), _text(err))


def qdraft_process(*args: str, stdin: str | None = None, **env: str) -> CompletedProcess[str]:
    """Run the command in a process of its own; no terminal anywhere, stdin closed unless given."""
    return subprocess.run(
        [sys.executable, "-m", "qdraft", *args],
        input=stdin,
        stdin=None if stdin is not None else subprocess.DEVNULL,
        capture_output=True,
        text=True,
        encoding="utf-8",
        env={**os.environ, **env},
        timeout=300,
        check=False,
    )


def qdraft_batch(*commands: Sequence[str]) -> list[CompletedProcess[str]]:
    """Run commands one after the other in one process of their own; each as ``qdraft`` does."""
    code = (
        "import json, sys; from invoke import qdraft; "
        "ended = [qdraft(*args) for args in json.loads(sys.argv[1])]; "
        "print(json.dumps([[x.args, x.returncode, x.stdout, x.stderr] for x in ended]))"
    )
    paths = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(commands)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        encoding="utf-8",
        env={**os.environ, "PYTHONPATH": paths},
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [CompletedProcess(*ended) for ended in json.loads(done.stdout)]


def one_error(result: CompletedProcess[str], status: int) -> str:
    """The error line; nothing else but a hint may be said, and stdout stays empty."""
    lines = result.stderr.splitlines()
    assert result.returncode == status, result.stderr
    assert result.stdout == ""
    assert lines[0].startswith("error: ")
    assert all(line.startswith("hint: ") for line in lines[1:])
    assert len(lines) <= 2
    return lines[0]


def _text(stream: io.TextIOWrapper) -> str:
    stream.flush()
    raw = stream.buffer
    assert isinstance(raw, io.BytesIO)
    return raw.getvalue().decode("utf-8")
