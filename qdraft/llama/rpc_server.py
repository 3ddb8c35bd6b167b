"""The server of llama.cpp's RPC backend: devices of this machine, for other machines."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence

from qdraft.errors import EngineError, UsageError
from qdraft.host import default_threads
from qdraft.llama.devices import device_pointer, devices
from qdraft.llama.interrupts import STOP_SIGNALS
from qdraft.llama.rpc import require_rpc, rpc_function

_pointer, _text, _count = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t


def make_server(host: str, port: int, names: Sequence[str], n_threads: int) -> Callable[[], None]:
    """Return a function that serves devices of this machine until Ctrl-C ends the process.

    ``names`` empty serves those of ``default_devices``. Raises UsageError for an unknown device or
    a build without RPC, and EngineError if the port is taken.
    """
    require_rpc()
    chosen = [_require_device(name) for name in names or default_devices()]
    _require_free(host, port)
    start = rpc_function(
        "start_server", None, _text, _text, _count, _count, ctypes.POINTER(_pointer)
    )
    pointers = (_pointer * len(chosen))(*chosen)

    def serve() -> None:
        for number in STOP_SIGNALS:
            if callable(signal.getsignal(number)):  # it would wait for the call, which never ends
                signal.signal(number, signal.SIG_DFL)
        sys.stdout.flush()
        os.dup2(2, 1)  # ggml prints its messages to stdout
        endpoint, n = f"{host}:{port}".encode(), n_threads or default_threads()
        start(endpoint, None, n, len(chosen), pointers)
        raise EngineError(f"the RPC server at {host}:{port} ended")

    return serve


def default_devices() -> list[str]:
    """Return the devices to serve if the user names none: all GPUs, or else the CPU."""
    own = [device for device in devices() if not device.remote]
    gpus = [device.name for device in own if device.takes_layers]
    return gpus or [device.name for device in own if device.kind == "cpu"]


def _require_free(host: str, port: int) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise EngineError(
                f"the RPC server cannot listen at {host}:{port}: {error.strerror or error}"
            ) from error


def _require_device(name: str) -> int:
    pointer = device_pointer(name)
    if pointer is None:
        known = ", ".join(device.name for device in devices())
        raise UsageError(f"there is no device {name}", hint=f"known here: {known}")
    return pointer
