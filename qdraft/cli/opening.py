"""From the options of a command to the description of a pair, and to an open pair."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from pathlib import Path

from qdraft.cli.options.devices import DeviceOptions
from qdraft.cli.options.drafting import DraftingOptions
from qdraft.cli.options.models import ModelOptions
from qdraft.errors import UsageError
from qdraft.host import default_threads, is_overloaded, load_average
from qdraft.llama.spec import PairSpec
from qdraft.pairs import registry
from qdraft.pairs.packages import materialize
from qdraft.pairs.registry import Entry
from qdraft.render.progress import ProgressBars
from qdraft.session.opening import open_spec
from qdraft.session.pair import Pair

log = logging.getLogger(__name__)


def find_named_entry(models: ModelOptions) -> Entry | None:
    """Return the entry of models.yaml that the options name; None for files without an entry."""
    return registry.find_entry(models.target, models.draft, models.pair, models.models_file)


def find_files(
    models: ModelOptions,
    entry: Entry | None,
    threads: int,
    bars: ProgressBars,
    *,
    with_draft: bool = True,
) -> tuple[Path, Path | None]:
    """Return the paths of target and draft; build those that come from a package."""
    with_draft = with_draft and not models.no_draft
    if models.target is None:
        assert entry
        return materialize(
            entry if with_draft else replace(entry, draft=None),
            threads=threads or default_threads(),
            progress=bars.report,
            report=bars.report_built,
        )
    if models.draft or not with_draft:
        return models.target, models.draft
    if entry is None:
        name, path = models.target.name, models.target
        log.info("no draft of %s is known; make one with qdraft make %s", name, path)
    return models.target, Path(entry.draft) if entry and entry.draft else None


def describe_pair(
    models: ModelOptions,
    devices: DeviceOptions,
    bars: ProgressBars,
    drafting: DraftingOptions = DraftingOptions(),  # noqa: B008 (frozen)
    *,
    keep_draft: bool = False,
    with_template: bool = True,
) -> PairSpec:
    """Describe the pair that the options name, and build what is not built yet."""
    if models.draft and not drafting.kind.needs_draft:
        raise UsageError(f"--model-draft cannot be combined with --drafter {drafting.drafter}")
    target_params, draft_params = devices.engines()
    entry = find_named_entry(models)
    with_draft = drafting.kind.needs_draft
    files = find_files(models, entry, devices.threads, bars, with_draft=with_draft)
    return PairSpec.of(
        *files,
        target_params,
        draft_params,
        share_kv=drafting.share_kv,
        template=registry.read_template(entry) if with_template else None,
        servers=devices.servers,
        keep_draft=keep_draft,
    )


def open_described(
    models: ModelOptions,
    devices: DeviceOptions,
    drafting: DraftingOptions,
    *,
    keep_draft: bool,
    quiet: bool,
    template: str | None = None,
) -> Pair:
    """Open the pair that the options name, with progress on stderr.

    ``template`` is a chat template that replaces any other.
    """
    load = describe_load()  # before loading adds to it
    with ProgressBars(quiet=quiet) as bars:
        spec = describe_pair(models, devices, bars, drafting, keep_draft=keep_draft)
        if template is not None:
            spec = replace(spec, template=template)
        pair = open_spec(spec, bars.report)
    if load:
        log.warning("%s: timings will be unreliable", load)
    return pair


def describe_load() -> str | None:
    """The load, if other programs want more CPU time than the machine has."""
    if not is_overloaded():
        return None
    return f"the load of this machine is {load_average():.1f} on {os.cpu_count() or 1} cores"
