"""What is asked of llama.cpp, and what is read back: of its own words, and of real loads."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import tiny

pytest.importorskip("llama_cpp", reason="needs llama-cpp-python")

from qdraft.cli.options.devices import parse_overrides
from qdraft.errors import UsageError
from qdraft.llama.devices import Device
from qdraft.llama.params import ALL_LAYERS, EngineParams
from qdraft.llama.placed import chosen_devices, device_of, read_back, surprises_of

CPU = Device("CPU", "a CPU", "cpu", False, 2**34, 2**34)
GPU = Device("CUDA0", "a GPU", "gpu", False, 2**33, 2**33)
FAR = [Device(f"RPC{i}", "10.0.0.2:50052", "gpu", True, 2**33, 2**33) for i in range(2)]
KNOWN = [GPU, CPU, *FAR]


def log_of(layers: dict[int, str], *lines: str) -> list[str]:
    """llama.cpp's words on loading."""
    return [
        *(
            f"load_tensors: layer {i:3d} assigned to device {name}, is_swa = 0"
            for i, name in layers.items()
        ),
        *lines,
    ]


class TestReadBack:
    def test_layers_and_buffers_by_device(self) -> None:
        placed = read_back(
            log_of(
                {0: "CPU", 1: "CUDA0", 2: "CUDA0"},
                "load_tensors:        CUDA0 model buffer size =    10.50 MiB",
                "load_tensors:   CPU_Mapped model buffer size =     4.00 MiB",
                "load_tensors:   CPU_REPACK model buffer size =     1.00 MiB",
                "llama_kv_cache:      CUDA0 KV buffer size =     2.00 MiB",
                "llama_kv_cache:        CPU KV buffer size =     1.00 MiB",
                "llama_context:  CUDA_Host  output buffer size =     0.25 MiB",
                "sched_reserve:      CUDA0 compute buffer size =     9.00 MiB",
                "sched_reserve:      CUDA0 compute buffer size =     8.00 MiB",
                "sched_reserve:  CUDA_Host compute buffer size =     0.50 MiB",
            ),
            KNOWN,
        )
        assert placed.layers == ("CPU", "CUDA0", "CUDA0")
        assert placed.n_offloaded == 2
        gpu, cpu = placed.shares["CUDA0"], placed.shares["CPU"]
        mib = 2**20
        assert (gpu.n_layers, gpu.weights, gpu.kv, gpu.compute) == (2, 10.5 * mib, 2 * mib, 8 * mib)
        assert (cpu.n_layers, cpu.weights, cpu.kv, cpu.compute) == (1, 5 * mib, mib, 0.75 * mib)
        assert placed.mapped == {"CPU": 4 * mib}

    def test_devices_as_one(self) -> None:
        """Split mode tensor: every layer is on all of them."""
        lines = log_of(
            {0: "Meta()", 1: "Meta()"}, "llama_kv_cache: Meta() KV buffer size = 1.00 MiB"
        )
        placed = read_back(lines, KNOWN)
        assert placed.n_offloaded == 2
        assert placed.shares["Meta()"].kv == 2**20
        assert surprises_of(placed, EngineParams(n_gpu_layers=ALL_LAYERS)) == []
        assert placed.remote == ("RPC0", "RPC1")

    def test_names_of_buffers(self) -> None:
        assert device_of("CUDA0", KNOWN) == "CUDA0"
        assert device_of("MTL0_Mapped", [Device("MTL0", "", "gpu", False, 1, 1)]) == "MTL0"
        assert device_of("RPC1[10.0.0.2:50052]", KNOWN) == "RPC1"
        assert device_of("CUDA_Host", KNOWN) == "CPU"
        assert device_of("CPU_REPACK", KNOWN) == "CPU"
        assert device_of("AMX", KNOWN) == "CPU"

    def test_layers_that_landed_on_the_cpu_are_said_aloud(self) -> None:
        """llama.cpp runs layers on the CPU that were asked for a GPU, and says nothing.

        https://github.com/abetlen/llama-cpp-python/issues/2079
        """
        placed = read_back(log_of({0: "CPU", 1: "CPU", 2: "CUDA0"}), KNOWN)
        asked = EngineParams(n_gpu_layers=ALL_LAYERS)
        assert surprises_of(placed, asked) == [
            "3 layers should be on devices, but 2 of them are on the CPU"
        ]
        assert surprises_of(placed, replace(asked, n_gpu_layers=1)) == []
        assert surprises_of(placed, replace(asked, n_gpu_layers=None)) == []

    def test_work_that_a_device_lacks_is_said_aloud(self) -> None:
        line = (
            "resolve_fused_ops: layer 1 is assigned to device CUDA0 but Flash Attention is assigned "
            "to device CPU (usually due to missing support)"
        )
        (said,) = read_back(log_of({0: "CUDA0", 1: "CUDA0"}, line), KNOWN).surprises
        assert said == (
            "Flash Attention of layer 1 runs on CPU, because CUDA0, which has the layer, lacks it"
        )

    def test_a_cache_that_stayed_behind_is_said_aloud(self) -> None:
        lines = log_of({0: "CUDA0", 1: "CUDA0"}, "llama_kv_cache: CPU KV buffer size = 1.00 MiB")
        asked = EngineParams(n_gpu_layers=ALL_LAYERS)
        assert "KV cache is on the CPU" in surprises_of(read_back(lines, KNOWN), asked)[0]
        assert surprises_of(read_back(lines, KNOWN), replace(asked, kv_offload=False)) == []


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"devices": ("A", "A")},
            "devices is A, A but must be a list that names each device once",
        ),
        (
            {"devices": ("none", "A")},
            "devices is none, A, but `none` cannot be combined with other devices",
        ),
        (
            {"devices": ("none",), "n_gpu_layers": 3},
            "devices is none, so n_gpu_layers must be 0 or left out",
        ),
        (
            {"split_mode": "none", "tensor_split": (1.0,)},
            "split_mode none puts everything on one device, so tensor_split cannot be combined",
        ),
        ({"main_gpu": 1}, "main_gpu needs split_mode none or row, not layer"),
        ({"split_mode": "columns"}, "split_mode is columns but must be one of"),
        ({"cache_type_k": "q3_0"}, "cache_type_k is q3_0"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_what_cannot_be_meant_together(settings: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError, match=re.escape(words)):
        EngineParams(**settings)  # type: ignore[arg-type]


def test_devices_that_are_not_there() -> None:
    with pytest.raises(UsageError, match="there is no device CUDA7"):
        chosen_devices(EngineParams(devices=("CUDA7",)))
    assert chosen_devices(EngineParams(devices=("none",))) == []


def test_the_experts_of_a_mixture(tmp_path: Path) -> None:
    """--cpu-moe: gate, up and down of both layers, and nothing else."""
    from qdraft.llama.context import LlamaContext
    from qdraft.llama.model import LlamaModel

    params = EngineParams(n_ctx=64, override_tensors=parse_overrides(None, moe=True))
    model = LlamaModel(tiny.mixture(tmp_path / "m.gguf"), params)
    context = LlamaContext(model, params)
    try:
        assert context.placed.moved == {"CPU": 6}
    finally:
        context.close()
        model.close()


@pytest.mark.real
def test_tensors_by_pattern(source_file: Path) -> None:
    from qdraft.llama.context import LlamaContext
    from qdraft.llama.model import LlamaModel

    params = EngineParams(n_ctx=256, override_tensors=((r"blk\.[01]\.ffn_up", "CPU"),))
    model = LlamaModel(source_file, params)
    context = LlamaContext(model, params)
    try:
        assert context.placed.moved == {"CPU": 2}
    finally:
        context.close()
        model.close()
    for wrong, words in (
        ("nowhere", "cannot be put on nowhere"),
        ("CPU", "is not a pattern of tensor names"),
    ):
        with pytest.raises(UsageError, match=words):
            LlamaModel(source_file, replace(params, override_tensors=(("(", wrong),)))
