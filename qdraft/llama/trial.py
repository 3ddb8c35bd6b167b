"""The first load of a file, tried in a child process: llama.cpp ends a process on some files.

It asserts what a header should say, and throws exceptions that no Python program can catch. Before
this process loads a file that is new on this machine, a child loads it and makes a small context.
It loads a small file with its weights, and decodes a few tokens; of a large one, it loads
vocabulary, sizes and shapes. qdraft stores the answer for the header and this build of llama.cpp,
so that a file costs one trial.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import logging
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

from qdraft.errors import EngineError, ModelFileError
from qdraft.gguf.facts import require_model_parts
from qdraft.host import default_threads
from qdraft.llama.child import command
from qdraft.llama.logs import OUT_OF_MEMORY
from qdraft.llama.native import build_id, lib
from qdraft.llama.native import log as native_log
from qdraft.paths import cache_dir, new_file

log = logging.getLogger(__name__)

_TIMEOUT_S = 300
_SMALL = 1 << 30  # bytes; a larger file is not decoded, as reading it can take minutes
_DONE = "done"
_PLACE = re.compile(r"\S*[/\\](?=[\w.-]+:\d+: )")  # folders of the machine that built llama.cpp
_N_DECODED = 4  # tokens
# Signals by which other programs end a child, or the system for want of memory.
_FROM_OUTSIDE = (signal.SIGINT, signal.SIGTERM, getattr(signal, "SIGKILL", 9))


def require_loadable(path: Path) -> None:
    """Raise ModelFileError unless ``path`` is a model that llama.cpp survives loading.

    Raises what ``require_model`` raises.
    """
    headers = require_model_parts(path)
    is_small = sum(header.n_bytes for header in headers) <= _SMALL
    key = "\n".join((build_id(), f"{is_small}", *(header.sha256 for header in headers)))
    digest = hashlib.sha256(key.encode()).hexdigest()[:24]
    store = cache_dir() / "loads" / f"{digest}.json"
    reason = _read(store)
    if reason is None:
        reason = _try(headers[0].path, decodes=is_small)
        _save(store, reason)
    if reason:
        raise ModelFileError(
            f"{path} does not load: llama.cpp crashes: {reason}",
            hint="use another file of the model, or another release of llama-cpp-python",
        )


def _try(path: Path, *, decodes: bool) -> str:
    """Load in a child; return llama.cpp's last words if it crashes, else ``""``.

    A refusal with a reason is not a crash: the load of this process meets it again and reports it.
    Raises ModelFileError if the child does not end, and EngineError if it does not start, is ended
    from outside, or is out of memory.
    """
    log.debug("trying once in a child process whether llama.cpp loads %s", path)
    environment = {**os.environ, "GGML_NO_BACKTRACE": "1"}
    try:
        child = subprocess.run(
            command(__name__, str(path), *(["decode"] if decodes else [])),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env=environment,
            timeout=_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        raise ModelFileError(
            f"{path} does not load: llama.cpp was not done after {_TIMEOUT_S} s"
        ) from None
    if child.stdout.strip() == _DONE.encode():
        return ""
    stderr = child.stderr.decode("utf-8", "replace")
    words = last_words(stderr)
    if child.returncode == 1:  # of Python
        raise EngineError(f"the trial load of {path} fails: {words}")
    if -child.returncode in _FROM_OUTSIDE or OUT_OF_MEMORY.search(stderr) or "bad_alloc" in stderr:
        raise EngineError(
            f"the trial load of {path} was ended by signal {-child.returncode}",
            hint="try again with more free memory",
        )
    return words or f"signal {-child.returncode}"


def last_words(stderr: str) -> str:
    """Return the line on which llama.cpp aborted, or what an exception says, else ``""``."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    of_abort = [line for line in lines if _PLACE.search(line) or line.startswith("what():")]
    line = (of_abort or lines or [""])[-1]
    return _PLACE.sub("", line.removeprefix("what():").strip())[:300]


def _read(store: Path) -> str | None:
    """Return the stored answer; None if there is none or the file is damaged."""
    try:
        reason = json.loads(store.read_text(encoding="utf-8"))["crash"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return reason if isinstance(reason, str) else None


def _save(store: Path, reason: str) -> None:
    try:
        with new_file(store) as part:
            part.write_text(json.dumps({"crash": reason}), encoding="utf-8")
    except OSError as error:
        log.debug("%s cannot be written: %s", store, error.strerror)


def _show_memory(record: logging.LogRecord) -> bool:
    """Print what llama.cpp logs of memory; this is a filter that lets no line through."""
    message = record.getMessage()
    if OUT_OF_MEMORY.search(message):
        print(message, file=sys.stderr, flush=True)
    return False


def _write_no_core() -> None:
    if os.name == "posix":
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def main(args: list[str]) -> int:
    """Run the child: load the file that ``args`` name on the CPU, and decode if they say so."""
    _write_no_core()
    native_log.setLevel(logging.DEBUG)
    native_log.addFilter(_show_memory)
    llama = lib()
    params = llama.llama_model_default_params()
    no_devices = (ctypes.c_void_p * 1)(None)
    params.devices = ctypes.addressof(no_devices)
    params.n_gpu_layers = 0
    params.use_extra_bufts = False  # repacked weights have a probe of their own
    decodes = "decode" in args[1:]
    if not decodes:
        params.no_alloc = True
        params.load_mode = llama.LLAMA_LOAD_MODE_NONE
    model = llama.llama_model_load_from_file(os.fsencode(args[0]), params)
    if model:
        context_params = llama.llama_context_default_params()
        context_params.n_ctx = 256
        context_params.n_threads = context_params.n_threads_batch = default_threads()
        context_params.n_seq_max = 2
        context_params.kv_unified = True
        context_params.swa_full = True
        context = llama.llama_init_from_model(model, context_params)
        if context and decodes:
            tokens = (llama.llama_token * _N_DECODED)()  # zeros
            llama.llama_decode(context, llama.llama_batch_get_one(tokens, _N_DECODED))
    print(_DONE, flush=True)
    return 0
