"""What to open: one description of a target, its draft if there is one, and how to load them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from qdraft.errors import require
from qdraft.llama.params import EngineParams

T = TypeVar("T")
Result = TypeVar("Result")
Other = TypeVar("Other")

SHARE_KV = ("auto", "on", "off")
# ``n_rs_seq`` of a target. Each costs its state for every text. With 3 of them the target reads few
# tokens again: a draft of k tokens has to go back further only if it accepted at most k - 4.
_N_BACK = 3


@dataclass(frozen=True)
class Both(Generic[T]):
    """One thing for the target, and the same for the draft if there is one."""

    target: T
    draft: T | None = None

    def __iter__(self) -> Iterator[T]:
        """Give the target's, then the draft's if there is one."""
        yield self.target
        if self.draft is not None:
            yield self.draft

    def map(self, function: Callable[[T], Result]) -> Both[Result]:
        """Return the results of ``function`` for the target's, and the draft's if there is one."""
        return Both(function(self.target), None if self.draft is None else function(self.draft))

    def zip(self, other: Both[Other]) -> Both[tuple[T, Other]]:
        """Pair target with target, and draft with draft if both have one."""
        draft = None
        if self.draft is not None and other.draft is not None:
            draft = (self.draft, other.draft)
        return Both((self.target, other.target), draft)


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One model file, and how to load it.

    ``like_target`` marks a draft that was given no params of its own: it has the target's, but
    opening the pair keeps it on this machine.
    """

    path: Path
    params: EngineParams
    like_target: bool = False


@dataclass(frozen=True, slots=True)
class PairSpec:
    """What to open: the models, and what they share.

    ``share_kv`` "auto" gives the draft the target's KV cells if a trial shows that this works and
    pays off, "on" demands it, "off" leaves the draft its own. ``template`` is a Jinja chat template
    that replaces the target's own. ``servers`` are the RPC servers to connect to, each HOST:PORT.
    ``keep_draft`` demands the draft even if the plan would rather give its memory to the target.
    """

    models: Both[ModelSpec]
    share_kv: str = "auto"
    template: str | None = None
    servers: tuple[str, ...] = ()
    keep_draft: bool = False

    def __post_init__(self) -> None:
        require(
            self.share_kv in SHARE_KV, "share_kv", self.share_kv, f"one of {', '.join(SHARE_KV)}"
        )

    @classmethod
    def of(
        cls,
        target: Path | str,
        draft: Path | str | None = None,
        params: EngineParams | None = None,
        draft_params: EngineParams | None = None,
        **rest: Any,
    ) -> PairSpec:
        """Describe a pair by its two files; ``rest`` are the other fields.

        ``draft_params`` None loads the draft like the target, on the target's devices of this
        machine.
        """
        params = params or EngineParams()
        draft_spec = None
        own = params
        if params.n_rs_seq is None:
            # The draft goes back to its checkpoint: it decodes token by token.
            params = replace(params, n_rs_seq=_N_BACK)
        if draft:
            draft_spec = ModelSpec(Path(draft), draft_params or own, draft_params is None)
        return cls(Both(ModelSpec(Path(target), params), draft_spec), **rest)
