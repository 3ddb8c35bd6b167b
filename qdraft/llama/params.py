"""How one model is loaded: where its layers go, its cache, its threads."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from qdraft.decoding.records import MAX_N_DRAFT
from qdraft.errors import ParameterError, require

ALL_LAYERS = -1
CACHE_TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1")
FLASH_ATTENTION = ("auto", "on", "off")
DEFAULT_N_CTX = 4096
MAX_N_CTX = 2**24
SPLIT_MODES = ("none", "layer", "row", "tensor")  # in the order of llama_split_mode
LOAD_MODES = ("auto", "none", "mmap", "mlock", "mmap+mlock")
NO_DEVICE = "none"  # in ``devices``: the CPU alone


@dataclass(frozen=True, slots=True)
class EngineParams:
    """How one model is loaded. Names and defaults are llama.cpp's unless stated here.

    ``n_ctx`` None is 4096, or the model's training context if that is less; 0 is the training
    context. ``n_threads`` 0 is the number of physical cores that the process may use;
    ``n_threads_batch`` 0 is ``n_threads``.

    ``n_gpu_layers`` None lets qdraft place the layers if a command or ``open_pair`` opens the pair,
    and puts all of them on devices in a bare ``Pair``; -1 demands all. ``devices`` are names as
    ``qdraft devices`` prints them, in the order in which they get layers; empty stands for all of
    them, ("none",) for the CPU alone. ``main_gpu`` is the index among them of the one device that
    ``split_mode`` "none" uses. ``override_tensors`` pairs patterns of tensor names with names of
    devices or buffer types. ``kv_offload`` False keeps the KV cache in the CPU's memory.

    ``load_mode`` says how weights get into the CPU's memory: "mmap" maps the file, so that the
    system may drop what it can read again, "none" reads the file into memory of its own, and
    "mlock" and "mmap+mlock" also lock that memory. "auto" maps the file; if target and draft do not
    fit, a pair reads the draft into memory and locks the part of the target that does.

    ``n_ubatch`` None is 512, or ``n_batch`` if that is less; a pair takes up to ``n_batch`` if its
    target does not fit in memory, because each physical batch then reads the file again.

    ``n_rs_seq`` is the number of earlier recurrent states that a context keeps of each text, so
    that it can take back as many tokens, if the architecture can do that; None is 3 for the target
    of a pair and 0 otherwise.

    ``lora`` are LoRA adapters, each a file and its scale; the sum of all of them applies.

    ``extra_buffers`` allows llama.cpp's repacked weights; None allows them for a draft if a probe
    has shown that they are safe here, and not for a target.
    """

    n_ctx: int | None = None
    n_batch: int = 2048
    n_ubatch: int | None = None
    n_rs_seq: int | None = None
    n_threads: int = 0
    n_threads_batch: int = 0
    n_gpu_layers: int | None = None
    devices: tuple[str, ...] = ()
    split_mode: str = "layer"
    main_gpu: int = 0
    tensor_split: tuple[float, ...] = ()
    override_tensors: tuple[tuple[str, str], ...] = ()
    kv_offload: bool = True
    cache_type_k: str = "f16"
    cache_type_v: str = "f16"
    flash_attn: str = "auto"
    extra_buffers: bool | None = None
    load_mode: str = "auto"
    lora: tuple[tuple[str, float], ...] = ()

    def __post_init__(self) -> None:
        limit = MAX_N_CTX
        require(0 <= (self.n_ctx or 0) <= limit, "n_ctx", self.n_ctx, f"0 (the model's) to {limit}")
        require(self.n_batch <= limit, "n_batch", self.n_batch, f"at most {limit}")
        require(self.n_batch > MAX_N_DRAFT, "n_batch", self.n_batch, f"above {MAX_N_DRAFT}")
        require(0 < self.physical_batch <= self.n_batch, "n_ubatch", self.n_ubatch, "1 to n_batch")
        n_back = self.n_rs_seq or 0
        require(0 <= n_back <= MAX_N_DRAFT, "n_rs_seq", n_back, f"0 to {MAX_N_DRAFT}")
        for name in ("n_threads", "n_threads_batch", "main_gpu"):
            require(0 <= getattr(self, name) <= 512, name, getattr(self, name), "0 to 512")
        n_layers = self.n_gpu_layers
        require(
            n_layers is None or ALL_LAYERS <= n_layers <= 100_000,
            "n_gpu_layers",
            n_layers,
            "-1 (all) or more",
        )
        choices = {
            "cache_type_k": CACHE_TYPES,
            "cache_type_v": CACHE_TYPES,
            "flash_attn": FLASH_ATTENTION,
            "split_mode": SPLIT_MODES,
            "load_mode": LOAD_MODES,
        }
        for name, known in choices.items():
            choice = getattr(self, name)
            require(choice in known, name, choice, f"one of {', '.join(known)}")
        if self.flash_attn == "off" and self.cache_type_v not in ("f32", "f16", "bf16"):
            raise ParameterError(
                f"cache_type_v {self.cache_type_v} needs flash attention, but flash_attn is off"
            )
        for path, scale in self.lora:
            require(math.isfinite(scale), f"the scale of lora {path}", scale, "finite")
        self._require_devices()

    def _require_devices(self) -> None:
        """Raise ParameterError for devices and splits that contradict each other on any machine."""
        names = ", ".join(self.devices)
        is_unique = len(set(self.devices)) == len(self.devices)
        require(is_unique, "devices", names, "a list that names each device once")
        if NO_DEVICE in self.devices and len(self.devices) > 1:
            raise ParameterError(
                f"devices is {names}, but `none` cannot be combined with other devices"
            )
        if NO_DEVICE in self.devices and self.n_gpu_layers:
            raise ParameterError("devices is none, so n_gpu_layers must be 0 or left out")
        if self.split_mode == "none" and self.tensor_split:
            raise ParameterError(
                "split_mode none puts everything on one device, so tensor_split cannot be combined "
                "with it"
            )
        if self.split_mode in ("layer", "tensor") and self.main_gpu:
            raise ParameterError(
                f"main_gpu needs split_mode none or row, not {self.split_mode}",
                hint="use split_mode none for the main GPU alone, or name the devices to use",
            )

    @property
    def physical_batch(self) -> int:
        """The tokens that one pass over the weights takes at most."""
        return min(512, self.n_batch) if self.n_ubatch is None else self.n_ubatch

    @classmethod
    def of_json(cls, fields: Mapping[str, Any]) -> EngineParams:
        """Make params from the JSON of ``dataclasses.asdict``, whose tuples have become lists."""

        def freeze(value: Any) -> Any:
            return tuple(map(freeze, value)) if isinstance(value, list) else value

        return cls(**{name: freeze(value) for name, value in fields.items()})

    def context_size(self, n_ctx_train: int) -> int:
        """Return the context size in tokens for a model that was trained on ``n_ctx_train``."""
        if self.n_ctx is None:
            return min(DEFAULT_N_CTX, n_ctx_train)
        return self.n_ctx or n_ctx_train

    def same_place(self, other: EngineParams) -> bool:
        """Tell whether these params put weights on the same devices as ``other``."""
        names = (
            "n_gpu_layers",
            "devices",
            "split_mode",
            "main_gpu",
            "tensor_split",
            "override_tensors",
        )
        return all(getattr(self, name) == getattr(other, name) for name in names)

    def elsewhere(self, devices: tuple[str, ...]) -> EngineParams:
        """Return these params for other devices, without the split over the present ones."""
        if devices == (NO_DEVICE,):
            return self.on_cpu()
        return replace(self, devices=devices, split_mode="layer", main_gpu=0, tensor_split=())

    def on_cpu(self) -> EngineParams:
        """Return these params for the CPU alone."""
        return replace(
            self,
            n_gpu_layers=None,
            devices=(NO_DEVICE,),
            split_mode="layer",
            main_gpu=0,
            tensor_split=(),
            kv_offload=True,
        )
