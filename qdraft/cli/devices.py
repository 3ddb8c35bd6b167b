"""`qdraft devices`: what this build of llama.cpp can compute on."""

from __future__ import annotations

from typing import Annotated

from qdraft.cli.options.devices import DeviceOptions
from qdraft.cli.options.group import Only, takes_options
from qdraft.cli.options.output import OutputOptions
from qdraft.llama.devices import build as describe_build
from qdraft.llama.devices import devices as list_devices
from qdraft.llama.rpc import connect
from qdraft.render.console import show_json, table_console
from qdraft.render.devices import devices_view, gpu_hints


@takes_options
def devices(
    options: Annotated[DeviceOptions, Only("rpc")],
    output: Annotated[OutputOptions, Only("as_json")],
) -> None:
    """List the devices that this build of llama.cpp can use.

    Also shows the version of llama-cpp-python and the features of the CPU.
    """
    connect(options.servers)
    build, available = describe_build(), list_devices()
    if output.as_json:
        show_json({"build": build, "devices": available})
        return
    console = table_console()
    console.print(devices_view(build, available))
    if not build.gpu_offload:
        console.print("\nTo use a GPU, reinstall llama-cpp-python with a build for it:")
        for hint in gpu_hints():
            console.print(hint, soft_wrap=True)
