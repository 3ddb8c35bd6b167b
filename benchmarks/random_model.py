"""Models with random weights, of any architecture that llama.cpp can build.

The caller gives hyperparameters. llama.cpp itself says which tensors they need and of which shapes:
it builds a model from the header alone (llama_model_init_from_user), and asks for each tensor.
"""

from __future__ import annotations

import ctypes
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import gguf
import llama_cpp
import numpy as np

from qdraft.errors import EngineError
from qdraft.llama.imatrix import GgmlTensor
from qdraft.llama.native import function, lib, native_errors

TOKENS = ("<s>", "</s>", *map(chr, range(ord("a"), ord("z") + 1)))
Shapes = dict[str, tuple[int, ...]]
Value = bool | int | float | str | Sequence[int] | Sequence[float] | Sequence[bool]

# Tensors that llama.cpp takes if they are there, and that models of these architectures lack.
_OPTIONAL = re.compile(
    r"^(rope_freqs|dense_2)|\.(rope_freqs|nextn)\.|\.(input_)?scale$"
    r"|\.(attn_(q|k|v|qkv|output)|ffn_\w+)\.bias$"
)
_REQUIRED = re.compile(r"exp_probs_b")


class _InitParams(ctypes.Structure):
    """struct gguf_init_params of gguf.h."""

    _fields_ = (("no_alloc", ctypes.c_bool), ("ctx", ctypes.c_void_p))


def write_model(
    path: Path,
    architecture: str,
    keys: Mapping[str, Value],
    *,
    tokens: Sequence[str] = TOKENS,
    without: str = "",
    seed: int = 1,
) -> Path:
    """Write a model of F32 weights.

    The names in ``keys`` lack the prefix of the architecture. Tensors whose name contains the
    pattern ``without`` are left out. Raises EngineError if llama.cpp cannot build the model.
    """
    with tempfile.TemporaryDirectory() as folder:
        header = _header(Path(folder) / "header.gguf", architecture, keys, tokens)
        header.write_header_to_file()
        header.write_kv_data_to_file()
        header.close()
        shapes = _shapes(Path(folder) / "header.gguf")
    writer = _header(path, architecture, keys, tokens)
    rng = np.random.default_rng(seed)
    for name, shape in shapes.items():
        if not without or not re.search(without, name):
            writer.add_tensor(name, _values(name, shape, rng).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _header(
    path: Path, architecture: str, keys: Mapping[str, Value], tokens: Sequence[str]
) -> gguf.GGUFWriter:
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in keys.items():
        name = f"{architecture}.{key}"
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        else:
            writer.add_array(name, list(value))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(list(tokens))
    writer.add_token_types([gguf.TokenType.NORMAL] * len(tokens))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    return writer


def _shapes(header: Path) -> Shapes:
    """Return the shapes of the tensors that a model of this header has, as numpy orders them."""
    read = function("gguf_init_from_file", ctypes.c_void_p, ctypes.c_char_p, _InitParams)
    free = function("gguf_free", None, ctypes.c_void_p)
    shapes: Shapes = {}

    @llama_cpp.llama_model_set_tensor_data_t
    def note(address: int, _user_data: object) -> None:
        tensor = ctypes.cast(address, ctypes.POINTER(GgmlTensor)).contents
        name, shape = tensor.name.decode(), tuple(tensor.ne)[::-1]
        while len(shape) > 1 and shape[0] == 1:
            shape = shape[1:]
        if not _OPTIONAL.search(name) or _REQUIRED.search(name):
            shapes[name] = shape

    metadata = read(str(header).encode(), _InitParams(no_alloc=True, ctx=None))
    try:
        with native_errors() as errors:
            params = lib().llama_model_default_params()
            model = lib().llama_model_init_from_user(metadata, note, None, params)
        if not model:
            raise EngineError(f"llama.cpp cannot build this model: {errors}")
        lib().llama_model_free(model)
    finally:
        free(metadata)
    return shapes


def _values(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Draw a tensor, so that states neither die nor explode and no token is certain."""
    normal = rng.normal(size=shape)
    if name.endswith("ssm_a"):  # decays: -exp(A)
        return -np.abs(normal) - 0.1
    if "lerp" in name:  # between this token and the one before
        return rng.uniform(size=shape)
    if ("norm" in name and not name.endswith("bias")) or name.endswith(("ssm_d", "k_k.weight")):
        return 1 + 0.1 * normal
    if name.endswith("bias") or len(shape) == 1:
        return 0.3 * normal
    if name.startswith("token_embd"):
        return normal
    scaled = normal * shape[-1] ** -0.5
    if name.startswith("output"):
        scaled *= 3
        scaled[1] = 0  # the end of the text is never the most probable token
    return scaled
