"""The weights of one GGUF file, loaded by llama.cpp."""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from qdraft.errors import DeviceMemoryError, EngineError, ModelFileError
from qdraft.llama.interrupts import interruptible
from qdraft.llama.logs import NOT_LOCKED, OUT_OF_MEMORY
from qdraft.llama.lora import Adapters, load_adapters, require_adapter
from qdraft.llama.native import lib, listening, native_errors
from qdraft.llama.params import EngineParams
from qdraft.llama.placed import place
from qdraft.llama.progress import Progress, no_progress
from qdraft.llama.rpc import keep_alive
from qdraft.llama.trial import require_loadable
from qdraft.llama.vocab import LlamaVocab

log = logging.getLogger(__name__)

LESS_MEMORY = (
    "use fewer layers (-ngl, -ngld), a smaller context (-c) or smaller cache types (-ctk, -ctv)"
)


class LlamaModel:
    """The weights of one GGUF file."""

    def __init__(
        self,
        path: Path,
        params: EngineParams,
        *,
        extra_buffers: bool = False,
        dry: bool = False,
        progress: Progress = no_progress,
    ) -> None:
        """Load ``path``; ``progress`` gets the share that is loaded, from 0 to 1.

        ``dry`` loads and allocates no weights: contexts of such a model report their sizes but
        cannot decode. A file that is new on this machine is tried in a child process first. Raises
        UsageError for a device that does not exist, DeviceMemoryError if a device has too little
        memory, and ModelFileError with llama.cpp's reason if loading fails otherwise.
        KeyboardInterrupt ends the loading, and so does what ``progress`` raises.
        """
        self._lib = lib()
        require_loadable(path)
        self.path, self.params = path, params
        self.lines: list[str] = []  # what llama.cpp logged while loading
        self._model = None
        failures: list[BaseException] = []
        native_params = self._lib.llama_model_default_params()
        placed = place(native_params, params)
        native_params.use_extra_bufts = extra_buffers
        native_params.load_mode = _load_mode(params.load_mode)
        if dry:
            native_params.no_alloc = True
            native_params.load_mode = self._lib.LLAMA_LOAD_MODE_NONE
        try:
            with (
                interruptible() as interrupted,
                listening(self.lines),
                native_errors() as errors,
            ):

                def report(share: float, _user_data: object) -> bool:
                    try:
                        if share == 0:
                            keep_alive()
                        progress(f"loading {path.name}", share, 1.0)
                    except BaseException as error:  # Python would print it and go on
                        failures.append(error)
                    return not (failures or interrupted())

                callback = self._lib.llama_progress_callback(report)
                native_params.progress_callback = callback
                # llama.cpp reads these as long as it loads, even if nobody waits for that any
                # more, and the split for as long as the model gets contexts.
                native_params.held = callback, placed
                self._native_params = native_params
                self._model = self._lib.llama_model_load_from_file(os.fsencode(path), native_params)
        except BaseException:  # an interrupt that came after llama.cpp had loaded it
            self._free()
            raise
        if failures:
            self._free()
            raise failures[0]
        if not self._model:
            raise _load_error(f"{path} does not load: {errors}", self.lines)
        if any(NOT_LOCKED.search(line) for line in self.lines):
            log.warning(
                "%s: the system does not let qdraft lock all of it in memory; raise the limit with "
                "ulimit -l",
                path.name,
            )
        self.vocab = LlamaVocab(self._model, path)
        self.adapters = self._load_adapters(dry=dry)

    def _load_adapters(self, *, dry: bool) -> Adapters:
        """Load the LoRA adapters, which a model without weights cannot hold."""
        for name, _ in self.params.lora:
            require_adapter(Path(name))
        try:
            return () if dry else load_adapters(self._model, self.path, self.params.lora)
        except BaseException:
            self.close()
            raise

    @property
    def native(self) -> Any:
        """The llama_model pointer."""
        if not self._model:
            raise EngineError(f"{self.path} is closed")
        return self._model

    @property
    def n_ctx_train(self) -> int:
        return int(self._lib.llama_model_n_ctx_train(self.native))

    @property
    def has_state(self) -> bool:
        """True for recurrent and hybrid models, whose state cannot be cut to a length."""
        hybrid = self._lib.llama_model_is_hybrid(self.native)
        return bool(hybrid) or self.is_recurrent

    @property
    def is_recurrent(self) -> bool:
        """True for a model with a state in all of its layers, and no KV cells."""
        return bool(self._lib.llama_model_is_recurrent(self.native))

    @property
    def architecture(self) -> str:
        return self._meta(b"general.architecture")

    @property
    def shape(self) -> tuple[str, ...]:
        """What two quantizations of one model have in common: architecture and dimensions."""
        architecture = self.architecture
        keys = (
            "block_count",
            "embedding_length",
            "feed_forward_length",
            "attention.head_count",
            "attention.head_count_kv",
            "attention.key_length",
            "attention.value_length",
            "rope.freq_base",
        )
        return (architecture, *(self._meta(f"{architecture}.{key}".encode()) for key in keys))

    def _meta(self, key: bytes) -> str:
        buffer = ctypes.create_string_buffer(256)
        n = self._lib.llama_model_meta_val_str(self.native, key, buffer, len(buffer))
        return buffer.value.decode("utf-8", "replace") if n >= 0 else ""

    def close(self) -> None:
        if self._model:
            self.vocab.close()
            self._free()

    def _free(self) -> None:
        model, self._model = self._model, None
        if model:
            with suppress(EngineError):  # the memory of a lost server is lost with it
                self._lib.llama_model_free(model)


def _load_mode(name: str) -> int:
    return int(getattr(lib(), f"LLAMA_LOAD_MODE_{name.upper().replace('+', '_')}"))


def _load_error(problem: str, lines: Sequence[str]) -> EngineError | ModelFileError:
    return (
        DeviceMemoryError(problem, hint=LESS_MEMORY)
        if is_short_of_memory(lines)
        else ModelFileError(problem)
    )


def is_short_of_memory(lines: Sequence[str]) -> bool:
    """Tell from llama.cpp's log whether memory ran out."""
    return any(OUT_OF_MEMORY.search(line) for line in lines)
