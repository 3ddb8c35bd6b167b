"""From the options that name models to an open pair, with progress on stderr."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path

from qdraft import registry
from qdraft.engine.library import default_threads, overload
from qdraft.errors import UsageError
from qdraft.pair import SHARE_KV, Pair
from qdraft.render.progress import Bars
from qdraft.source import materialize
from qdraft.types import EngineParams

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Models:
    """Which models: two files, or the name of a pair, with its draft, without, or n-grams."""

    target: Path | None
    draft: Path | None
    pair: str | None
    models_file: Path | None
    no_draft: bool
    ngram: bool
    share_kv: str = "auto"

    def __post_init__(self) -> None:
        if self.draft and not self.target:
            raise UsageError("a draft (-d) needs a target beside it (-m)")
        if self.target and self.pair:
            raise UsageError("give either -m or --pair, not both")
        if self.draft and (self.no_draft or self.ngram):
            other = "--no-draft" if self.no_draft else "--drafter ngram"
            raise UsageError(f"give either -d or {other}, not both")
        if self.share_kv not in SHARE_KV:
            raise UsageError(f"--share-kv is {self.share_kv}, but must be {', '.join(SHARE_KV)}")
        if self.target and self.models_file:
            raise UsageError("--models-file names pairs, and -m a file: give one of them")


def open_models(
    models: Models, engine: EngineParams, draft_engine: EngineParams, *, quiet: bool
) -> Pair:
    """Build what is not built yet, load, and prove that the two belong together."""
    if busy := overload():
        log.warning("%s", busy)
    with Bars(quiet=quiet) as bars:
        target, draft = models.target, models.draft
        if target is None:
            entry = registry.load(models.models_file).find(models.pair)
            if models.no_draft or models.ngram:
                entry = replace(entry, draft=None)
            threads = engine.n_threads or default_threads()
            target, draft = materialize(
                entry, threads=threads, progress=bars.building, report=bars.built
            )
        elif draft is None and not (models.no_draft or models.ngram):
            draft = registry.draft_of(target)
            if draft is None:
                log.info("no draft of %s is known: qdraft make %s makes one", target.name, target)
        return Pair(
            target,
            draft,
            engine,
            draft_params=draft_engine,
            share_kv=models.share_kv,
            progress=bars.loading,
        )
