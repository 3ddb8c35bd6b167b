"""llama.cpp's RPC engine: devices of other machines, and serving those of this one."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import socket
import stat
import sys
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from qdraft.errors import EngineError, ServerError, UsageError
from qdraft.host import default_threads
from qdraft.llama.devices import device_pointer, devices
from qdraft.llama.ggml import function
from qdraft.llama.native import native
from qdraft.llama.rpc_guard import LIFELINE

DEFAULT_PORT = 50052
_ANSWER_S = 4.0  # for a connection
_GREETING_S = 10.0  # for llama.cpp's own greeting, and its list of devices
_SILENT_S = 10  # after which a machine that answers no keep-alive counts as lost
_REINSTALL = (
    "build it in: CMAKE_ARGS=-DGGML_RPC=ON pip install --no-cache-dir --force-reinstall --no-deps "
    "llama-cpp-python"
)
# What may reach a server, or must not happen while something else does.
_GUARDED = re.compile(
    r"llama_(decode|synchronize|get_logits|model_load_from_file|model_free|init_from_model|free"
    r"|memory_\w+|state_seq_\w+)"
)
_pointer, _text, _count = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t

_servers: dict[str, tuple[str, int]] = {}  # those that were added: HOST:PORT to address
_held: list[Any] = []  # for each, a backend that keeps its connection


def parse_servers(text: str | None) -> tuple[str, ...]:
    """HOST:PORT[,HOST:PORT...], without repetitions. Raises UsageError."""
    servers = tuple(dict.fromkeys(part.strip() for part in text.split(","))) if text else ()
    for server in servers:
        found = re.fullmatch(r"[^:\s]+:(\d{1,5})", server)
        if not found or not 0 < int(found[1]) < 65536:
            raise UsageError(
                f"--rpc is {server!r} but must be HOST:PORT",
                hint=f"for example 192.168.1.5:{DEFAULT_PORT}; several are separated by commas",
            )
    return servers


def connect(servers: Sequence[str], *, hold: bool = True) -> None:
    """Make the devices of these servers devices of this process; harmless when repeated.

    A server takes one client at a time. ``hold`` keeps the connection, so that no other gets in;
    without it there is none as long as no model is loaded there. Raises UsageError on a build
    without RPC, and ServerError for a server that is down or speaks another version of the
    protocol.
    """
    new = [server for server in servers if server not in _servers]
    if not new:
        return
    if not native().llama_supports_rpc():
        raise UsageError("this build of llama-cpp-python has no RPC", hint=_REINSTALL)
    LIFELINE.start(function("ggml_set_abort_callback", _pointer, _pointer))
    for server in new:
        address = _reach(server)
        try:
            registry = LIFELINE.call(_rpc("add_server", _pointer, _text), server.encode(),
                                     within=_GREETING_S)  # fmt: skip
        except ServerError as error:
            raise ServerError(
                f"{server} does not answer as an RPC server of this version of llama.cpp: "
                f"{LIFELINE.lost}",
                hint="both machines need the same version of llama-cpp-python, and a server takes "
                "one client at a time",
            ) from error
        if not registry:
            raise ServerError(f"the RPC server {server} offers no device")
        function("ggml_backend_register", None, _pointer)(registry)
        _servers[server] = address
        if hold:
            first = function("ggml_backend_reg_dev_get", _pointer, _pointer, _count)(registry, 0)
            start = function("ggml_backend_dev_init", _pointer, _pointer, _text)
            _held.append(LIFELINE.call(start, first, None, within=_GREETING_S))
            keep_alive()


def _reach(server: str) -> tuple[str, int]:
    """The address that a connection was made to. Raises ServerError."""
    host, port = server.rsplit(":", 1)
    try:
        found = socket.getaddrinfo(host, int(port), socket.AF_INET, socket.SOCK_STREAM)
        address = str(found[0][4][0]), int(found[0][4][1])
        with socket.create_connection(address, timeout=_ANSWER_S):
            return address
    except OSError as error:
        why = "no answer" if isinstance(error, TimeoutError) else error.strerror or error
        raise ServerError(
            f"no RPC server answers at {server}: {why}",
            hint=f"start it there: qdraft rpc-server --host ADDRESS --port {port}",
        ) from error


def device_library() -> Any:
    """The llama_cpp module; with servers, one whose calls survive that a server is lost."""
    return _guarded() if LIFELINE.started else native()


@lru_cache(maxsize=1)
def _guarded() -> Any:
    return _Guarded(native())


class _Guarded:
    """A module, some of whose functions are called through the lifeline."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._module, name)
        if _GUARDED.fullmatch(name):
            found = partial(LIFELINE.call, found)
        setattr(self, name, found)  # looked up once
        return found


def keep_alive() -> None:
    """Have the system end connections to servers that fell silent, as when a cable is pulled.

    llama.cpp itself waits for ever. Its sockets are found among this process's open files;
    without effect on Windows.
    """
    if not _servers or not Path("/dev/fd").is_dir():
        return
    addresses = set(_servers.values())
    for name in os.listdir("/dev/fd"):
        with contextlib.suppress(OSError):  # closed by now, or not connected
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                with socket.socket(fileno=os.dup(int(name))) as connection:
                    if connection.getpeername() in addresses:
                        _set_alive(connection)


def _set_alive(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    idle = getattr(socket, "TCP_KEEPIDLE", getattr(socket, "TCP_KEEPALIVE", None))
    for option, value in (
        (idle, 3),
        (getattr(socket, "TCP_KEEPINTVL", None), 1),
        (getattr(socket, "TCP_KEEPCNT", None), _SILENT_S - 3),
        (getattr(socket, "TCP_USER_TIMEOUT", None), 1000 * _SILENT_S),
    ):
        if option is not None:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)


def server(host: str, port: int, names: Sequence[str], n_threads: int) -> Callable[[], None]:
    """What offers devices of this machine until the process is ended; Ctrl-C does that.

    ``names`` empty offers all GPUs, or the CPU where there is none. Raises UsageError for unknown
    devices or a build without RPC, EngineError where the port cannot be had.
    """
    if not native().llama_supports_rpc():
        raise UsageError("this build of llama-cpp-python has no RPC", hint=_REINSTALL)
    chosen = [_require_device(name) for name in names or offered()]
    _require_free(host, port)
    start = _rpc("start_server", None, _text, _text, _count, _count, ctypes.POINTER(_pointer))
    pointers = (_pointer * len(chosen))(*chosen)

    def serve() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python's own handler waits for native code
        sys.stdout.flush()
        os.dup2(2, 1)  # what ggml prints is talk
        endpoint, n = f"{host}:{port}".encode(), n_threads or default_threads()
        start(endpoint, None, n, len(chosen), pointers)
        raise EngineError(f"the RPC server at {host}:{port} ended")

    return serve


def offered() -> list[str]:
    """The devices that are served where none are named."""
    found = [device for device in devices() if not device.remote]
    gpus = [device.name for device in found if device.takes_layers]
    return gpus or [device.name for device in found if device.kind == "cpu"]


def _require_free(host: str, port: int) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise EngineError(
                f"{host}:{port} cannot be listened at: {error.strerror or error}"
            ) from error


def _require_device(name: str) -> int:
    pointer = device_pointer(name)
    if pointer is None:
        known = ", ".join(device.name for device in devices())
        raise UsageError(f"there is no device {name}", hint=f"known here: {known}")
    return pointer


def _rpc(name: str, result: Any, *arguments: Any) -> Any:
    """A function of the RPC backend, which ggml hands out by name."""
    registry = function("ggml_backend_reg_by_name", _pointer, _text)(b"RPC")
    find = function("ggml_backend_reg_get_proc_address", _pointer, _pointer, _text)
    return ctypes.CFUNCTYPE(result, *arguments)(find(registry, f"ggml_backend_rpc_{name}".encode()))
