"""LoRA adapters: loaded beside the weights of a model, and set in each of its contexts."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from qdraft.errors import EngineError, ModelFileError
from qdraft.gguf.kind import file_kind
from qdraft.gguf.parts import read_parts
from qdraft.llama.native import lib, native_errors

Adapters = tuple[tuple[Any, float], ...]
"""The llama_adapter_lora pointers of a model, each with its scale; they live as long as it does."""


def require_adapter(path: Path) -> None:
    """Raise ModelFileError unless the file is a LoRA adapter."""
    kind = file_kind(read_parts(path))
    if kind.name != "adapter":
        raise ModelFileError(
            f"{path} is {kind.noun}, not a LoRA adapter",
            hint="convert an adapter with convert_lora_to_gguf.py of llama.cpp",
        )


def load_adapters(model: Any, model_path: Path, lora: Sequence[tuple[str, float]]) -> Adapters:
    """Load the adapters of ``lora``, each a file and its scale, for a llama_model pointer.

    Raises ModelFileError with llama.cpp's reason if one does not fit the model.
    """
    adapters = []
    for name, scale in lora:
        path = Path(name)
        require_adapter(path)
        with native_errors() as errors:
            adapter = lib().llama_adapter_lora_init(model, os.fsencode(path))
        if not adapter:
            raise ModelFileError(f"{path} does not fit {model_path.name}: {errors}")
        if lib().llama_adapter_get_alora_n_invocation_tokens(adapter):
            raise ModelFileError(
                f"{path} is an activated LoRA (aLoRA), which qdraft does not support"
            )
        adapters.append((adapter, scale))
    return tuple(adapters)


def set_adapters(context: Any, adapters: Adapters) -> None:
    """Have a llama_context pointer compute with these adapters. Raises EngineError."""
    if not adapters:
        return
    kind = lib().llama_adapter_lora_p_ctypes
    pointers = (kind * len(adapters))(*(pointer for pointer, _ in adapters))
    scales = (ctypes.c_float * len(adapters))(*(scale for _, scale in adapters))
    if lib().llama_set_adapters_lora(context, pointers, len(adapters), scales):
        raise EngineError("llama.cpp cannot set the LoRA adapters")
