"""What a build can compute on, against what the library itself says."""

from __future__ import annotations

import json
import os
from pathlib import Path

import jsonschema
import pytest
from invoke import qdraft, schema

pytest.importorskip("llama_cpp", reason="needs llama-cpp-python")

from qdraft.errors import EngineError
from qdraft.llama.devices import DEVICE_KINDS, build, devices
from qdraft.llama.native import function
from qdraft.render.devices import gpu_hints


def test_the_cpu_is_a_device() -> None:
    cpu = next(device for device in devices() if device.kind == "cpu")
    assert cpu.total >= cpu.free > 2**28
    if hasattr(os, "sysconf"):
        assert cpu.total == pytest.approx(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    assert {device.kind for device in devices()} <= set(DEVICE_KINDS)


def test_the_build_is_what_the_binding_says() -> None:
    import llama_cpp

    made = build()
    assert made.gpu_offload <= llama_cpp.llama_supports_gpu_offload()
    assert made.rpc == llama_cpp.llama_supports_rpc()
    assert made.threads >= 1
    text = llama_cpp.llama_print_system_info().decode().lower()
    for name in ("avx2", "avx512", "neon", "f16c"):
        assert (name in made.cpu_features) == (f"{name} = 1" in text)


def test_a_function_that_is_not_there() -> None:
    with pytest.raises(EngineError, match="no ggml_none"):
        function("ggml_none")


def test_there_is_one_ggml_only() -> None:
    """A second copy under another of its names would have devices of its own."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("needs /proc")
    devices()
    build()
    names = {line.split()[-1] for line in maps.read_text().splitlines() if "libggml-base" in line}
    assert len(names) == 1


def test_command() -> None:
    report = json.loads(qdraft("devices", "--json").stdout)
    jsonschema.validate(report, schema("devices"))
    assert report["devices"][0]["name"] == devices()[0].name
    text = qdraft("devices").stdout
    assert all(hint in text for hint in gpu_hints()) == (not build().gpu_offload)
