"""`qdraft devices`: what this build of llama.cpp can compute on."""

from __future__ import annotations

from qdraft.cli import options as opt
from qdraft.cli.machine_options import Rpc
from qdraft.llama.devices import build
from qdraft.llama.devices import devices as found_devices
from qdraft.llama.rpc import connect, parse_servers
from qdraft.render.console import show_json, table_console
from qdraft.render.devices import devices_view, gpu_hints


def devices(rpc: Rpc = None, as_json: opt.Json = False) -> None:
    """Show the build of llama-cpp-python, the CPU's features and the devices it can use."""
    connect(parse_servers(rpc))
    made, found = build(), found_devices()
    if as_json:
        show_json({"build": made, "devices": found})
    else:
        out = table_console()
        out.print(devices_view(made, found))
        if not made.gpu_offload:
            out.print("\nFor a GPU, reinstall llama-cpp-python built for it:")
            for hint in gpu_hints():
                out.print(hint, soft_wrap=True)
