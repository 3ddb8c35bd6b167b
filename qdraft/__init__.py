"""qdraft: exact speculative decoding for GGUF models.

A low-bit draft proposes tokens, the higher-precision target of the same model verifies
them, and the text has exactly the target's distribution::

    import qdraft

    with qdraft.open_pair("smollm2") as pair:
        for chunk in pair.generate("Why is the sky blue?"):
            print(chunk.text, end="", flush=True)

Importing this package does not load the native library; opening a pair does.
"""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING, Any

from qdraft.decoding.constraint import ConstraintSpec
from qdraft.decoding.records import (
    Chunk,
    DecodeParams,
    Distribution,
    Draft,
    FinishReason,
    Origin,
    Round,
    SamplingParams,
    Times,
    Verdict,
)
from qdraft.errors import (
    ConstraintError,
    ContextError,
    DeviceMemoryError,
    DrafterError,
    EngineError,
    HostMemoryError,
    LogitsError,
    ModelFileError,
    PairError,
    QDraftError,
    RollbackError,
    ServerError,
    UsageError,
)
from qdraft.llama.params import EngineParams
from qdraft.llama.spec import Both, ModelSpec, PairSpec

if TYPE_CHECKING:
    from qdraft.decoding.sampling import History, Processor
    from qdraft.decoding.summary import Summary
    from qdraft.session.check import Check
    from qdraft.session.generation import Generation
    from qdraft.session.opening import open_pair, open_spec
    from qdraft.session.pair import ModelInfo, Pair
    from qdraft.session.session import Session

    __version__: str

# Loaded when they are first used, so that importing the package stays quick.
_LATE = {
    "Check": "qdraft.session.check",
    "Generation": "qdraft.session.generation",
    "History": "qdraft.decoding.sampling",
    "ModelInfo": "qdraft.session.pair",
    "Pair": "qdraft.session.pair",
    "Processor": "qdraft.decoding.sampling",
    "Session": "qdraft.session.session",
    "Summary": "qdraft.decoding.summary",
    "open_pair": "qdraft.session.opening",
    "open_spec": "qdraft.session.opening",
}

__all__ = [
    "Both",
    "Check",
    "Chunk",
    "ConstraintError",
    "ConstraintSpec",
    "ContextError",
    "DecodeParams",
    "DeviceMemoryError",
    "Distribution",
    "Draft",
    "DrafterError",
    "EngineError",
    "EngineParams",
    "FinishReason",
    "Generation",
    "History",
    "HostMemoryError",
    "LogitsError",
    "ModelFileError",
    "ModelInfo",
    "ModelSpec",
    "Origin",
    "Pair",
    "PairError",
    "PairSpec",
    "Processor",
    "QDraftError",
    "RollbackError",
    "Round",
    "SamplingParams",
    "ServerError",
    "Session",
    "Summary",
    "Times",
    "UsageError",
    "Verdict",
    "open_pair",
    "open_spec",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("qdraft")
    if name in _LATE:
        return getattr(_import_module(_LATE[name]), name)
    raise AttributeError(f"module 'qdraft' has no attribute {name!r}")
