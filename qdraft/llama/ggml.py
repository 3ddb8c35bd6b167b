"""ggml's own functions, from the very copy of ggml that libllama uses.

A wheel holds each library under several names. Loading one of them anew can give a second ggml,
with devices and settings of its own that libllama knows nothing of.
"""

from __future__ import annotations

import ctypes
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from qdraft.errors import EngineError
from qdraft.llama.native import native


@cache
def function(name: str, result: Any = None, *arguments: Any) -> Any:
    """A function by name, with the ctypes of its result and arguments.

    Raises EngineError where this build has none of that name.
    """
    for library in _libraries():
        if hasattr(library, name):
            return ctypes.CFUNCTYPE(result, *arguments)((name, library))
    raise EngineError(f"this build of llama.cpp has no {name}")


@lru_cache(maxsize=1)
def _libraries() -> list[ctypes.CDLL]:
    """Looking a name up in libllama also looks in what libllama was linked to, but on Windows."""
    llama = native().llama_cpp._lib
    beside = sorted(Path(llama._name).parent.glob("ggml*.dll"))
    return [llama, *(ctypes.CDLL(str(path)) for path in beside)]
