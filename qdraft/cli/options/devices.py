"""Where the models go and how they run: devices, threads, contexts and caches."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any

from qdraft.cli.options.group import Group, Sets, option, option_names, rename_parameters
from qdraft.errors import ParameterError, UsageError
from qdraft.llama.params import ALL_LAYERS, NO_DEVICE, EngineParams
from qdraft.llama.rpc import parse_servers

_DEVICES, _CONTEXT, _MODELS = "Devices", "Context, cache and threads", "Models"
# The weights of experts, as llama.cpp's --cpu-moe has them.
_EXPERTS = r"\.ffn_(up|down|gate|gate_up)_(ch|)exps"
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclass(frozen=True, kw_only=True)
class DeviceOptions(Group):
    """Devices, threads, contexts and caches of target and draft."""

    ctx_size: Annotated[
        int | None,
        option(
            _CONTEXT,
            "-c",
            "--ctx-size",
            help="Context size in tokens; 0 uses the model's own.",
            default="4096, or the model's if that is less",
        ),
        Sets("n_ctx"),
    ] = None
    ctx_size_draft: Annotated[
        int | None,
        option(
            _CONTEXT,
            "-cd",
            "--ctx-size-draft",
            help="Context size of the draft in tokens.",
            default="as --ctx-size",
        ),
    ] = None
    lora: Annotated[
        list[str] | None,
        option(
            _MODELS,
            "--lora",
            help="LoRA adapter for target and draft: FILE, or FILE:SCALE (repeatable).",
            metavar="FILE[:SCALE]",
        ),
    ] = None
    gpu_layers: Annotated[
        str,
        option(
            _DEVICES,
            "-ngl",
            "--gpu-layers",
            help="Target layers to put on devices: a number, all, or auto (those that qdraft plan "
            "shows).",
        ),
        Sets("n_gpu_layers"),
    ] = "auto"
    gpu_layers_draft: Annotated[
        str,
        option(
            _DEVICES,
            "-ngld",
            "--gpu-layers-draft",
            help="Draft layers to put on devices: a number, all or auto.",
        ),
    ] = "auto"
    device: Annotated[
        str | None,
        option(
            _DEVICES,
            "-dev",
            "--device",
            help="Devices for the target, separated by commas, by the names that qdraft devices "
            "shows; none uses the CPU alone.",
            default="all",
        ),
        Sets("devices"),
    ] = None
    device_draft: Annotated[
        str | None,
        option(
            _DEVICES,
            "-devd",
            "--device-draft",
            help="Devices for the draft; none uses the CPU alone.",
            default="as --device, without RPC servers",
        ),
    ] = None
    split_mode: Annotated[
        str,
        option(
            _DEVICES,
            "-sm",
            "--split-mode",
            help="How to split the target over several devices: none, layer, row or tensor.",
        ),
    ] = "layer"
    main_gpu: Annotated[
        int,
        option(
            _DEVICES, "-mg", "--main-gpu", help="Index of the device that --split-mode none uses."
        ),
    ] = 0
    tensor_split: Annotated[
        str | None,
        option(
            _DEVICES,
            "-ts",
            "--tensor-split",
            help="Share of the target for each device, for example 3,1.",
        ),
    ] = None
    override_tensor: Annotated[
        str | None,
        option(
            _DEVICES,
            "-ot",
            "--override-tensor",
            help="Put target tensors whose names match on a device: PATTERN=DEVICE[,...].",
        ),
        Sets("override_tensors"),
    ] = None
    override_tensor_draft: Annotated[
        str | None,
        option(
            _DEVICES,
            "-otd",
            "--override-tensor-draft",
            help="Put draft tensors whose names match on a device: PATTERN=DEVICE[,...].",
        ),
    ] = None
    cpu_moe: Annotated[
        bool, option(_DEVICES, "-cmoe", "--cpu-moe", help="Keep the target's experts on the CPU.")
    ] = False
    cpu_moe_draft: Annotated[
        bool,
        option(_DEVICES, "-cmoed", "--cpu-moe-draft", help="Keep the draft's experts on the CPU."),
    ] = False
    no_kv_offload: Annotated[
        bool,
        option(
            _DEVICES, "-nkvo", "--no-kv-offload", help="Keep the KV caches in the CPU's memory."
        ),
        Sets("kv_offload"),
    ] = False
    rpc: Annotated[
        str | None,
        option(
            _DEVICES,
            "--rpc",
            help="RPC servers that may hold target layers: HOST:PORT[,HOST:PORT].",
        ),
        Sets("servers"),
    ] = None
    mlock: Annotated[
        bool, option(_CONTEXT, "--mlock", help="Lock the target's weights in memory.")
    ] = False
    mlock_draft: Annotated[
        bool, option(_CONTEXT, "--mlock-draft", help="Lock the draft's weights in memory.")
    ] = False
    mmap: Annotated[
        bool,
        option(
            _CONTEXT,
            "--mmap",
            help="Map the target's file, and let the system choose what stays in memory.",
        ),
    ] = False
    mmap_draft: Annotated[
        bool,
        option(
            _CONTEXT,
            "--mmap-draft",
            help="Map the draft's file, and let the system choose what stays in memory.",
        ),
    ] = False
    no_mmap: Annotated[
        bool,
        option(
            _CONTEXT,
            "--no-mmap",
            help="Read the target's weights into memory instead of mapping the file.",
        ),
    ] = False
    no_mmap_draft: Annotated[
        bool,
        option(
            _CONTEXT,
            "--no-mmap-draft",
            help="Read the draft's weights into memory instead of mapping the file; qdraft does so "
            "by itself if target and draft do not fit in memory together.",
        ),
    ] = False
    threads: Annotated[
        int,
        option(
            _CONTEXT,
            "-t",
            "--threads",
            help="Number of threads; 0 uses the physical cores available to qdraft.",
        ),
        Sets("n_threads"),
    ] = 0
    threads_batch: Annotated[
        int,
        option(
            _CONTEXT,
            "-tb",
            "--threads-batch",
            help="Number of threads to read prompts and verify drafts with; 0 uses --threads.",
        ),
        Sets("n_threads_batch"),
    ] = 0
    cache_type_k: Annotated[
        str,
        option(
            _CONTEXT,
            "-ctk",
            "--cache-type-k",
            help="Data type of the K cache, for example f16 or q8_0.",
        ),
    ] = "f16"
    cache_type_v: Annotated[
        str,
        option(
            _CONTEXT,
            "-ctv",
            "--cache-type-v",
            help="Data type of the V cache, for example f16 or q8_0.",
        ),
    ] = "f16"
    cache_type_k_draft: Annotated[
        str | None,
        option(
            _CONTEXT,
            "-ctkd",
            "--cache-type-k-draft",
            help="Data type of the draft's K cache.",
            default="as --cache-type-k",
        ),
    ] = None
    cache_type_v_draft: Annotated[
        str | None,
        option(
            _CONTEXT,
            "-ctvd",
            "--cache-type-v-draft",
            help="Data type of the draft's V cache.",
            default="as --cache-type-v",
        ),
    ] = None
    flash_attn: Annotated[
        str, option(_CONTEXT, "-fa", "--flash-attn", help="Use flash attention: auto, on or off.")
    ] = "auto"
    batch_size: Annotated[
        int,
        option(_CONTEXT, "-b", "--batch-size", help="Logical batch size in tokens."),
        Sets("n_batch"),
    ] = 2048
    ubatch_size: Annotated[
        int | None,
        option(
            _CONTEXT,
            "-ub",
            "--ubatch-size",
            help="Physical batch size in tokens.",
            default="512, or --batch-size if that is less or the target does not fit in memory",
        ),
        Sets("n_ubatch"),
    ] = None

    @classmethod
    def of_entry(cls, entry: Mapping[str, str], threads: int = 0) -> DeviceOptions:
        """The options of an entry of models.yaml, by long name; ``threads`` wins unless it is 0."""
        values: dict[str, Any] = {name.replace("-", "_"): text for name, text in entry.items()}
        known = {each.name: values[each.name] for each in fields(cls) if each.name in values}
        for name in ("main_gpu", "threads", "threads_batch", "ctx_size"):
            if name in known:
                known[name] = int(known[name])
        return cls(**{**known, "threads": threads} if threads else known)

    @property
    def servers(self) -> tuple[str, ...]:
        """The RPC servers. Raises UsageError."""
        return parse_servers(self.rpc)

    def first_given_of_draft(self) -> str | None:
        """The first option of the draft that the command line sets."""
        return self.first_given(*draft_fields())

    def engines(self) -> tuple[EngineParams, EngineParams]:
        """How to load target and draft. Raises UsageError."""
        target = EngineParams(
            n_ctx=self.ctx_size,
            n_batch=self.batch_size,
            n_ubatch=self.ubatch_size,
            n_threads=self.threads,
            n_threads_batch=self.threads_batch,
            n_gpu_layers=parse_gpu_layers(self.gpu_layers, "--gpu-layers"),
            devices=parse_devices(self.device),
            split_mode=self.split_mode,
            main_gpu=self.main_gpu,
            tensor_split=parse_tensor_split(self.tensor_split),
            override_tensors=parse_overrides(
                self.override_tensor, "--override-tensor", moe=self.cpu_moe
            ),
            kv_offload=not self.no_kv_offload,
            cache_type_k=self.cache_type_k,
            cache_type_v=self.cache_type_v,
            flash_attn=self.flash_attn,
            load_mode=self._load_mode(""),
            lora=tuple(each for text in self.lora or () for each in parse_lora(text)),
        )
        try:
            return target, self._of_draft(target)
        except ParameterError as error:
            error.args = (rename_parameters(str(error), _draft_names()),)
            raise

    def _load_mode(self, suffix: str) -> str:
        """The load mode that the options with this suffix ask for. Raises UsageError."""
        lock, is_mapped, is_read = (
            getattr(self, f"{name}{suffix}") for name in ("mlock", "mmap", "no_mmap")
        )
        if is_mapped and is_read:
            option = suffix.replace("_", "-")
            raise UsageError(f"--mmap{option} cannot be combined with --no-mmap{option}")
        if lock:
            return "mlock" if is_read else "mmap+mlock"
        return "none" if is_read else "mmap" if is_mapped else "auto"

    def _of_draft(self, target: EngineParams) -> EngineParams:
        """How to load the draft: as the target, except for what the draft's options say."""
        n_gpu_layers = parse_gpu_layers(self.gpu_layers_draft, "--gpu-layers-draft")
        if n_gpu_layers and (self.device_draft or self.device) == NO_DEVICE:
            option = "--device-draft" if self.device_draft else "--device"
            raise UsageError(f"--gpu-layers-draft cannot be combined with {option} none")
        draft = replace(
            target,
            n_ctx=self.ctx_size if self.ctx_size_draft is None else self.ctx_size_draft,
            n_gpu_layers=n_gpu_layers,
            devices=() if self.device_draft else target.devices,
            override_tensors=parse_overrides(
                self.override_tensor_draft, "--override-tensor-draft", moe=self.cpu_moe_draft
            ),
            cache_type_k=self.cache_type_k_draft or self.cache_type_k,
            cache_type_v=self.cache_type_v_draft or self.cache_type_v,
            load_mode=self._load_mode("_draft"),
        )
        if not self.device_draft:
            return replace(draft, devices=())
        return draft.elsewhere(parse_devices(self.device_draft))


def draft_fields() -> list[str]:
    """The fields of ``DeviceOptions`` that say how the draft is loaded."""
    return [each.name for each in fields(DeviceOptions) if each.name.endswith("_draft")]


def _draft_names() -> dict[str, str]:
    """The draft's option for each parameter that one sets, for errors."""
    options = option_names(DeviceOptions)
    names = {
        "ctx_size": "n_ctx",
        "gpu_layers": "n_gpu_layers",
        "device": "devices",
        "override_tensor": "override_tensors",
    }
    of_target = [name.removesuffix("_draft") for name in draft_fields()]
    return {names.get(name, name): options[f"{name}_draft"] for name in of_target}


def parse_gpu_layers(text: str, option: str) -> int | None:
    """Return None for auto, -1 for all, else the number. Raises UsageError."""
    if text in ("auto", "all"):
        return None if text == "auto" else ALL_LAYERS
    if not text.isascii() or not text.isdigit():
        raise UsageError(f"{option} is {text} but must be a number, all or auto")
    return int(text)


def parse_devices(text: str | None) -> tuple[str, ...]:
    """Return the names of a list that is separated by commas."""
    return tuple(name.strip() for name in text.split(",")) if text else ()


def parse_lora(text: str) -> list[tuple[str, float]]:
    """Return the files and scales of FILE[:SCALE][,...]. Raises UsageError.

    A file whose name looks like such a list is a file.
    """
    if Path(text).exists():
        return [(text, 1.0)]
    adapters = []
    for part in text.split(","):
        name, _, scale = part.rpartition(":")
        try:
            adapters.append((name, float(scale)) if name else (part, 1.0))
        except ValueError:  # the colon is part of the name
            adapters.append((part, 1.0))
        if not adapters[-1][0]:
            raise UsageError(
                f"--lora is {text} but must be a file, or a file and its scale",
                hint="give, for example, --lora adapter.gguf:0.5",
            )
    return adapters


def parse_tensor_split(text: str | None) -> tuple[float, ...]:
    """Return the numbers of a list that is separated by commas or slashes. Raises UsageError."""
    try:
        parts = tuple(float(part) for part in re.split(r"[,/]", text)) if text else ()
    except ValueError:
        parts = (-1.0,)
    if any(not 0 <= part < float("inf") for part in parts):
        raise UsageError(f"--tensor-split is {text} but must be numbers such as 3,1")
    return parts


def parse_overrides(
    text: str | None, option: str = "--override-tensor", *, moe: bool
) -> tuple[tuple[str, str], ...]:
    """Return the pairs of PATTERN=DEVICE[,...]; ``moe`` adds that experts stay on the CPU.

    Raises UsageError.
    """
    pairs = [tuple(part.rsplit("=", 1)) for part in text.split(",")] if text else []
    for pair in pairs:
        if len(pair) != 2 or not all(pair):
            raise UsageError(
                f"{option} is {text} but must be PATTERN=DEVICE[,...]",
                hint=rf"give, for example, {option} 'blk\.(0|1)\..*=CPU'",
            )
    experts = [(_EXPERTS, "CPU")] if moe else []
    return (*((pair[0], pair[1]) for pair in pairs), *experts)


def parse_size(text: str, option: str) -> int:
    """Return the bytes of a size such as 12G or 500M. Raises UsageError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if not match:
        raise UsageError(f"{option} is {text} but must be a size such as 12G or 500M")
    return int(float(match[1]) * _UNITS[match[2].upper()])
