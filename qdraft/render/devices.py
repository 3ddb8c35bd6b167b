"""What a build can compute on, for people."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType

from qdraft.llama.devices import Build, Device
from qdraft.render.layout import line, wrapped
from qdraft.render.tables import Sheet, as_table

_GIB = 2**30
# How a build for a GPU is made: one line each.
_BUILDS = {
    "CUDA": "GGML_CUDA=on", "Metal": "GGML_METAL=on", "Vulkan": "GGML_VULKAN=on",
    "ROCm": "GGML_HIP=on",
}  # fmt: skip


def devices_view(build: Build, found: Sequence[Device]) -> RenderableType:
    """The build and its devices."""
    rows = tuple(
        (
            one.name, one.kind, one.description,
            one.free / _GIB if one.total else None, one.total / _GIB if one.total else None,
        )
        for one in found
    )  # fmt: skip
    can = [name for name, has in (("GPU offload", build.gpu_offload), ("RPC", build.rpc)) if has]
    views: list[RenderableType] = [
        line("build", build.library, "with " + " and ".join(can) if can else "for the CPU only"),
        *wrapped("cpu", f"{build.cpu}, {build.threads} threads, {' '.join(build.cpu_features)}"),
        as_table(Sheet("", ("device", "kind", "description", "free GiB", "total GiB"), rows)),
    ]
    return Group(*views)


def gpu_hints() -> list[str]:
    """One line for each way to get a build for a GPU, to be copied whole."""
    return [f"{name}: {reinstall(option)}" for name, option in _BUILDS.items()]


def reinstall(option: str) -> str:
    """The command line that builds the binding with an option of ggml.

    pip's cache of wheels does not look at CMAKE_ARGS: without --no-cache-dir it takes an old build.
    """
    return (
        f'CMAKE_ARGS="-D{option}" pip install --no-cache-dir --force-reinstall --no-deps '
        "llama-cpp-python"
    )
