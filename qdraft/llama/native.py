"""llama.cpp's library: loaded once, called through one door, its log sent to Python's."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, lru_cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from qdraft.errors import EngineError
from qdraft.llama.rpc_guard import GUARD

log = logging.getLogger("qdraft.llama.cpp")

_ERROR, _CONTINUED = 4, 5  # of ggml.h; the binding's own table has them wrong
_listeners: list[list[str]] = []
_error_listeners: list[list[str]] = []
_held: list[Any] = []  # callbacks that native code uses, which Python must not collect

# The functions that may reach an RPC server, or must not run while another call does.
_GUARDED = re.compile(
    r"llama_(decode|synchronize|get_logits|model_load_from_file|model_free|init_from_model|free"
    r"|batch_free"
    r"|memory_\w+|state_seq_\w+)"
    r"|ggml_backend_dev_(init|get_props|buffer_type)"
)


class NativeLibrary:
    """The functions, types and constants of the llama_cpp module."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        member = _guard(name, getattr(self._module, name))
        setattr(self, name, member)  # looked up once
        return member


@lru_cache(maxsize=1)
def lib() -> Any:
    """Return llama.cpp, initialised and silent: the one door to its functions.

    Until a server is connected, calls go straight to llama.cpp. From then on, calls that may reach
    a server (loading, decoding, reading logits, everything on KV cells, freeing) run one after
    another on the thread of ``rpc_guard``, and raise ServerError if a server is lost under them.
    Raises EngineError if llama-cpp-python does not load.
    """
    limit_spinning()
    try:
        import llama_cpp
    except (ImportError, OSError, RuntimeError) as error:
        raise EngineError(
            f"llama-cpp-python does not load: {error}",
            hint="reinstall it: pip install --no-cache-dir --force-reinstall llama-cpp-python",
        ) from error
    _route_log(llama_cpp)
    llama_cpp.llama_backend_init()
    return NativeLibrary(llama_cpp)


def limit_spinning() -> None:
    """Let OpenMP's threads sleep after some microseconds of waiting, unless the user says how.

    By default they spin on: as soon as another program runs on one of their cores, each waits for
    one that does not run. libgomp reads its settings once, when llama.cpp is loaded.
    """
    if "GOMP_SPINCOUNT" not in os.environ and "OMP_WAIT_POLICY" not in os.environ:
        os.environ["GOMP_SPINCOUNT"] = "10000"


@cache
def function(name: str, result: Any = None, *arguments: Any) -> Any:
    """Return a function of ggml by name, with the ctypes of its result and arguments.

    It belongs to the copy of ggml that llama.cpp uses, and is guarded as those of ``lib`` are.
    Raises EngineError if this build has no function of that name.
    """
    for library in _libraries():
        if hasattr(library, name):
            return _guard(name, ctypes.CFUNCTYPE(result, *arguments)((name, library)))
    raise EngineError(f"this build of llama.cpp has no {name}")


@lru_cache(maxsize=1)
def _libraries() -> list[ctypes.CDLL]:
    """Return the libraries that hold ggml's functions.

    A wheel holds each library under several names. Loading one of them again can give a second
    ggml, whose devices and settings llama.cpp does not know. A look-up in libllama also looks in
    the libraries that it is linked to, except on Windows.
    """
    llama = lib().llama_cpp._lib
    of_windows = sorted(Path(llama._name).parent.glob("ggml*.dll"))
    return [llama, *(ctypes.CDLL(str(path)) for path in of_windows)]


def _guard(name: str, member: Any) -> Any:
    if not _GUARDED.fullmatch(name):
        return member
    return partial(GUARD.call, member, later=name in ("llama_free", "llama_model_free"))


def _route_log(llama_cpp: Any) -> None:
    """Send whole lines to the logger at debug level, so that llama.cpp prints none itself."""
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
        listeners = list(_listeners)
        if level == _ERROR and message:
            listeners += _error_listeners
        for lines in listeners:
            lines.append(message)
        log.debug("%s", message)

    callback = llama_cpp.llama_log_callback(receive)
    _held.append(callback)
    llama_cpp.llama_log_set(callback, None)


@contextmanager
def listening(lines: list[str]) -> Iterator[None]:
    """Add what llama.cpp logs during the block to ``lines``, whatever its level."""
    with _subscribed(lines, _listeners):
        yield


class NativeErrors:
    """The lines that llama.cpp has logged as errors."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def __str__(self) -> str:
        """Return llama.cpp's own words on what went wrong.

        The first error names the cause; those after it only say that the caller failed too.
        """
        return self.lines[0] if self.lines else "llama.cpp gave no reason"


@contextmanager
def native_errors() -> Iterator[NativeErrors]:
    """Collect the errors that llama.cpp logs during the block."""
    errors = NativeErrors()
    with _subscribed(errors.lines, _error_listeners):
        yield errors


@contextmanager
def _subscribed(lines: list[str], listeners: list[list[str]]) -> Iterator[None]:
    listeners.append(lines)
    try:
        yield
    finally:
        # By identity, because two empty lists are equal.
        listeners[:] = [other for other in listeners if other is not lines]


def keep_freed_memory() -> None:
    """Let the process reuse the memory of freed rows.

    glibc returns blocks above a threshold to the system whenever they are freed, and each new row
    of probabilities then costs page faults: half as long again for all sampling. Freeing one big
    block raises the threshold to its size, at most 32 MiB (``mallopt``, M_MMAP_THRESHOLD). Call it
    once llama.cpp has its buffers: an RPC server must get memory that the system has zeroed,
    because under split mode tensor nobody clears its KV cells.
    """
    np.empty(2**25 - 2**16, dtype=np.uint8)


def library_version() -> str:
    return version("llama-cpp-python")


def build_id() -> str:
    """Identify this build of the library by its version and the sizes and dates of its files."""
    package = Path(lib().__file__).parent
    folder = Path(os.environ.get("LLAMA_CPP_LIB_PATH") or package / "lib")
    files = sorted(f for f in folder.iterdir() if f.is_file() and not f.is_symlink())
    stamp = ",".join(f"{f.name}:{f.stat().st_size}:{int(f.stat().st_mtime)}" for f in files)
    return f"{library_version()}-{hashlib.sha256(stamp.encode()).hexdigest()[:16]}"
