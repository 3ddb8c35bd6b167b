"""`qdraft rpc-server`: this machine's devices for a qdraft on another machine."""

from __future__ import annotations

import logging
from typing import Annotated

from qdraft.cli.machine_options import Threads, parse_devices
from qdraft.cli.options import option
from qdraft.llama.devices import devices
from qdraft.llama.native import library_version
from qdraft.llama.rpc import DEFAULT_PORT, offered, server

log = logging.getLogger(__name__)

_SERVER = "Server"
_LOOPBACK = "127.0.0.1"

Host = Annotated[
    str, option(_SERVER, "-H", "--host", help="Address to listen at; 0.0.0.0 is every one.")
]
Port = Annotated[int, option(_SERVER, "-p", "--port", min=1, max=65535, help="Port to listen at.")]
Names = Annotated[
    str | None,
    option(_SERVER, "-dev", "--device", help="Only these.", default="all GPUs, else the CPU"),
]


def rpc_server(
    host: Host = _LOOPBACK,
    port: Port = DEFAULT_PORT,
    device: Names = None,
    threads: Threads = 0,
) -> None:
    """Serve this machine's devices to qdraft run --rpc on another one, until Ctrl-C.

    The server is llama.cpp's own, from the llama-cpp-python that is installed here; the other
    machine needs the same version. It listens to this machine alone unless --host says otherwise.
    """
    names = parse_devices(device)
    serve = server("127.0.0.1" if host == "localhost" else host, port, names, threads)
    told = {one.name: one for one in devices()}
    for name in names or offered():
        if one := told.get(name):
            log.info("serving %s, %s, %.1f GiB free", name, one.description, one.free / 2**30)
    if not host.startswith("127.") and host != "localhost":
        log.warning(
            "the protocol has no authentication and no encryption: whoever reaches %s:%d can read "
            "and change what is computed here; keep it inside a network that you trust",
            host, port,
        )  # fmt: skip
    log.info(
        "llama-cpp-python %s at %s:%d; on the other machine: qdraft run --rpc HOST:%d",
        library_version(), host, port, port,
    )  # fmt: skip
    serve()
