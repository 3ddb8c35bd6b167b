"""What this build of llama.cpp can compute on: ggml's devices, and the CPU's instruction sets."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from qdraft.engine.library import build_id, cpu_name, default_threads, library_version, native
from qdraft.errors import EngineError

KINDS = ("cpu", "gpu", "igpu", "accel", "meta")  # ggml_backend_dev_type
_CPU_FEATURES = (
    "sse3", "ssse3", "avx", "avx_vnni", "avx2", "avx512", "avx512_vbmi", "avx512_vnni",
    "avx512_bf16", "amx_int8", "bmi2", "f16c", "fma", "neon", "arm_fma", "fp16_va", "dotprod",
    "matmul_int8", "sve", "sme", "riscv_v", "vsx", "wasm_simd", "llamafile",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Device:
    """One device of ggml, with its memory in bytes (0 where it does not tell)."""

    name: str
    description: str
    kind: str
    free: int
    total: int


@dataclass(frozen=True, slots=True)
class Build:
    """The build of llama-cpp-python, and what it was built to use."""

    library: str
    build: str
    gpu_offload: bool
    rpc: bool
    cpu: str
    cpu_features: tuple[str, ...]
    threads: int


def ggml(name: str) -> ctypes.CDLL:
    """One of the ggml libraries that stand beside libllama (ggml, ggml-base, ggml-cpu).

    Raises EngineError where there is none.
    """
    folder = Path(native().llama_cpp._lib._name).parent
    for pattern in (f"lib{name}.so", f"lib{name}.dylib", f"{name}.dll", f"lib{name}.so.*"):
        for path in sorted(folder.glob(pattern)):
            return ctypes.CDLL(str(path))
    raise EngineError(f"no {name} library stands beside {native().llama_cpp._lib._name}")


def devices() -> list[Device]:
    """All devices of this build, in ggml's order: the CPU, GPUs, RPC servers that were added."""
    api = _api()
    found = []
    for i in range(api.count()):
        device = api.get(i)
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        api.memory(device, ctypes.byref(free), ctypes.byref(total))
        kind = api.kind(device)
        found.append(
            Device(
                api.name(device).decode("utf-8", "replace"),
                api.description(device).decode("utf-8", "replace"),
                KINDS[kind] if kind < len(KINDS) else "other",
                free.value,
                total.value,
            )
        )
    return found


def build() -> Build:
    """What this build is."""
    lib = native()
    cpu = ggml("ggml-cpu")
    asked = ((name, getattr(cpu, f"ggml_cpu_has_{name}", None)) for name in _CPU_FEATURES)
    return Build(
        library=f"llama-cpp-python {library_version()}",
        build=build_id(),
        gpu_offload=bool(lib.llama_supports_gpu_offload()),
        rpc=bool(lib.llama_supports_rpc()),
        cpu=cpu_name(),
        cpu_features=tuple(name for name, has in asked if has is not None and has()),
        threads=default_threads(),
    )


@dataclass(frozen=True, slots=True)
class _Api:
    """ggml's device functions, with their types."""

    count: Any
    get: Any
    name: Any
    description: Any
    kind: Any
    memory: Any


@lru_cache(maxsize=1)
def _api() -> _Api:
    top, base = ggml("ggml"), ggml("ggml-base")
    pointer, size = ctypes.c_void_p, ctypes.POINTER(ctypes.c_size_t)

    def bound(lib: ctypes.CDLL, name: str, result: Any, *arguments: Any) -> Any:
        function = getattr(lib, f"ggml_backend_dev_{name}")
        function.restype, function.argtypes = result, list(arguments)
        return function

    return _Api(
        bound(top, "count", ctypes.c_size_t),
        bound(top, "get", pointer, ctypes.c_size_t),
        bound(base, "name", ctypes.c_char_p, pointer),
        bound(base, "description", ctypes.c_char_p, pointer),
        bound(base, "type", ctypes.c_int, pointer),
        bound(base, "memory", None, pointer, size, size),
    )
