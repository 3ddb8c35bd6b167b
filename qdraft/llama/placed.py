"""Where a model goes: what qdraft asks of llama.cpp, and what it did, by its log."""

from __future__ import annotations

import ctypes
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from qdraft.errors import ParameterError, UsageError, require
from qdraft.llama import logs
from qdraft.llama.devices import (
    Device,
    buffer_types,
    device_pointer,
    devices,
    offload_devices,
    splits_rows,
)
from qdraft.llama.native import lib
from qdraft.llama.params import ALL_LAYERS, NO_DEVICE, SPLIT_MODES, EngineParams

CPU = "CPU"
_MIB = 2**20
_TOGETHER = "Meta("  # llama.cpp's name for all devices together, under split mode tensor
_KINDS = {
    "model": "weights",
    "KV": "kv",
    "RS": "state",
    "compute": "compute",
    "output": "compute",
}
MEMORY_KINDS = ("weights", "kv", "compute", "state")  # in the order of Share


@dataclass(frozen=True, slots=True)
class Share:
    """What one device holds of a model: layers, and bytes of memory.

    ``state`` are those of recurrent states, of all texts.
    """

    n_layers: int = 0
    weights: int = 0
    kv: int = 0
    compute: int = 0
    state: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.kv + self.compute + self.state


@dataclass(frozen=True, slots=True)
class States:
    """The recurrent states that a context has room for: ``n_bytes`` together.

    They are those of ``n_texts`` texts, and for each text ``n_back`` earlier ones.
    """

    n_bytes: int = 0
    n_texts: int = 0
    n_back: int = 0


class _Override(ctypes.Structure):
    """llama_model_tensor_buft_override."""

    _fields_ = [("pattern", ctypes.c_char_p), ("buffer_type", ctypes.c_void_p)]


def chosen_devices(params: EngineParams) -> list[Device]:
    """Return the devices that layers may go to, in order. Raises UsageError for unknown ones."""
    if NO_DEVICE in params.devices:
        return []
    chosen = offload_devices()
    if params.devices:
        known = {device.name: device for device in devices() if device.takes_layers}
        for name in params.devices:
            if name not in known:
                raise UsageError(
                    f"there is no device {name} to put layers on",
                    hint=f"known: {', '.join(known) or 'none'}; qdraft devices shows them",
                )
        chosen = [known[name] for name in params.devices]
    return chosen


def place(native_params: Any, params: EngineParams) -> list[Any]:
    """Write into llama_model_params where a model goes.

    Returns objects to keep alive until the model is loaded. Raises UsageError for what this build
    or this machine lacks, and for params that contradict each other.
    """
    chosen = chosen_devices(params)
    require_placeable(params, chosen)
    n_most = lib().llama_max_devices()
    split = (ctypes.c_float * n_most)(*params.tensor_split)
    pointers = [device_pointer(device.name) for device in chosen]
    named = (ctypes.c_void_p * (len(chosen) + 1))(*pointers, None)
    overrides = _overrides(params, chosen)
    layers = params.n_gpu_layers
    native_params.n_gpu_layers = ALL_LAYERS if layers is None else layers
    native_params.split_mode = SPLIT_MODES.index(params.split_mode)
    native_params.main_gpu = params.main_gpu
    if params.tensor_split:
        native_params.tensor_split = split
    if params.devices:
        native_params.devices = ctypes.cast(named, ctypes.c_void_p)
    if params.override_tensors:
        native_params.tensor_buft_overrides = ctypes.cast(overrides, ctypes.c_void_p)
    return [split, named, overrides]


def require_placeable(params: EngineParams, chosen: Sequence[Device]) -> None:
    """Raise UsageError for GPU settings without a GPU, or with too few."""
    if not chosen:
        _require_no_device_settings(params)
    else:
        rule = f"less than the number of devices ({len(chosen)})"
        require(params.main_gpu < len(chosen), "main_gpu", params.main_gpu, rule)
    _overrides(params, chosen)
    if params.split_mode == "row":
        for device in chosen:
            if not splits_rows(device):
                raise ParameterError(
                    f"split_mode row does not work with {device.name}, which cannot split rows",
                    hint="use split_mode layer, which works with every device, or try tensor",
                )
    if len(params.tensor_split) > max(1, len(chosen)):
        raise ParameterError(
            f"tensor_split has {len(params.tensor_split)} parts but must have at most "
            f"{max(1, len(chosen))}, one for each device"
        )


def _require_no_device_settings(params: EngineParams) -> None:
    """Raise UsageError if a parameter is set that makes no sense without a device."""
    is_set = {
        "split_mode": params.split_mode != "layer",
        "main_gpu": params.main_gpu,
        "tensor_split": params.tensor_split,
        "kv_offload": not params.kv_offload,
    }
    names = [name for name, value in is_set.items() if value]
    hint = "leave the GPU options out; qdraft devices shows how to get a GPU build"
    if params.n_gpu_layers:  # unnamed: it may be the draft's, which has an option of its own
        raise UsageError(
            "layers cannot go on a GPU: this build of llama-cpp-python has no device for them",
            hint=hint,
        )
    if names and NO_DEVICE in params.devices:
        raise ParameterError(f"devices is none, so {names[0]} must be left out")
    if names:
        raise ParameterError(
            f"{names[0]} needs a GPU, but this build of llama-cpp-python has none", hint=hint
        )


def _overrides(params: EngineParams, chosen: Sequence[Device]) -> Any:
    """Return the pairs of pattern and buffer type, and an empty one at the end.

    Raises UsageError for a pattern that is not valid, and for a device that is not there.
    """
    if not params.override_tensors:
        return None
    known = buffer_types([CPU, *(device.name for device in chosen)])
    for pattern, device in params.override_tensors:
        if device not in known:
            raise UsageError(
                f"tensors cannot be put on {device}", hint=f"known: {', '.join(sorted(known))}"
            )
        try:
            re.compile(pattern)
        except re.error as error:
            raise UsageError(f"{pattern} is not a pattern of tensor names: {error}") from error
    pairs = [_Override(p.encode(), known[device]) for p, device in params.override_tensors]
    return (_Override * (len(pairs) + 1))(*pairs, _Override(None, None))


@dataclass(frozen=True, slots=True)
class Placed:
    """Where a loaded model is, by device name, as llama.cpp logged it.

    ``layers`` names the device of each layer; the last one is the output. ``moved`` counts the
    tensors that a pattern put on a device. ``surprises`` are sentences about what is not on the
    device of its layer. ``mapped`` are, by device, the bytes of the stretch of the file that
    llama.cpp maps, from the first tensor that the device uses to the last; the unused parts take no
    memory. ``remote`` names the devices that belong to RPC servers.
    """

    layers: tuple[str, ...]
    shares: Mapping[str, Share]
    moved: Mapping[str, int] = field(default_factory=dict)
    surprises: tuple[str, ...] = ()
    mapped: Mapping[str, int] = field(default_factory=dict)
    remote: tuple[str, ...] = ()

    @property
    def n_offloaded(self) -> int:
        """The number of layers on devices other than the CPU; the output counts as one."""
        return sum(name != CPU for name in self.layers)


def read_back(lines: Iterable[str], known: Sequence[Device]) -> Placed:
    """Read where a model is from llama.cpp's log of loading it and making a context."""
    layers: dict[int, str] = {}
    moved: dict[str, int] = defaultdict(int)
    sizes: dict[tuple[str, str], float] = defaultdict(float)
    compute: dict[str, float] = {}
    surprises: list[str] = []
    mapped: dict[str, float] = defaultdict(float)
    for line in lines:
        if match := logs.LAYER.search(line):
            layers[int(match[1])] = match[2]
        elif match := logs.BUFFER.search(line):
            holder, kind, mib = device_of(match[1], known), match[2], float(match[3])
            mapped[holder] += mib if match[1].endswith("_Mapped") else 0
            if kind == "compute":  # llama.cpp logs it each time that it reserves them
                compute[holder] = mib
            else:
                sizes[holder, _KINDS[kind]] += mib
        elif match := logs.MOVED.search(line):
            moved[device_of(match[2], known)] += 1
        elif match := logs.ELSEWHERE.search(line):
            surprises.append(
                f"{match[3]} of layer {match[1]} runs on {match[4]}, because {match[2]}, which has "
                "the layer, lacks it"
            )
    for holder, mib in compute.items():
        sizes[holder, "compute"] += mib
    holders = [layers[i] for i in sorted(layers)]
    names = dict.fromkeys([*holders, *(holder for holder, _ in sizes)])
    shares = {
        name: Share(
            holders.count(name),
            *(round(sizes[name, kind] * _MIB) for kind in MEMORY_KINDS),
        )
        for name in names
    }
    as_one = any(name.startswith(_TOGETHER) for name in names)
    remote = [device.name for device in known if device.remote and (as_one or device.name in names)]
    return Placed(
        layers=tuple(holders),
        shares=shares,
        moved=dict(moved),
        surprises=tuple(dict.fromkeys(surprises)),
        mapped={name: round(mib * _MIB) for name, mib in mapped.items() if mib},
        remote=tuple(remote),
    )


def states_of(lines: Iterable[str]) -> States:
    """Return the recurrent states of a context, from llama.cpp's log of making it."""
    for line in lines:
        if match := logs.STATE_SIZE.search(line):
            return States(round(float(match[1]) * _MIB), int(match[2]), int(match[3]))
    return States()


def surprises_of(placed: Placed, params: EngineParams) -> list[str]:
    """Return sentences about what is on the CPU although the params put it on a device."""
    total = len(placed.layers)
    n_asked = total if params.n_gpu_layers == ALL_LAYERS else min(params.n_gpu_layers or 0, total)
    surprises = list(placed.surprises)
    if placed.n_offloaded < n_asked:
        surprises.append(
            f"{n_asked} layers should be on devices, but {n_asked - placed.n_offloaded} of them "
            "are on the CPU"
        )
    on_cpu = placed.shares.get(CPU, Share())
    if params.kv_offload and on_cpu.kv and placed.n_offloaded == total:
        surprises.append("all layers are on devices, but a part of the KV cache is on the CPU")
    return surprises


def device_of(buffer: str, known: Sequence[Device]) -> str:
    """Return the device that a buffer of this name is on; page-locked memory is the CPU's."""
    if match := logs.SERVER_BUFFER.search(buffer):
        of_server = [device.name for device in known if device.description == match[2]]
        return of_server[int(match[1])] if int(match[1]) < len(of_server) else buffer
    if buffer.startswith(_TOGETHER):
        return buffer
    if buffer.endswith("_Host"):
        return CPU
    names = sorted((device.name for device in known), key=len, reverse=True)
    return next((n for n in names if buffer == n or buffer.startswith(f"{n}_")), CPU)


def describe_placed(placed: Placed) -> str:
    """Describe what each device holds of a model in one line; the CPU comes last."""
    return ", ".join(
        f"{share.n_layers} layers on {name} ({share.total / 2**30:.2f} GiB)"
        for name, share in sorted(placed.shares.items(), key=lambda item: item[0] == CPU)
        if share.n_layers
    )
