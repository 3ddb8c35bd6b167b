"""Ask llama.cpp how much memory a model needs, without loading its weights."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from qdraft.gguf.header import Header
from qdraft.gguf.parts import read_parts
from qdraft.gguf.state import recurrent_state
from qdraft.llama.context import LlamaContext
from qdraft.llama.devices import devices
from qdraft.llama.logs import CACHE_SIZE
from qdraft.llama.model import LlamaModel
from qdraft.llama.params import ALL_LAYERS, MAX_N_CTX, EngineParams
from qdraft.llama.placed import CPU, Placed, Share, chosen_devices, read_back, states_of
from qdraft.placement.choose import Needs

_MIB = 2**20
LAYER_NAME = re.compile(r"blk\.(\d+)\.")


def measure_needs(path: Path, params: EngineParams) -> Needs:
    """Return the bytes that a model needs, layer by layer, if it is loaded with ``params``.

    The sizes of weights are those in the file. llama.cpp reports those of its caches and compute
    buffers, for the wanted context and for another. Raises what loading raises.
    """
    wanted = params.on_cpu()
    if chosen_devices(params):
        wanted = replace(params, n_gpu_layers=ALL_LAYERS, tensor_split=())
    model = LlamaModel(path, wanted, dry=True)
    try:
        context = LlamaContext(model, wanted)
        n_ctx, compute = context.n_ctx, _compute(context.placed)
        cache, kept = _cache(context.lines), states_of(context.lines)
        context.close()
        other = LlamaContext(model, replace(wanted, n_ctx=_another(n_ctx)))
        of_other = _compute(other.placed)
        other.close()
    finally:
        model.close()
    headers = read_parts(path)
    weights, rest = weights_by_layer([*headers, *_of_adapters(params)])
    n = len(weights) - 1
    of_kv, of_state = _cache_shares(headers, n)
    near = params.kv_offload  # else caches and states stay away from the layers
    return Needs(
        n_ctx,
        tuple(weights),
        kv=(*(round(near * cache * share) for share in of_kv), 0),
        input=rest,
        compute=compute,
        compute_per_token=max(0.0, (of_other - compute) / (_another(n_ctx) - n_ctx)),
        tied=is_tied(headers),
        kv_on_cpu=0 if near else cache,
        state=(*(round(near * kept.n_bytes * share) for share in of_state), 0),
        state_on_cpu=0 if near else kept.n_bytes,
        states=kept,
    )


def _another(n_ctx: int) -> int:
    """Return a context size whose buffers show how those of ``n_ctx`` tokens grow."""
    return 2 * n_ctx if 2 * n_ctx <= MAX_N_CTX else n_ctx // 2


def dry_run(path: Path, params: EngineParams) -> Placed:
    """Return where llama.cpp would put a model, with the bytes of each part, also of weights."""
    model = LlamaModel(path, params, dry=True)
    try:
        context = LlamaContext(model, params)
        placed = read_back(context.lines, devices())
        cache, states = _cache(context.lines), states_of(context.lines).n_bytes
        context.close()
    finally:
        model.close()
    headers = read_parts(path)
    weights, rest = weights_by_layer([*headers, *_of_adapters(params)])
    empty = {"weights": 0, "kv": 0, "state": 0}
    shares = {name: replace(share, **empty) for name, share in placed.shares.items()}
    shares.setdefault(CPU, Share())
    of_kv, of_state = _cache_shares(headers, len(weights) - 1)
    for i, device in enumerate(placed.layers):
        is_counted = device == CPU and i == len(weights) - 1 and is_tied(headers)
        share = shares[device]
        shares[device] = replace(share, weights=share.weights + (0 if is_counted else weights[i]))
        if i == len(weights) - 1:  # the output has no cache
            continue
        holder = device if params.kv_offload else CPU
        held = shares[holder]
        kv, state = round(cache * of_kv[i]), round(states * of_state[i])
        shares[holder] = replace(held, kv=held.kv + kv, state=held.state + state)
    shares[CPU] = replace(shares[CPU], weights=shares[CPU].weights + rest)
    return replace(placed, shares=shares)


def _of_adapters(params: EngineParams) -> list[Header]:
    """Return the headers of the LoRA adapters, whose tensors are named after those they change."""
    return [header for name, _ in params.lora for header in read_parts(Path(name))]


def weights_by_layer(headers: list[Header]) -> tuple[list[int], int]:
    """Return the bytes of each layer, the output last, and of the tensors that stay on the CPU.

    An output that is the embedding matrix itself counts twice, because a device gets a copy.
    """
    layers: dict[int, int] = {}
    output = rest = 0
    for tensor in (tensor for header in headers for tensor in header.tensors):
        size = tensor.n_bytes or 0
        if match := LAYER_NAME.match(tensor.name):
            layers[int(match[1])] = layers.get(int(match[1]), 0) + size
        elif tensor.name.startswith("output"):
            output += size
        else:
            rest += size
        if tensor.name == "token_embd.weight" and is_tied(headers):
            output += size
    return [*(layers.get(i, 0) for i in range(max(layers, default=-1) + 1)), output], rest


def span_of(path: Path, placed: Placed, device: str) -> int:
    """Return the bytes from the first to the last tensor that a device uses, over all parts."""
    total = 0
    headers = read_parts(path)
    for header in headers:
        places = [
            (tensor.offset, tensor.offset + (tensor.n_bytes or 0))
            for tensor in header.tensors
            if _is_used(tensor.name, placed, device, tied=is_tied(headers))
        ]
        total += max((end for _, end in places), default=0)
        total -= min((start for start, _ in places), default=0)
    return total


def _is_used(name: str, placed: Placed, device: str, *, tied: bool) -> bool:
    """Tell whether that device uses this tensor."""
    if match := LAYER_NAME.match(name):
        return placed.layers[int(match[1])] == device
    of_output = name.startswith("output") or (tied and name == "token_embd.weight")
    if of_output and placed.layers[-1] == device:
        return True
    return not name.startswith("output") and device == CPU


def is_tied(headers: list[Header]) -> bool:
    """Tell whether the output is the embedding matrix itself."""
    names = {tensor.name for header in headers for tensor in header.tensors}
    return "output.weight" not in names


def _cache_shares(headers: list[Header], n_layers: int) -> tuple[list[float], list[float]]:
    """Return the share of each layer in the KV cache, and its share in the recurrent states.

    Layers differ in KV cells by their KV heads if the file lists them. A layer with a state has no
    cells, except in models whose layers have both.
    """
    architecture = headers[0].text("general.architecture")
    state = recurrent_state(headers)
    with_state = [float(state is not None and i in state.layers) for i in range(n_layers)]
    heads = headers[0].metadata.get(f"{architecture}.attention.head_count_kv")
    cells = [float(n) for n in heads] if isinstance(heads, tuple) else []  # type: ignore[arg-type]
    if len(cells) != n_layers or not sum(cells):
        both = state is not None and state.beside_attention
        cells = [1.0 if both else 1.0 - of_layer for of_layer in with_state]
    return _normalized(cells), _normalized(with_state)


def _normalized(values: list[float]) -> list[float]:
    return [value / (sum(values) or 1.0) for value in values]


def _cache(lines: list[str]) -> int:
    """Return the bytes of all KV caches, from llama.cpp's log."""
    return round(_MIB * sum(float(m[1]) for line in lines if (m := CACHE_SIZE.search(line))))


def _compute(placed: Placed) -> int:
    """Return the bytes of compute buffers: the most of any device, or else the CPU's."""
    on_devices = [share.compute for name, share in placed.shares.items() if name != CPU]
    return max(on_devices) if on_devices else placed.shares[CPU].compute
