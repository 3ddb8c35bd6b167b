"""The client of llama.cpp's RPC backend: devices of other machines."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import socket
import stat
import struct
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from qdraft.errors import ServerError, UsageError
from qdraft.llama.native import function, lib
from qdraft.llama.rpc_guard import GUARD

DEFAULT_PORT = 50052
_ANSWER_S = 4.0  # for a server to accept a connection
_GREETING_S = 10.0  # for its greeting and its list of devices
_SILENT_S = 10  # a machine that answers no keep-alive for so long counts as lost
_REINSTALL = (
    "reinstall it with RPC: CMAKE_ARGS=-DGGML_RPC=ON pip install --no-cache-dir --force-reinstall "
    "--no-deps llama-cpp-python"
)
_pointer, _text, _count = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t

_servers: dict[str, tuple[str, int]] = {}  # the connected ones: HOST:PORT to address
_held: list[Any] = []  # for each, a backend that keeps its connection open


def parse_servers(text: str | None) -> tuple[str, ...]:
    """Split HOST:PORT[,HOST:PORT...], without repetitions. Raises UsageError."""
    servers = tuple(dict.fromkeys(part.strip() for part in text.split(","))) if text else ()
    for server in servers:
        address = re.fullmatch(r"[^:\s]+:(\d{1,5})", server)
        if not address or not 0 < int(address[1]) < 65536:
            raise UsageError(
                f"--rpc is {server!r} but must be HOST:PORT",
                hint=f"for example 192.168.1.5:{DEFAULT_PORT}; several are separated by commas",
            )
    return servers


def connect(servers: Sequence[str], *, hold: bool = True) -> None:
    """Add the devices of these servers to those of this process; harmless when repeated.

    A server takes one client at a time. ``hold`` keeps the connection open, so that no other client
    gets in; without it the connection lasts only while a model is loaded there. Raises UsageError
    if the build has no RPC, and ServerError if a server is down or speaks another version of the
    protocol.
    """
    new = [server for server in servers if server not in _servers]
    if not new:
        return
    require_rpc()
    GUARD.start(function("ggml_set_abort_callback", _pointer, _pointer))
    if not _servers and sys.platform == "linux":
        threading.Thread(target=_watch, daemon=True, name="qdraft-servers").start()
    for server in new:
        address = _reach(server)
        try:
            add_server = rpc_function("add_server", _pointer, _text)
            registry = GUARD.call(add_server, server.encode(), within=_GREETING_S)
        except ServerError as error:
            raise ServerError(
                f"{server} does not answer as an RPC server of this version of llama.cpp: "
                f"{GUARD.lost}",
                hint="install the same version of llama-cpp-python on both machines; a server "
                "takes one client at a time",
            ) from error
        if not registry:
            raise ServerError(f"the RPC server at {server} offers no devices")
        function("ggml_backend_register", None, _pointer)(registry)
        _servers[server] = address
        if hold:
            first = function("ggml_backend_reg_dev_get", _pointer, _pointer, _count)(registry, 0)
            start = function("ggml_backend_dev_init", _pointer, _pointer, _text)
            _held.append(start(first, None, within=_GREETING_S))
            keep_alive()


def _reach(server: str) -> tuple[str, int]:
    """Connect to a server once and return its address. Raises ServerError."""
    host, port = server.rsplit(":", 1)
    try:
        addresses = socket.getaddrinfo(host, int(port), socket.AF_INET, socket.SOCK_STREAM)
        address = str(addresses[0][4][0]), int(addresses[0][4][1])
        with socket.create_connection(address, timeout=_ANSWER_S):
            return address
    except OSError as error:
        why = "no answer" if isinstance(error, TimeoutError) else error.strerror or error
        raise ServerError(
            f"no RPC server answers at {server}: {why}",
            hint=f"start it there: qdraft rpc-server --host ADDRESS --port {port}",
        ) from error


def keep_alive() -> None:
    """Let the system close connections to servers that fall silent, for example behind a cut cable.

    llama.cpp itself would wait forever. The system asks a server that is idle whether it is there;
    ``_watch`` looks after one that has data to take.
    """
    for connection in _connections():
        _set_alive(connection)


def _connections() -> Iterator[socket.socket]:
    """Give the connections to servers, found among the open files of the process.

    There are none on Windows.
    """
    if not _servers or not Path("/dev/fd").is_dir():
        return
    addresses = set(_servers.values())
    for name in os.listdir("/dev/fd"):
        with contextlib.suppress(OSError):  # it is closed by now, or not connected
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                with socket.socket(fileno=os.dup(int(name))) as connection:
                    if connection.getpeername() in addresses:
                        yield connection


def _watch() -> None:
    """Close connections whose other machine takes no data and does not answer either.

    TCP_USER_TIMEOUT would do that, but it also closes those to a server that only computes for
    long, as it does with the batches of a long prompt: then its machine still answers.
    """
    while True:
        time.sleep(1)
        for connection in _connections():
            if is_silent(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)):
                connection.shutdown(socket.SHUT_RDWR)


def is_silent(info: bytes) -> bool:
    """Tell from Linux's tcp_info whether data or probes stay unanswered for too long."""
    n_retransmits, n_probes = info[2], info[3]
    answered_ms: int = struct.unpack_from("=I", info, 56)[0]  # since the last acknowledgement
    return answered_ms > 1000 * _SILENT_S and (n_retransmits > 0 or n_probes > 1)


def _set_alive(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    idle = getattr(socket, "TCP_KEEPIDLE", getattr(socket, "TCP_KEEPALIVE", None))
    for option, value in (
        (idle, 3),
        (getattr(socket, "TCP_KEEPINTVL", None), 1),
        (getattr(socket, "TCP_KEEPCNT", None), _SILENT_S - 3),
    ):
        if option is not None:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)


def require_rpc() -> None:
    """Raise UsageError if this build cannot use RPC."""
    if not lib().llama_supports_rpc():
        raise UsageError("this build of llama-cpp-python was made without RPC", hint=_REINSTALL)


def rpc_function(name: str, result: Any, *arguments: Any) -> Any:
    """Return a function of the RPC backend, which ggml gives by name."""
    registry = function("ggml_backend_reg_by_name", _pointer, _text)(b"RPC")
    find = function("ggml_backend_reg_get_proc_address", _pointer, _pointer, _text)
    return ctypes.CFUNCTYPE(result, *arguments)(find(registry, f"ggml_backend_rpc_{name}".encode()))
