"""What a build of llama.cpp can compute on, for people."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType

from qdraft.llama.devices import Build, Device
from qdraft.render.layout import line, wrapped
from qdraft.render.tables import Sheet, as_table

_GIB = 2**30
# The options of ggml that build it for a kind of GPU.
_BUILDS = {
    "CUDA": "GGML_CUDA=on",
    "Metal": "GGML_METAL=on",
    "Vulkan": "GGML_VULKAN=on",
    "ROCm": "GGML_HIP=on",
}


def devices_view(build: Build, devices: Sequence[Device]) -> RenderableType:
    """The build, the CPU and the devices."""
    rows = tuple(
        (
            device.name,
            device.kind,
            device.description,
            device.free / _GIB if device.total else None,
            device.total / _GIB if device.total else None,
        )
        for device in devices
    )
    features = [
        name for name, has in (("GPU offload", build.gpu_offload), ("RPC", build.rpc)) if has
    ]
    supports = "with " + " and ".join(features) if features else "for the CPU only"
    return Group(
        line("build", build.library, supports),
        *wrapped("cpu", f"{build.cpu}, {build.threads} threads, {' '.join(build.cpu_features)}"),
        as_table(Sheet("", ("device", "kind", "description", "free GiB", "total GiB"), rows)),
    )


def gpu_hints() -> list[str]:
    """For each kind of GPU, a command line that installs a build for it."""
    return [f"{name}: {reinstall_command(option)}" for name, option in _BUILDS.items()]


def reinstall_command(option: str) -> str:
    """The command line that builds llama-cpp-python with an option of ggml.

    pip's cache of wheels ignores CMAKE_ARGS: without --no-cache-dir pip would take an old build.
    """
    return (
        f'CMAKE_ARGS="-D{option}" pip install --no-cache-dir --force-reinstall --no-deps '
        "llama-cpp-python"
    )
