"""What qdraft reads from llama.cpp's log: each pattern beside the lines that it was written for.

Where layers and buffers went, why llama.cpp failed and what a quantization gave: llama.cpp reports
these in its log only. The lines are those of llama-cpp-python 0.3.36; others may differ.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class LogPattern:
    """A pattern for one kind of line, and ``samples``: such lines, with the groups of the match."""

    pattern: str
    samples: Mapping[str, tuple[str, ...]]
    ignore_case: bool = False
    _compiled: re.Pattern[str] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        flags = re.IGNORECASE if self.ignore_case else 0
        object.__setattr__(self, "_compiled", re.compile(self.pattern, flags))

    def search(self, line: str) -> re.Match[str] | None:
        """Return the match in a line; None if it is a line of another kind."""
        return self._compiled.search(line)


# Loading: the device of a layer, by its number; the last one is the output.
LAYER = LogPattern(
    r"load_tensors: layer +(\d+) assigned to device (\S+?),",
    {
        "load_tensors: layer   1 assigned to device CPU, is_swa = 0": ("1", "CPU"),
        "load_tensors: layer  12 assigned to device CUDA0, is_swa = 1": ("12", "CUDA0"),
    },
)
# Loading and making a context: the name, kind and MiB of a buffer.
BUFFER = LogPattern(
    r": +(\S+) +(model|KV|RS|compute|output) buffer size = +([\d.]+) MiB",
    {
        "load_tensors:   CPU_Mapped model buffer size =     0.85 MiB": (
            "CPU_Mapped",
            "model",
            "0.85",
        ),
        "llama_kv_cache:        CPU KV buffer size =     0.06 MiB": ("CPU", "KV", "0.06"),
        "llama_memory_recurrent:        CPU RS buffer size =     0.01 MiB": ("CPU", "RS", "0.01"),
        "sched_reserve:      CUDA0 compute buffer size =     9.00 MiB": (
            "CUDA0",
            "compute",
            "9.00",
        ),
        "llama_context:  CUDA_Host  output buffer size =     0.25 MiB": (
            "CUDA_Host",
            "output",
            "0.25",
        ),
    },
)
# Loading with overrides: a tensor, and the buffer type that it went to.
MOVED = LogPattern(
    r"tensor (\S+) .*buffer type overridden to (\S+)",
    {
        "tensor blk.0.ffn_up_exps.weight (0 MiB f32) buffer type overridden to CPU": (
            "blk.0.ffn_up_exps.weight",
            "CPU",
        ),
    },
)
# Making a context: a layer, its device, and an operation that this device lacks and another has.
ELSEWHERE = LogPattern(
    r"layer (\d+) is assigned to device (\S+) but (.+) is assigned to device (\S+) \(usually",
    {
        "resolve_fused_ops: layer 1 is assigned to device CUDA0 but Flash Attention is assigned to "
        "device CPU (usually due to missing support)": ("1", "CUDA0", "Flash Attention", "CPU"),
    },
)
# Making a context: the MiB of a KV cache, even if the weights were not loaded.
CACHE_SIZE = LogPattern(
    r"kv_cache\w*: +size = +([\d.]+) MiB",
    {
        "llama_kv_cache: size =    0.06 MiB (   256 cells,   2 layers,  8/1 seqs), K (f16):    "
        "0.03 MiB, V (f16):    0.03 MiB": ("0.06",),
    },
)
# The same for recurrent states: their MiB, the number of texts, and how many tokens back each text
# keeps the states of.
STATE_SIZE = LogPattern(
    r"memory_recurrent\w*: +size = +([\d.]+) MiB \( *(\d+) cells, .* (\d+) rs_seq\)",
    {
        "llama_memory_recurrent: size =    0.01 MiB (     2 cells,   1 layers,  2 seqs  0 rs_seq), "
        "R (f32):    0.00 MiB, S (f32):    0.01 MiB, P (f32):    0.00 MiB": ("0.01", "2", "0"),
    },
)
# Loading and making a context: memory has run out.
OUT_OF_MEMORY = LogPattern(
    r"(?:unable|failed) to allocate|out of memory|alloc\w* failed",
    {
        "alloc_tensor_range: failed to allocate CUDA0 buffer of size 4294967296": (),
        "llama_model_load: error loading model: unable to allocate CUDA0 buffer": (),
        "ggml_backend_cuda_buffer_type_alloc_buffer: allocating 4096.00 MiB on device 0: "
        "cudaMalloc failed: out of memory": (),
        "graph_reserve: failed to allocate compute buffers": (),
    },
    ignore_case=True,
)
# Loading: the system did not let llama.cpp lock the weights in memory.
NOT_LOCKED = LogPattern(
    r"failed to (?:mlock|VirtualLock)|mlock not supported",
    {
        "warning: failed to mlock 73728000-byte buffer (after previously locking 0 bytes): Cannot "
        "allocate memory": (),
        "warning: mlock not supported on this system": (),
    },
)
# The name of a buffer on an RPC server: the number of its device there, and HOST:PORT.
SERVER_BUFFER = LogPattern(r"^RPC(\d+)\[(.+)\]$", {"RPC1[10.0.0.2:50052]": ("1", "10.0.0.2:50052")})
# Quantizing: the number of a tensor, and how many there are.
QUANTIZED_TENSOR = LogPattern(
    r"\[\s*(\d+)/\s*(\d+)\]",
    {
        "[   1/ 272] output_norm.weight - [  576,     1,     1,     1], type =    f32, size =    "
        "0.002 MB": ("1", "272"),
    },
)
# Quantizing: the number of tensors that did not get the type that was asked for.
FALLBACKS = LogPattern(
    r"WARNING: (\d+) of \d+ tensor\(s\) required fallback",
    {
        "llama_model_quantize_impl: WARNING: 180 of 272 tensor(s) required fallback quantization": (
            "180",
        ),
    },
)
# Quantizing: the size of all tensors in MiB, and the bits of a weight.
QUANTIZED_SIZE = LogPattern(
    r"quant size\s*=\s*([\d.]+) MiB \(([\d.]+) BPW\)",
    {"llama_model_quantize_impl: quant size  =    82.41 MiB (5.14 BPW)": ("82.41", "5.14")},
)
# Trying a quantization: its file type needs an importance matrix.
NEEDS_MATRIX = LogPattern(
    r"will require an imatrix",
    {
        "llama_model_quantize_impl: WARNING: dry run completed successfully, but actually "
        "completing this quantization will require an imatrix!": (),
    },
)

PATTERNS = {name: value for name, value in globals().items() if isinstance(value, LogPattern)}
