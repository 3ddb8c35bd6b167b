"""The errors of qdraft. The command line prints an error and its hint, and exits with its code."""

from __future__ import annotations


class QDraftError(Exception):
    """Base of every error that qdraft raises on purpose.

    ``hint`` says in one sentence what to do about it; the command line exits with ``exit_code``.
    """

    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint


class UsageError(QDraftError):
    """An option, a key of models.yaml, or a combination of them is not valid."""

    exit_code = 2


class ParameterError(UsageError):
    """A parameter of the library is not valid.

    The message calls parameters by their names; the command line puts its options in their place.
    """


class ModelFileError(QDraftError):
    """A model file is missing, unreadable, or not what it should be."""

    exit_code = 3


class PairError(QDraftError):
    """Two models cannot be target and draft."""

    exit_code = 4


class ContextError(QDraftError):
    """The prompt does not fit the context."""

    exit_code = 5


class EngineError(QDraftError):
    """llama.cpp failed to load, decode or quantize."""

    exit_code = 6


class DiskSpaceError(QDraftError):
    """A disk has too little space for what should be written to it."""


class CancelledError(QDraftError):
    """Nobody wants the text any more: whoever asked for it has left."""


class DrafterError(QDraftError):
    """A drafter offered a draft that cannot be verified: a mistake in its code."""


class RollbackError(EngineError):
    """A cache cannot be cut to fewer tokens."""


class LogitsError(EngineError):
    """A row of logits has no largest finite value (NaN, infinity, or all masked)."""


class ConstraintError(LogitsError):
    """A constraint allows no token that can follow the text."""


class DeviceMemoryError(EngineError):
    """A device has too little memory for what it should hold."""


class HostMemoryError(EngineError):
    """This machine has too little memory for the caches and compute buffers."""


class ServerError(EngineError):
    """An RPC server is down, speaks another version of the protocol, or is lost."""


def require(condition: bool, name: str, value: object, rule: str) -> None:
    """Raise ParameterError, which says what ``name`` must be, unless ``condition`` holds."""
    if not condition:
        raise ParameterError(f"{name} is {value} but must be {rule}")
