"""Whether caches and compute buffers fit this machine's memory, which the system finds out late.

Linux gives a program more memory than there is, and kills it when it uses that. Mapped weights are
not counted: they may be larger than the memory, and the disk then gives them again and again.
"""

from __future__ import annotations

from dataclasses import replace

from qdraft.errors import HostMemoryError
from qdraft.gguf.facts import Facts
from qdraft.host import MemoryBound, address_bound, memory_bound
from qdraft.llama.devices import devices
from qdraft.llama.params import EngineParams
from qdraft.llama.placed import CPU, Share
from qdraft.llama.spec import Both, ModelSpec
from qdraft.placement.needs import dry_run

_GIB = 2**30
_N_CTX_STEP = 256
# A machine with so many times what a simple model would need is not worth asking llama.cpp.
_AMPLE = 4
_N_STATES = 64  # recurrent states that a context holds: of its texts, and of tokens before


def default_margin(n_bytes: int) -> int:
    """Return the bytes to leave free for what nobody counts: 8 %, at most 1 GiB."""
    return min(_GIB, n_bytes * 8 // 100)


def require_memory(models: Both[ModelSpec], facts: Both[Facts]) -> None:
    """Raise HostMemoryError if caches and compute buffers on this machine do not fit its memory.

    The limits of control groups and of `ulimit -v` count; under the latter mapped weights do too.
    """
    memory, addresses = memory_bound(), address_bound()
    rough = sum(_rough_need(model, of) for model, of in models.zip(facts))
    mapped = sum({of.path: of.n_bytes for of in facts}.values())
    ample = memory is None or _AMPLE * rough <= memory.n_bytes
    if ample and (addresses is None or _AMPLE * rough + mapped <= addresses.n_bytes):
        return
    need = buffers_on_host(models)
    for bound, beside in ((memory, 0), (addresses, mapped)):
        if bound and need + beside > bound.n_bytes:
            raise HostMemoryError(
                f"{_describe(models)} need {need / _GIB:.2f} GiB of memory at a context of "
                f"{_n_ctx(models.target, facts.target)} tokens{_beside(beside)}, but {bound}",
                hint=_what_fits(models, facts, need, bound, mapped),
            )


def buffers_on_host(models: Both[ModelSpec]) -> int:
    """Return the bytes of this machine's memory for all but mapped weights, by llama.cpp.

    Locked weights count: they have to be in memory.
    """
    unified = {device.name for device in devices() if device.unified}
    total = 0
    for model in models:
        shares = dry_run(model.path, model.params).shares
        on_cpu = shares.get(CPU, Share())
        total += on_cpu.kv + on_cpu.state + on_cpu.compute
        total += 0 if _is_mapped(model) else on_cpu.weights
        total += sum(share.total for name, share in shares.items() if name in unified)
    return total


def _rough_need(model: ModelSpec, facts: Facts) -> int:
    """Return the bytes for 32-bit cells as wide as the model, for states, and for all scores."""
    if not facts.n_layers or not facts.n_embd:
        return 2**60
    params, n_ctx = model.params, _n_ctx(model, facts)
    weights = 0 if _is_mapped(model) else facts.n_bytes
    cells = 8 * n_ctx * facts.n_layers * facts.n_embd
    scores = 4 * n_ctx * params.physical_batch * (facts.n_head or 1)
    return weights + cells + scores + _N_STATES * facts.state_bytes + _GIB // 4


def _is_mapped(model: ModelSpec) -> bool:
    return model.params.load_mode in ("auto", "mmap")


def _n_ctx(model: ModelSpec, facts: Facts) -> int:
    return model.params.context_size(facts.n_ctx_train or 0)


def _describe(models: Both[ModelSpec]) -> str:
    if all(map(_is_mapped, models)):
        return "caches and compute buffers"
    return "caches, compute buffers and weights that are not mapped"


def _beside(mapped: int) -> str:
    return f" beside {mapped / _GIB:.2f} GiB of mapped weights" if mapped else ""


def _what_fits(
    models: Both[ModelSpec], facts: Both[Facts], need: int, bound: MemoryBound, mapped: int
) -> str:
    """Return a hint that names the largest context that fits.

    What is needed grows evenly with the context, so half of it shows how much a token takes.
    """
    n_ctx = _n_ctx(models.target, facts.target)
    half = max(_N_CTX_STEP, n_ctx // 2)
    room = bound.n_bytes - default_margin(bound.n_bytes)
    if half < n_ctx:
        of_half = buffers_on_host(_with_context(models, facts, half))
        per_token = max(1.0, (need - of_half) / (n_ctx - half))
        for left in (room - mapped, room):  # better with the weights in memory too
            n_tokens = int((left - of_half) / per_token) + half
            n_tokens = min(n_tokens, facts.target.n_ctx_train or n_tokens)
            if n_tokens >= _N_CTX_STEP:
                n_tokens -= n_tokens % _N_CTX_STEP
                return f"use -c {n_tokens}, which fits, or smaller cache types (-ctk, -ctv)"
    return "free memory, or use smaller cache types (-ctk, -ctv) or physical batches (-ub)"


def _with_context(models: Both[ModelSpec], facts: Both[Facts], n_ctx: int) -> Both[ModelSpec]:
    """Return the models with another context; a draft with a context of its own keeps that."""
    of_target = _n_ctx(models.target, facts.target)

    def resized(model: ModelSpec, of: Facts) -> ModelSpec:
        own = _n_ctx(model, of)
        params: EngineParams = replace(model.params, n_ctx=n_ctx if own == of_target else own)
        return replace(model, params=params)

    target = resized(models.target, facts.target)
    draft = resized(models.draft, facts.draft) if models.draft and facts.draft else None
    return Both(target, draft)
