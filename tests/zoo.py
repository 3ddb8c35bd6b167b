"""Tiny models with random weights of every recurrent or hybrid architecture of llama.cpp.

llama-arch.cpp lists the architectures (llm_arch_is_recurrent, llm_arch_is_hybrid). The keys of each
are those that its load_arch_hparams reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from random_model import Value, write_model

N_CTX = 4096

_ALL: dict[str, Value] = {
    "context_length": N_CTX,
    "block_count": 3,
    "embedding_length": 64,
    "feed_forward_length": 128,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.key_length": 16,
    "attention.value_length": 16,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "attention.layer_norm_epsilon": 1e-5,
    "rope.dimension_count": 16,
}
_ATTENTION_IN_THE_MIDDLE: dict[str, Value] = {"attention.head_count_kv": [0, 2, 0]}
_MAMBA: dict[str, Value] = {
    "ssm.conv_kernel": 4,
    "ssm.inner_size": 128,
    "ssm.state_size": 16,
    "ssm.time_step_rank": 4,
}
_MAMBA2: dict[str, Value] = {**_MAMBA, "ssm.time_step_rank": 8, "ssm.group_count": 2}
_DELTA_NET: dict[str, Value] = {
    "ssm.conv_kernel": 4,
    "ssm.inner_size": 64,
    "ssm.state_size": 16,
    "ssm.time_step_rank": 4,
    "ssm.group_count": 2,
    "full_attention_interval": 2,
    "rope.dimension_sections": [3, 3, 2, 0],
}
_NO_ATTENTION: dict[str, Value] = {"attention.head_count": 0, "attention.head_count_kv": 0}
_RWKV: dict[str, Value] = {"wkv.head_size": 16, "token_shift_count": 2} | _NO_ATTENTION
_RWKV6: dict[str, Value] = {**_RWKV, "time_mix_extra_dim": 8, "time_decay_extra_dim": 16}
_RWKV7: dict[str, Value] = {
    **_RWKV,
    "embedding_length": 128,
    "wkv.head_size": 64,  # ggml's kernel steps by up to 64
    "attention.decay_lora_rank": 8,
    "attention.iclr_lora_rank": 8,
    "attention.value_residual_mix_lora_rank": 8,
    "attention.gate_lora_rank": 8,
}
_LATENT: dict[str, Value] = {  # attention over a compressed latent (MLA), and delta attention (KDA)
    "attention.head_count_kv": [0, 1, 0],
    "attention.kv_lora_rank": 32,
    "attention.key_length": 48,
    "attention.value_length": 32,
    "attention.key_length_mla": 32,
    "attention.value_length_mla": 16,
    "ssm.conv_kernel": 4,
    "kda.head_dim": 16,
    "kda.gate_lower_bound": -5.0,
    "leading_dense_block_count": 1,
}
_EXPERTS: dict[str, Value] = {
    "expert_count": 4,
    "expert_used_count": 2,
    "expert_feed_forward_length": 64,
    "expert_shared_count": 1,
    "expert_shared_feed_forward_length": 64,
    "expert_gating_func": 2,
}


@dataclass(frozen=True)
class Species:
    """An architecture with the keys that a tiny model of it has beside those of all.

    ``without`` names tensors that llama.cpp takes in place of others. ``rolls_back`` says whether
    llama.cpp grants n_rs_seq (llm_arch_supports_rs_rollback).
    """

    architecture: str
    keys: Mapping[str, Value]
    without: str = ""
    rolls_back: bool = False

    def write(self, path: Path, *, seed: int = 1) -> Path:
        """Write the model of this seed."""
        keys = {**_ALL, **self.keys}
        return write_model(path, self.architecture, keys, without=self.without, seed=seed)


ZOO: dict[str, Species] = {
    "mamba": Species("mamba", _MAMBA | _NO_ATTENTION),
    "mamba2": Species("mamba2", _MAMBA2 | _NO_ATTENTION),
    "rwkv6": Species("rwkv6", _RWKV6, without=r"time_mix_lerp_[wkvrg]"),
    "rwkv6qwen2": Species(
        "rwkv6qwen2", {**_RWKV6, "token_shift_count": 1}, without="time_mix_first"
    ),
    "rwkv7": Species("rwkv7", _RWKV7),
    "arwkv7": Species("arwkv7", {**_RWKV7, "token_shift_count": 1}),
    "jamba": Species("jamba", _MAMBA | _ATTENTION_IN_THE_MIDDLE),
    "falcon-h1": Species("falcon-h1", _MAMBA2),
    "plamo2": Species("plamo2", {**_MAMBA2, "ssm.group_count": 0} | _ATTENTION_IN_THE_MIDDLE),
    "granite-hybrid": Species("granitehybrid", _MAMBA2 | _ATTENTION_IN_THE_MIDDLE),
    "granite-hybrid-moe": Species("granitehybrid", _MAMBA2 | _ATTENTION_IN_THE_MIDDLE | _EXPERTS),
    "lfm2": Species("lfm2", {"shortconv.l_cache": 3} | _ATTENTION_IN_THE_MIDDLE, rolls_back=True),
    "lfm2moe": Species(
        "lfm2moe",
        {"shortconv.l_cache": 3, "leading_dense_block_count": 1}
        | _ATTENTION_IN_THE_MIDDLE
        | _EXPERTS,
        rolls_back=True,
    ),
    "nemotron-h": Species(
        "nemotron_h",
        _MAMBA2 | {"attention.head_count_kv": [0, 2, 0], "feed_forward_length": [0, 0, 128]},
        rolls_back=True,
    ),
    "nemotron-h-moe": Species(
        "nemotron_h_moe",
        _MAMBA2
        | {"attention.head_count_kv": [0, 2, 0], "feed_forward_length": [0, 0, 128]}
        | _EXPERTS,
        rolls_back=True,
    ),
    "qwen3next": Species("qwen3next", _DELTA_NET | _EXPERTS, without="ssm_in"),
    "qwen35": Species("qwen35", _DELTA_NET, rolls_back=True),
    "qwen35moe": Species("qwen35moe", _DELTA_NET | _EXPERTS, rolls_back=True),
    "qwen4exp": Species(
        "qwen4exp",
        _DELTA_NET
        | _EXPERTS
        | {
            "hyper_connection.count": 4,
            "hyper_connection.low_rank": 8,
            "attention.indexer.head_count": 4,
            "attention.indexer.key_length": 16,
            "attention.indexer.top_k": 64,
            "attention.indexer.block_size": 4,
            "attention.indexer.local_blocks": 1,
            "attention.compress_ratios": [4, 4, 4],
        },
        rolls_back=True,
    ),
    "kimi-linear": Species("kimi-linear", _LATENT | _EXPERTS),
    "kimi-k3": Species(
        "kimi-k3",
        _LATENT
        | _EXPERTS
        | {
            "attn_res.block_size": 12,
            "activation.situ_beta": 4.0,
            "activation.situ_linear_beta": 25.0,
        },
        rolls_back=True,
    ),
    "glm5-next": Species(
        "glm5-next",
        _LATENT
        | _EXPERTS
        | {
            "attention.key_length": 32,
            "rope.dimension_count": 0,
            "attention.q_lora_rank": 32,
            "hyper_connection.count": 4,
            "hyper_connection.sinkhorn_iterations": 2,
            "hyper_connection.epsilon": 1e-6,
            "attention.indexer.head_count": 4,
            "attention.indexer.key_length": 16,
            "attention.indexer.top_k": 64,
            "attention.indexer.kpool": 4,
            "attention.indexer.kpool_select_tail": True,
        },
        rolls_back=True,
    ),
    "bailingmoe3": Species(
        "bailingmoe3", _LATENT | _EXPERTS | {"kda.safe_gate": True}, rolls_back=True
    ),
    "minimax-01": Species(
        "minimax-01",
        _EXPERTS | {"full_attention_interval": 2, "residual_scale": 1.0},
    ),
    "deepseek4": Species(
        "deepseek4",
        _EXPERTS
        | {
            "block_count": 4,
            "attention.head_count_kv": 1,
            "attention.key_length": 64,
            "attention.value_length": 64,
            "attention.q_lora_rank": 32,
            "attention.sliding_window": 32,
            "expert_gating_func": 4,
            "expert_weights_scale": 1.0,
            "expert_weights_norm": True,
            "swiglu_clamp_exp": 10.0,
            "attention.indexer.head_count": 4,
            "attention.indexer.key_length": 64,
            "attention.indexer.top_k": 64,
            "attention.output_group_count": 2,
            "attention.output_lora_rank": 16,
            "attention.compress_ratios": [0, 0, 4, 128],
            "attention.compress_rope_freq_base": 160000.0,
            "hyper_connection.count": 4,
            "hyper_connection.sinkhorn_iterations": 2,
            "hyper_connection.epsilon": 1e-6,
            "hash_layer_count": 0,
        },
        rolls_back=True,
    ),
}
