"""The recurrent state of a model: which layers have one, and how large it is.

The sizes are those of n_embd_r and n_embd_s in llama.cpp's llama-hparams.cpp, in F32, as of
llama-cpp-python 0.3.36.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from qdraft.gguf.header import Header

_F32 = 4  # bytes
_LAYER = re.compile(r"^blk\.(\d+)\.(?:ssm_|time_mix_|shortconv\.|attn_norm_2\.)")
# Lightning attention (minimax-01) shows by a second norm, which other models have for other ends.
_SECOND_NORM, _WITH_SECOND_NORM = ".attn_norm_2.", "minimax-01"
_BOTH = "falcon-h1"  # its layers have attention beside a state
_TOKEN_SHIFTS = 2  # of RWKV, if the file does not say


@dataclass(frozen=True, slots=True)
class RecurrentState:
    """The layers that have a recurrent state, and the bytes of one text's state in each of them.

    ``beside_attention`` is True if these layers have KV cells too.
    """

    layers: tuple[int, ...]
    layer_bytes: int
    beside_attention: bool = False

    @property
    def n_bytes(self) -> int:
        """Bytes of the state of one text."""
        return len(self.layers) * self.layer_bytes


def recurrent_state(headers: Sequence[Header]) -> RecurrentState | None:
    """Return the state of a model, given the headers of all its parts; None if it has none."""
    architecture = headers[0].text("general.architecture")
    layers = {
        int(match[1])
        for header in headers
        for tensor in header.tensors
        if (match := _LAYER.match(tensor.name))
        and (_SECOND_NORM not in tensor.name or architecture == _WITH_SECOND_NORM)
    }
    if not layers:
        return None
    size = _F32 * _n_values(headers[0], architecture)
    return RecurrentState(tuple(sorted(layers)), size, architecture == _BOTH)


def _n_values(head: Header, architecture: str) -> int:
    """Return the values that a layer keeps of one text: of its convolution, and of its memory."""

    def number(key: str, default: int = 0) -> int:
        value = head.number(f"{architecture}.{key}")
        return default if value is None else value

    n_embd, n_head = number("embedding_length"), number("attention.head_count")
    kernel = max(0, number("ssm.conv_kernel") - 1)
    if head_size := number("wkv.head_size"):
        return number("token_shift_count", _TOKEN_SHIFTS) * n_embd + n_embd * head_size
    if n_cached := number("shortconv.l_cache"):
        return n_embd * (n_cached - 1)
    if head_size := number("kda.head_dim"):
        return (3 * kernel + head_size) * head_size * n_head
    if architecture == _WITH_SECOND_NORM:
        head_size = number("attention.key_length", n_embd // max(1, n_head))
        return head_size * head_size * n_head
    n_inner, n_state = number("ssm.inner_size"), number("ssm.state_size")
    return kernel * (n_inner + 2 * number("ssm.group_count") * n_state) + n_state * n_inner
