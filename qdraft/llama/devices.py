"""The devices that this build of llama.cpp has here, and the instruction sets of the CPU."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

from qdraft import host
from qdraft.errors import EngineError
from qdraft.host import cpu_name, default_threads
from qdraft.llama.native import build_id, function, lib, library_version

DEVICE_KINDS = ("cpu", "gpu", "igpu", "accel", "meta")  # ggml_backend_dev_type
_RPC = "RPC"  # what ggml calls the backend of servers on other machines
_CPU_FEATURES = [
    "sse3",
    "ssse3",
    "avx",
    "avx_vnni",
    "avx2",
    "avx512",
    "avx512_vbmi",
    "avx512_vnni",
    "avx512_bf16",
    "amx_int8",
    "bmi2",
    "f16c",
    "fma",
    "neon",
    "arm_fma",
    "fp16_va",
    "dotprod",
    "matmul_int8",
    "sve",
    "sme",
    "riscv_v",
    "vsx",
    "wasm_simd",
    "llamafile",
]

_pointer, _text = ctypes.c_void_p, ctypes.c_char_p


class _Props(ctypes.Structure):
    """ggml_backend_dev_props, with room for more capabilities than this build has."""

    _fields_ = [
        ("name", _text),
        ("description", _text),
        ("free", ctypes.c_size_t),
        ("total", ctypes.c_size_t),
        ("type", ctypes.c_int),
        ("card", _text),
        ("capabilities", ctypes.c_char * 64),
    ]


@dataclass(frozen=True, slots=True)
class Device:
    """One device of ggml, with its memory in bytes (0 if the device does not report it).

    ``remote`` is True for a device of an RPC server, whose description is HOST:PORT. ``backend`` is
    ggml's name for the driver, ``card`` the id of the hardware if that is known.
    """

    name: str
    description: str
    kind: str
    remote: bool
    free: int
    total: int
    backend: str = ""
    card: str = ""

    @property
    def unified(self) -> bool:
        """True if its memory is the CPU's."""
        return self.kind == "igpu" or self.backend == "MTL"

    @property
    def takes_layers(self) -> bool:
        """True if layers can go to it; False for the CPU, and for what only accelerates the CPU."""
        return self.kind in ("gpu", "igpu")


@dataclass(frozen=True, slots=True)
class Build:
    """The build of llama-cpp-python, and whether it can use a GPU here and RPC servers."""

    library: str
    build: str
    gpu_offload: bool
    rpc: bool
    cpu: str
    cpu_features: tuple[str, ...]
    threads: int


def devices() -> list[Device]:
    """Return all devices in ggml's order: GPUs, the CPU, then those of connected RPC servers.

    Raises ServerError if a server no longer answers.
    """
    get = function("ggml_backend_dev_get", _pointer, ctypes.c_size_t)
    count = function("ggml_backend_dev_count", ctypes.c_size_t)
    return [_describe(get(i)) for i in range(count())]


def offload_devices() -> list[Device]:
    """Return the devices that llama.cpp puts layers on if the user names none.

    A card that several backends report counts once. Integrated GPUs count only if there is no other
    GPU, and only those of one backend.
    """
    candidates = [device for device in devices() if device.takes_layers]
    local: dict[str, Device] = {}
    for device in candidates:
        if device.kind == "gpu" and not device.remote:
            local.setdefault(device.card or device.name, device)
    integrated = [device for device in candidates if device.kind == "igpu"]
    integrated = [device for device in integrated if device.backend == integrated[0].backend]
    return [*(device for device in candidates if device.remote), *(local.values() or integrated)]


def device_pointer(name: str) -> int | None:
    """Return ggml's pointer to the device of this name; None if there is none."""
    pointer = function("ggml_backend_dev_by_name", _pointer, _text)(name.encode())
    return int(pointer) if pointer else None


def buffer_types(names: Sequence[str]) -> dict[str, int]:
    """Return the buffer type of each device, by the device's name and by its own."""
    of_device = function("ggml_backend_dev_buffer_type", _pointer, _pointer)
    name_of = function("ggml_backend_buft_name", _text, _pointer)
    types: dict[str, int] = {}
    for name in names:
        if kind := of_device(device_pointer(name)):
            types[name] = types[name_of(kind).decode("utf-8", "replace")] = kind
    return types


def splits_rows(device: Device) -> bool:
    """Tell whether the backend of a device can split the rows of a matrix over several devices."""
    registry = function("ggml_backend_dev_backend_reg", _pointer, _pointer)
    find = function("ggml_backend_reg_get_proc_address", _pointer, _pointer, _text)
    of_device = registry(device_pointer(device.name))
    return bool(find(of_device, b"ggml_backend_split_buffer_type"))


def free_memory() -> int:
    """Return the bytes of this machine's own memory that programs can still take."""
    free = host.free_memory()
    if free is None:
        free = next((device.free for device in devices() if device.kind == "cpu"), 0)
    return free


def _describe(device: int) -> Device:
    """Ask ggml about a device."""

    def text_of(what: str) -> str:
        text: bytes = function(f"ggml_backend_dev_{what}", _text, _pointer)(device)
        return text.decode("utf-8", "replace")

    registry = function("ggml_backend_dev_backend_reg", _pointer, _pointer)(device)
    backend: bytes = function("ggml_backend_reg_name", _text, _pointer)(registry)
    props = _Props()
    get_props = function("ggml_backend_dev_get_props", None, _pointer, _pointer)
    get_props(device, ctypes.addressof(props))
    kind = DEVICE_KINDS[props.type] if props.type < len(DEVICE_KINDS) else "other"
    return Device(
        name=text_of("name"),
        description=text_of("description"),
        kind=kind,
        remote=backend.startswith(_RPC.encode()),
        free=props.free,
        total=props.total,
        backend=backend.decode("utf-8", "replace"),
        card=(props.card or b"").decode("utf-8", "replace"),
    )


def build() -> Build:
    """Describe the build of llama.cpp that is installed."""
    return Build(
        library=f"llama-cpp-python {library_version()}",
        build=build_id(),
        gpu_offload=any(device.takes_layers and not device.remote for device in devices()),
        rpc=bool(lib().llama_supports_rpc()),
        cpu=cpu_name(),
        cpu_features=tuple(name for name in _CPU_FEATURES if _cpu_has(name)),
        threads=default_threads(),
    )


def _cpu_has(feature: str) -> bool:
    try:
        return bool(function(f"ggml_cpu_has_{feature}", ctypes.c_int)())
    except EngineError:  # a feature of another kind of CPU
        return False
