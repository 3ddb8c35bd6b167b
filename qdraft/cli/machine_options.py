"""Where models go and how they run: options that commands which load a pair have in common."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, get_type_hints

from qdraft.cli.options import MACHINE, option
from qdraft.errors import UsageError
from qdraft.llama.params import ALL_LAYERS, NO_DEVICE, EngineParams
from qdraft.llama.rpc import parse_servers

_DEVICES = "Devices"
# The weights of experts, as llama.cpp's --cpu-moe has them.
_EXPERTS = r"\.ffn_(up|down|gate|gate_up)_(ch|)exps"

GpuLayers = Annotated[
    str,
    option(
        _DEVICES, "-ngl", "--gpu-layers",
        help="Target layers on the devices: number, all, auto (what fits, by qdraft plan).",
    ),
]  # fmt: skip
GpuLayersDraft = Annotated[
    str, option(_DEVICES, "-ngld", "--gpu-layers-draft", help="The same for the draft.")
]
DeviceNames = Annotated[
    str | None,
    option(
        _DEVICES, "-dev", "--device",
        help="Devices for the target, as qdraft devices names them, or none.", default="all",
    ),
]  # fmt: skip
DeviceNamesDraft = Annotated[
    str | None, option(_DEVICES, "-devd", "--device-draft", help="The same for the draft.",
                       default="as -dev, but no RPC server")
]  # fmt: skip
SplitMode = Annotated[
    str,
    option(_DEVICES, "-sm", "--split-mode", help="Over several devices: none, layer, row, tensor."),
]
MainGpu = Annotated[
    int, option(_DEVICES, "-mg", "--main-gpu", help="The only device of --split-mode none.")
]
TensorSplit = Annotated[
    str | None, option(_DEVICES, "-ts", "--tensor-split", help="Shares of the devices, as 3,1.")
]
OverrideTensor = Annotated[
    str | None,
    option(
        _DEVICES, "-ot", "--override-tensor",
        help="PATTERN=DEVICE[,...]: tensors of these names go there.",
    ),
]  # fmt: skip
OverrideTensorDraft = Annotated[
    str | None, option(_DEVICES, "-otd", "--override-tensor-draft", help="The same for the draft.")
]
CpuMoe = Annotated[
    bool, option(_DEVICES, "-cmoe", "--cpu-moe", help="The target's experts stay on the CPU.")
]
CpuMoeDraft = Annotated[
    bool, option(_DEVICES, "-cmoed", "--cpu-moe-draft", help="The draft's experts too.")
]
NoKvOffload = Annotated[
    bool, option(_DEVICES, "-nkvo", "--no-kv-offload", help="KV caches stay in the CPU's memory.")
]
Rpc = Annotated[
    str | None,
    option(_DEVICES, "--rpc", help="RPC servers for the target's layers: HOST:PORT[,HOST:PORT]."),
]
Threads = Annotated[
    int, option(MACHINE, "-t", "--threads", help="0 is the physical cores allowed here.")
]
ThreadsBatch = Annotated[
    int,
    option(
        MACHINE, "-tb", "--threads-batch", help="Threads for batches (prompt, verify); 0 is as -t."
    ),
]
CacheTypeK = Annotated[str, option(MACHINE, "-ctk", "--cache-type-k", help="Type of the K cache.")]
CacheTypeV = Annotated[str, option(MACHINE, "-ctv", "--cache-type-v", help="Type of the V cache.")]
CacheTypeKDraft = Annotated[
    str | None,
    option(MACHINE, "-ctkd", "--cache-type-k-draft", help="The draft's.", default="as -ctk"),
]
CacheTypeVDraft = Annotated[
    str | None,
    option(MACHINE, "-ctvd", "--cache-type-v-draft", help="The draft's.", default="as -ctv"),
]
FlashAttn = Annotated[str, option(MACHINE, "-fa", "--flash-attn", help="auto, on or off.")]


@dataclass(frozen=True, slots=True)
class Machine:
    """The options, as they were given."""

    gpu_layers: GpuLayers = "auto"
    gpu_layers_draft: GpuLayersDraft = "auto"
    device: DeviceNames = None
    device_draft: DeviceNamesDraft = None
    split_mode: SplitMode = "layer"
    main_gpu: MainGpu = 0
    tensor_split: TensorSplit = None
    override_tensor: OverrideTensor = None
    override_tensor_draft: OverrideTensorDraft = None
    cpu_moe: CpuMoe = False
    cpu_moe_draft: CpuMoeDraft = False
    no_kv_offload: NoKvOffload = False
    rpc: Rpc = None
    threads: Threads = 0
    threads_batch: ThreadsBatch = 0
    cache_type_k: CacheTypeK = "f16"
    cache_type_v: CacheTypeV = "f16"
    cache_type_k_draft: CacheTypeKDraft = None
    cache_type_v_draft: CacheTypeVDraft = None
    flash_attn: FlashAttn = "auto"

    @classmethod
    def of_entry(cls, told: Mapping[str, str]) -> Machine:
        """From the options of an entry of models.yaml, by long name; the others are left out."""
        numbers = ("main_gpu", "threads", "threads_batch")
        named = {name.replace("-", "_"): value for name, value in told.items()}
        known: dict[str, Any] = {f.name: named[f.name] for f in fields(cls) if f.name in named}
        return cls(**{**known, **{name: int(known[name]) for name in numbers if name in known}})

    @property
    def of_draft(self) -> bool:
        """Is any option of a draft model given?"""
        return any(
            field.name.endswith("_draft") and getattr(self, field.name) != field.default
            for field in fields(self)
        )

    @property
    def servers(self) -> tuple[str, ...]:
        """The RPC servers. Raises UsageError."""
        return parse_servers(self.rpc)

    def engines(
        self,
        n_ctx: int | None = None,
        n_ctx_draft: int | None = None,
        batch_size: int = 2048,
        ubatch_size: int | None = None,
    ) -> tuple[EngineParams, EngineParams]:
        """How target and draft are loaded. Raises UsageError."""
        target = EngineParams(
            n_ctx=n_ctx,
            n_batch=batch_size,
            n_ubatch=min(512, batch_size) if ubatch_size is None else ubatch_size,
            n_threads=self.threads,
            n_threads_batch=self.threads_batch,
            n_gpu_layers=parse_gpu_layers(self.gpu_layers, "--gpu-layers"),
            devices=parse_devices(self.device),
            split_mode=self.split_mode,
            main_gpu=self.main_gpu,
            tensor_split=parse_tensor_split(self.tensor_split),
            override_tensors=parse_overrides(self.override_tensor, moe=self.cpu_moe),
            kv_offload=not self.no_kv_offload,
            cache_type_k=self.cache_type_k,
            cache_type_v=self.cache_type_v,
            flash_attn=self.flash_attn,
        )
        draft = replace(
            target,
            n_ctx=n_ctx if n_ctx_draft is None else n_ctx_draft,
            n_gpu_layers=parse_gpu_layers(self.gpu_layers_draft, "--gpu-layers-draft"),
            devices=() if self.device_draft else target.devices,
            override_tensors=parse_overrides(self.override_tensor_draft, moe=self.cpu_moe_draft),
            cache_type_k=self.cache_type_k_draft or self.cache_type_k,
            cache_type_v=self.cache_type_v_draft or self.cache_type_v,
        )
        if not self.device_draft:
            return target, replace(draft, devices=())
        if draft.n_gpu_layers and self.device_draft == NO_DEVICE:
            raise UsageError("--device-draft is none, but -ngld asks for layers on one")
        return target, draft.elsewhere(parse_devices(self.device_draft))


def takes_machine(command: Callable[..., None]) -> Callable[..., None]:
    """The command with all options of ``Machine`` in place of its parameter ``machine``."""
    hints = get_type_hints(command, include_extras=True)
    of_machine = get_type_hints(Machine, include_extras=True)
    parameters: list[inspect.Parameter] = []
    for own in inspect.signature(command).parameters.values():
        if own.name != "machine":
            parameters.append(own.replace(annotation=hints[own.name]))
            continue
        parameters += [
            inspect.Parameter(
                field.name, own.kind, default=field.default, annotation=of_machine[field.name]
            )
            for field in fields(Machine)
        ]

    def whole(**given: Any) -> None:
        machine = Machine(**{field.name: given.pop(field.name) for field in fields(Machine)})
        command(machine=machine, **given)

    whole.__name__, whole.__doc__ = command.__name__, command.__doc__
    whole.__annotations__ = {one.name: one.annotation for one in parameters}
    vars(whole)["__signature__"] = inspect.Signature(parameters)
    return whole


def parse_gpu_layers(text: str, option: str) -> int | None:
    """None for auto, -1 for all, else the number."""
    if text in ("auto", "all"):
        return None if text == "auto" else ALL_LAYERS
    if not text.isascii() or not text.isdigit():
        raise UsageError(f"{option} is {text}, but must be a number, all or auto")
    return int(text)


def parse_devices(text: str | None) -> tuple[str, ...]:
    """Names separated by commas."""
    return tuple(name.strip() for name in text.split(",")) if text else ()


def parse_tensor_split(text: str | None) -> tuple[float, ...]:
    """Numbers separated by commas or slashes."""
    try:
        parts = tuple(float(part) for part in re.split(r"[,/]", text)) if text else ()
    except ValueError:
        parts = (-1.0,)
    if any(not 0 <= part < float("inf") for part in parts):
        raise UsageError(f"--tensor-split is {text}, but must be numbers such as 3,1")
    return parts


def parse_overrides(text: str | None, *, moe: bool) -> tuple[tuple[str, str], ...]:
    """PATTERN=DEVICE, separated by commas; ``moe`` adds that experts stay on the CPU."""
    pairs = [tuple(part.rsplit("=", 1)) for part in text.split(",")] if text else []
    for pair in pairs:
        if len(pair) != 2 or not all(pair):
            raise UsageError(
                f"--override-tensor is {text}, but must be PATTERN=DEVICE",
                hint=r'for example "blk\.(0|1)\..*=CPU"; several are separated by commas',
            )
    experts = [(_EXPERTS, "CPU")] if moe else []
    return (*((pair[0], pair[1]) for pair in pairs), *experts)
