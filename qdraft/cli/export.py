"""`qdraft export`: a pair for other programs."""

from __future__ import annotations

import dataclasses
import logging
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from qdraft.cli.opening import find_files, find_named_entry
from qdraft.cli.options.devices import DeviceOptions
from qdraft.cli.options.drafting import DraftingOptions
from qdraft.cli.options.group import Group, Only, Without, option, takes_options
from qdraft.cli.options.models import ModelOptions
from qdraft.cli.options.output import OutputOptions
from qdraft.decoding.policy.constants import CONSTANTS
from qdraft.decoding.records import DecodeParams
from qdraft.errors import UsageError
from qdraft.gguf.facts import require_model
from qdraft.llama.params import DEFAULT_N_CTX
from qdraft.pairs.export import PROGRAMS, Exported, Settings, export
from qdraft.paths import new_file
from qdraft.render.console import json_text
from qdraft.render.progress import ProgressBars

log = logging.getLogger(__name__)

_PANEL = "Export"
_N_DRAFT = DecodeParams(draft_policy="fixed").most_drafted
# llama.cpp's names of qdraft's options, where they differ.
_LLAMA_NAMES = {
    "gpu_layers_draft": "spec-draft-ngl",
    "device_draft": "spec-draft-device",
    "override_tensor_draft": "spec-draft-override-tensor",
    "cpu_moe_draft": "spec-draft-cpu-moe",
    "cache_type_k_draft": "spec-draft-type-k",
    "cache_type_v_draft": "spec-draft-type-v",
}
_PLACING = (
    "gpu_layers",
    "gpu_layers_draft",
    "device",
    "device_draft",
    "split_mode",
    "main_gpu",
    "tensor_split",
    "override_tensor",
    "override_tensor_draft",
    "cpu_moe",
    "cpu_moe_draft",
    "no_kv_offload",
    "rpc",
    "threads",
    "threads_batch",
    "cache_type_k",
    "cache_type_v",
    "cache_type_k_draft",
    "cache_type_v_draft",
    "flash_attn",
)

Program = Annotated[
    str | None,
    typer.Argument(
        metavar="PROGRAM",
        help=f"Program to export for: {', '.join(PROGRAMS)}.",
        show_default="all",
    ),
]


@dataclass(frozen=True, kw_only=True)
class ExportOptions(Group):
    """Where the text goes."""

    out: Annotated[
        Path | None,
        option(_PANEL, "-o", "--out", help="Write this file.", default="stdout"),
    ] = None
    force: Annotated[bool, option(_PANEL, "--force", help="Replace the file if it exists.")] = False

    def __post_init__(self) -> None:
        if self.force and not self.out:
            raise UsageError("--force needs --out", hint="name the file to replace with --out")


@takes_options
def export_pair(
    models: Annotated[ModelOptions, Without("no_draft")],
    drafting: Annotated[DraftingOptions, Only("drafter", "draft_policy", "n_draft", "p_min")],
    devices: Annotated[DeviceOptions, Only("ctx_size", *_PLACING)],
    options: ExportOptions,
    output: OutputOptions,
    program: Program = None,
) -> None:
    """Print the options with which other programs run a pair.

    These are command lines of llama-server, llama-cli, ik_llama.cpp and koboldcpp, a preset for
    llama-server, a request's fields for LM Studio, and a Modelfile for Ollama. They have the
    settings that qdraft tune found for the pair. Each names the build in which its options were
    checked.

    Other programs draft with one fixed length, and the draft reads the prompt itself.
    """
    drafting.params()  # raises before anything is built
    if drafting.n_draft == 0:
        raise UsageError("--n-draft is 0 but must be at least 1")
    devices.engines()
    programs = [program] if program else list(PROGRAMS)
    for name in programs:
        if name not in PROGRAMS:
            raise UsageError(f"PROGRAM is {name} but must be one of {', '.join(PROGRAMS)}")
    settings = _settings(models, drafting, devices, quiet=output.quiet)
    exports = [export(name, settings) for name in programs]
    if program and exports[0].reason:
        raise UsageError(
            f"{program} cannot run this pair: {exports[0].reason}",
            hint="serve the pair with qdraft serve",
        )
    if output.as_json:
        _write(json_text({"pair": settings.name, "exports": exports}) + "\n", options)
    else:
        _write(exports[0].text if program else _join(exports), options)
    if not output.quiet:
        _explain(exports, drafting, settings)


def _settings(
    models: ModelOptions, drafting: DraftingOptions, devices: DeviceOptions, *, quiet: bool
) -> Settings:
    """Collect what the options and the entry of models.yaml say of the pair."""
    entry = find_named_entry(models)
    needs_draft = drafting.kind.needs_draft
    has_draft = models.draft or (entry and entry.draft)
    if needs_draft and not has_draft:
        name = models.target or (entry and entry.target)
        raise UsageError(
            f"there is no draft of {name} to export", hint=f"make one with qdraft make {name}"
        )
    with ProgressBars(quiet=quiet) as bars:
        target, draft = find_files(models, entry, devices.threads, bars, with_draft=needs_draft)
    facts = require_model(target)
    n_ctx = devices.engines()[0].context_size(facts.n_ctx_train or DEFAULT_N_CTX)
    confidence = CONSTANTS.p_min if drafting.draft_policy == "confidence" else 0.0
    return Settings(
        name=entry.name if entry else target.stem,
        target=facts.path.absolute(),
        draft=draft and draft.absolute(),
        n_ctx=n_ctx,
        n_draft=drafting.n_draft or (_N_DRAFT if draft else None),
        p_min=confidence if drafting.p_min is None else drafting.p_min,
        drafter=drafting.drafter,
        template=entry.template if entry else "",
        options=_options(devices, with_draft=draft is not None),
    )


def _options(devices: DeviceOptions, *, with_draft: bool) -> dict[str, str]:
    """Return the options of devices, caches and threads that are set, by llama.cpp's names.

    A draft's cache has the target's types unless it has its own; in llama.cpp it has f16.
    """
    values = {name: getattr(devices, name) for name in _PLACING}
    for name in ("cache_type_k", "cache_type_v"):
        values[f"{name}_draft"] = values[f"{name}_draft"] or values[name]
    defaults = {each.name: each.default for each in dataclasses.fields(DeviceOptions)}
    defaults |= {"cache_type_k_draft": "f16", "cache_type_v_draft": "f16"}
    return {
        _LLAMA_NAMES.get(name, name.replace("_", "-")): "" if value is True else str(value)
        for name, value in values.items()
        if value != defaults[name] and (with_draft or not name.endswith("_draft"))
    }


def _join(exports: list[Exported]) -> str:
    """Put what all programs take into one text, each under the program's name."""
    return "\n".join(f"# {each.program}\n{each.text}" for each in exports if each.text)


def _write(text: str, options: ExportOptions) -> None:
    """Print the text, or write the file. Raises UsageError if that exists."""
    if options.out is None:
        sys.stdout.write(text)
        return
    if options.out.exists() and not options.force:
        raise UsageError(f"{options.out} already exists", hint="replace it with --force")
    try:
        with new_file(options.out) as part:
            part.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{options.out} cannot be written: {error.strerror}") from error


def _explain(exports: list[Exported], drafting: DraftingOptions, settings: Settings) -> None:
    """Say on stderr what the text does not."""
    if drafting.draft_policy == "auto" and settings.draft:
        log.info(
            "qdraft chooses the draft length in each round; here it is %d (set it with --n-draft, "
            "or find the fastest fixed one with qdraft tune)",
            settings.n_draft,
        )
    for each in exports:
        if each.reason:
            log.warning("%s is left out: %s", each.program, each.reason)
        for note in each.notes if each.text else ():
            log.info("%s: %s", each.program, note)
