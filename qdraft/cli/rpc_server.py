"""`qdraft rpc-server`: this machine's devices for a qdraft on another machine."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Annotated

from qdraft.cli.options.devices import DeviceOptions, parse_devices
from qdraft.cli.options.group import Group, Only, option, takes_options
from qdraft.llama.devices import devices as list_devices
from qdraft.llama.native import library_version
from qdraft.llama.rpc import DEFAULT_PORT
from qdraft.llama.rpc_server import default_devices, make_server

log = logging.getLogger(__name__)

_PANEL = "Server"
_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, kw_only=True)
class ServerOptions(Group):
    """Where the server listens, and what it offers."""

    host: Annotated[
        str, option(_PANEL, "-H", "--host", help="Address to listen on; 0.0.0.0 is every address.")
    ] = _LOOPBACK
    port: Annotated[
        int, option(_PANEL, "-p", "--port", min=1, max=65535, help="Port to listen on.")
    ] = DEFAULT_PORT
    device: Annotated[
        str | None,
        option(
            _PANEL,
            "-dev",
            "--device",
            help="Devices to offer, by the names that qdraft devices shows.",
            default="all GPUs, else the CPU",
        ),
    ] = None


@takes_options
def rpc_server(options: ServerOptions, devices: Annotated[DeviceOptions, Only("threads")]) -> None:
    """Lend this machine's devices to qdraft on another machine, until Ctrl-C.

    On the other machine, name this server with qdraft run --rpc. Both machines need the same
    version of llama-cpp-python. The server accepts connections from this machine only, unless
    --host names another address.
    """
    host, port = options.host, options.port
    names = parse_devices(options.device)
    serve = make_server(_LOOPBACK if host == "localhost" else host, port, names, devices.threads)
    available = {device.name: device for device in list_devices()}
    for name in names or default_devices():
        if device := available.get(name):
            free = device.free / 2**30
            log.info("serving %s, %s, %.1f GiB free", name, device.description, free)
    if not host.startswith("127.") and host != "localhost":
        log.warning(
            "the protocol has no authentication and no encryption: anyone who can reach %s:%d can "
            "read and change what this server computes, so keep it inside a network that you trust",
            host,
            port,
        )
    log.info("llama-cpp-python %s is listening on %s:%d", library_version(), host, port)
    log.info("on the other machine, run qdraft run --rpc HOST:%d", port)
    serve()
