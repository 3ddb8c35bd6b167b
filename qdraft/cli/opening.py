"""From the options that name models to an open pair, with progress on stderr."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from qdraft.errors import UsageError
from qdraft.host import default_threads, overload
from qdraft.llama.params import EngineParams
from qdraft.llama.spec import SHARE_KV, PairSpec
from qdraft.pairs import registry
from qdraft.pairs.packages import materialize
from qdraft.pairs.registry import Entry
from qdraft.render.progress import Bars
from qdraft.session.opening import open_spec
from qdraft.session.pair import Pair

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


def entry_of(models: Models) -> Entry | None:
    """The entry of models.yaml that is meant; None for files that no entry names."""
    return registry.find_entry(models.target, models.draft, models.pair, models.models_file)


def files_of(
    models: Models, entry: Entry | None, threads: int, bars: Bars
) -> tuple[Path, Path | None]:
    """Paths of target and draft, built where a package brings them."""
    if models.target is None:
        assert entry
        if models.no_draft or models.ngram:
            entry = replace(entry, draft=None)
        return materialize(
            entry, threads=threads or default_threads(), progress=bars.building, report=bars.built
        )
    if models.draft or models.no_draft or models.ngram:
        return models.target, models.draft
    if entry is None:
        name = models.target.name
        log.info("no draft of %s is known: qdraft make %s makes one", name, models.target)
    return models.target, Path(entry.draft) if entry and entry.draft else None


def open_models(
    models: Models,
    engine: EngineParams,
    draft_engine: EngineParams,
    servers: Sequence[str] = (),
    *,
    keep_draft: bool = False,
    quiet: bool,
) -> Pair:
    """Build what is not built yet, load, and prove that the two belong together."""
    if busy := overload():
        log.warning("%s", busy)
    with Bars(quiet=quiet) as bars:
        entry = entry_of(models)
        target, draft = files_of(models, entry, engine.n_threads, bars)
        return open_spec(
            PairSpec.of(
                target,
                draft,
                engine,
                draft_params=draft_engine,
                servers=tuple(servers),
                keep_draft=keep_draft,
                share_kv=models.share_kv,
                template=registry.read_template(entry),
            ),
            bars.step,
        )
