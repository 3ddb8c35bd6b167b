"""One tree of errors. The command line turns each into one line, a hint and an exit code."""

from __future__ import annotations


class QDraftError(Exception):
    """Base of every error that qdraft raises on purpose.

    ``hint`` is one sentence on what to do about it; ``exit_code`` is what the
    command line returns.
    """

    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint


class UsageError(QDraftError):
    """An option, a key or a combination of them that makes no sense."""

    exit_code = 2


class ModelFileError(QDraftError):
    """A model file is missing, unreadable, or not what it should be."""

    exit_code = 3


class PairError(QDraftError):
    """Two models that cannot be draft and target of each other."""

    exit_code = 4


class ContextError(QDraftError):
    """The prompt does not fit the context."""

    exit_code = 5


class EngineError(QDraftError):
    """llama.cpp failed to load, decode or quantize."""

    exit_code = 6


class RollbackError(EngineError):
    """The cache could not be cut back to a length."""


class LogitsError(EngineError):
    """A row of logits has no largest finite value (NaN, infinity, or all masked)."""


class DeviceMemoryError(EngineError):
    """A device has no room for what was to be placed on it."""


class ServerError(EngineError):
    """An RPC server is down, speaks another version of the protocol, or is lost."""


def require(condition: bool, name: str, value: object, rule: str) -> None:
    """Raise UsageError that says what ``name`` must be, unless ``condition`` holds."""
    if not condition:
        raise UsageError(f"{name} is {value} but must be {rule}")
