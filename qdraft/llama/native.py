"""The native library: loaded once, its log routed to Python's, its build and CPU named."""

from __future__ import annotations

import hashlib
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import Any

from qdraft.errors import EngineError
from qdraft.llama.rpc_guard import LIFELINE

log = logging.getLogger("qdraft.llama.cpp")

_ERROR, _CONTINUED = 4, 5  # of ggml.h; the binding's own table has them wrong
_errors: list[str] = []
_listeners: list[list[str]] = []
_keep: list[Any] = []  # callbacks that native code holds must not be collected


@lru_cache(maxsize=1)
def native() -> Any:
    """The llama_cpp module, initialised and silent. Raises EngineError if it cannot load."""
    try:
        import llama_cpp
    except (ImportError, OSError, RuntimeError) as error:
        raise EngineError(
            f"llama-cpp-python does not load: {error}",
            hint="reinstall it: pip install --no-cache-dir --force-reinstall llama-cpp-python",
        ) from error
    _route_log(llama_cpp)
    llama_cpp.llama_backend_init()
    return llama_cpp


def _route_log(llama_cpp: Any) -> None:
    """Whole lines go to the logger, at debug level: none reaches a terminal unasked."""
    line: list[str] = []
    level = 0

    def receive(ggml_level: int, text: bytes, _user_data: object) -> None:
        nonlocal level
        if ggml_level != _CONTINUED:
            level = ggml_level
        line.append(text.decode("utf-8", "replace"))
        if not line[-1].endswith("\n"):
            return
        message = "".join(line).rstrip()
        line.clear()
        if level == _ERROR and message:
            _errors.append(message)
        for heard in _listeners:
            heard.append(message)
        log.debug("%s", message)

    callback = llama_cpp.llama_log_callback(receive)
    _keep.append(callback)
    llama_cpp.llama_log_set(callback, None)


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Ctrl-C during a native call that calls back into Python.

    There the interrupt would be raised inside the callback, reported and lost. Here it sets a
    flag, which the yielded function tells, and goes to its handler when the call has returned; a
    second one goes there at once while a server is waited for. Only the main thread hears signals:
    elsewhere, and where they are ignored, this changes nothing.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield lambda: False
        return
    heard: list[int] = []

    def hear(number: int, frame: FrameType | None) -> None:
        heard.append(number)
        if len(heard) > 1 and LIFELINE.started:  # else it would be raised in a callback
            handler(number, frame)

    signal.signal(signal.SIGINT, hear)
    try:
        yield lambda: bool(heard)
    finally:
        signal.signal(signal.SIGINT, handler)
    if heard:
        handler(heard[0], None)


@contextmanager
def listening(lines: list[str]) -> Iterator[None]:
    """Meanwhile llama.cpp's log lines are added to ``lines``, whatever their level."""
    _listeners.append(lines)
    try:
        yield
    finally:
        _listeners.remove(lines)


def native_error() -> str:
    """llama.cpp's own words on what went wrong: the first error since ``forget_errors``.

    The first names the cause, those after it only say that the caller failed too.
    """
    return _errors[0] if _errors else "llama.cpp gave no reason"


def forget_errors() -> None:
    """Start listening afresh, before a call that may fail."""
    _errors.clear()


def library_version() -> str:
    return version("llama-cpp-python")


def build_id() -> str:
    """Names this build of the library: its version and the sizes and dates of its files."""
    package = Path(native().__file__).parent
    folder = Path(os.environ.get("LLAMA_CPP_LIB_PATH") or package / "lib")
    files = sorted(f for f in folder.iterdir() if f.is_file() and not f.is_symlink())
    stamp = ",".join(f"{f.name}:{f.stat().st_size}:{int(f.stat().st_mtime)}" for f in files)
    return f"{library_version()}-{_digest(stamp)}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
