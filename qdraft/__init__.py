"""qdraft: exact speculative decoding for GGUF models.

A low-bit draft proposes tokens, the higher-precision target of the same model verifies
them, and the text has exactly the target's distribution::

    import qdraft

    with qdraft.open_pair("smollm2") as pair:
        for chunk in pair.generate("Why is the sky blue?"):
            print(chunk.text, end="", flush=True)

Importing this package does not load the native library; opening a pair does.
"""

from importlib.metadata import version as _version
from typing import TYPE_CHECKING, Any

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
from qdraft.decoding.summary import Summary
from qdraft.errors import (
    ContextError,
    DeviceMemoryError,
    EngineError,
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
from qdraft.session.check import Check

if TYPE_CHECKING:
    from qdraft.session.generation import Generation
    from qdraft.session.opening import open_pair
    from qdraft.session.pair import ModelInfo, Pair
    from qdraft.session.session import Session

__version__ = _version("qdraft")

__all__ = [
    "Both",
    "Check",
    "Chunk",
    "ContextError",
    "DecodeParams",
    "DeviceMemoryError",
    "Distribution",
    "Draft",
    "EngineError",
    "EngineParams",
    "FinishReason",
    "Generation",
    "LogitsError",
    "ModelFileError",
    "ModelInfo",
    "ModelSpec",
    "Origin",
    "Pair",
    "PairError",
    "PairSpec",
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
]


def __getattr__(name: str) -> Any:
    if name == "open_pair":
        from qdraft.session.opening import open_pair

        return open_pair
    if name in ("Generation", "ModelInfo", "Pair", "Session"):
        from qdraft.session import pair

        return getattr(pair, name)
    raise AttributeError(f"module 'qdraft' has no attribute {name!r}")
