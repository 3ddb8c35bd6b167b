"""GGUF files with random weights: kinds of models of which no small real one installs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import gguf
import numpy as np

TOKENS = ["<s>", "</s>", *[chr(97 + i) for i in range(26)]]
N_EMBD, N_FF, N_HEAD, N_HEAD_KV, HEAD = 64, 128, 4, 2, 16
Shapes = dict[str, tuple[int, ...]]


def zeros(
    path: Path,
    tokens: Sequence[str],
    unused: Sequence[int] = (),
    eos: int = 1,
    control: Sequence[int] = (),
    *,
    tokenizer: tuple[str, str] = ("gpt2", "gpt-2"),
    template: str = "",
    flags: Mapping[str, bool] = MappingProxyType({}),
) -> Path:
    """A llama model of zeros with a vocabulary of these tokens; ``tokenizer`` is model and pre."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(32)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model(tokenizer[0])
    writer.add_tokenizer_pre(tokenizer[1])
    writer.add_token_list(list(tokens))
    if tokenizer[0] == "llama":
        writer.add_token_scores([0.0] * len(tokens))
    kinds = [gguf.TokenType.NORMAL for _ in tokens]
    for i in unused:
        kinds[i] = gguf.TokenType.UNUSED
    for i in control:
        kinds[i] = gguf.TokenType.CONTROL
    writer.add_token_types(kinds)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(eos)
    for name, flag in flags.items():
        writer.add_bool(f"tokenizer.ggml.{name}_token", flag)
    if template:
        writer.add_chat_template(template)
    square = np.zeros((32, 32), dtype=np.float32)
    writer.add_tensor("token_embd.weight", np.zeros((len(tokens), 32), dtype=np.float32))
    writer.add_tensor("output_norm.weight", np.ones(32, dtype=np.float32))
    for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
        writer.add_tensor(f"blk.0.{name}.weight", square)
    for name in ("attn_norm", "ffn_norm"):
        writer.add_tensor(f"blk.0.{name}.weight", np.ones(32, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


LLAMA_TENSORS = ("token_embd.weight", "output_norm.weight", "blk.0.attn_q.weight")


def header(
    path: Path,
    architecture: str = "llama",
    keys: Mapping[str, object] = MappingProxyType({}),
    tensors: Sequence[str] = LLAMA_TENSORS,
    tokens: Sequence[str] | None = TOKENS,
) -> Path:
    """A file with this header, whose weights make no model; ``tokens`` None: no tokenizer."""
    writer = gguf.GGUFWriter(path, architecture)
    if tokens is not None:
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list(list(tokens))
    add = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }
    for key, value in keys.items():
        add[type(value)](key, value)  # type: ignore[operator]
    for name in tensors:
        writer.add_tensor(name, np.zeros((2, 32), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def part(path: Path, no: int, n: int, n_tensors: int = 3) -> Path:
    """Part ``no``, counted from 0, of a model of ``n_tensors`` tensors; up to 3 parts have one."""
    split = {"split.no": no, "split.count": n, "split.tensors.count": n_tensors}
    return header(path, keys=split, tensors=LLAMA_TENSORS[no : no + 1])


def mamba(path: Path) -> Path:
    """A recurrent model."""
    n_embd, n_inner, n_state, n_conv, rank = 32, 64, 16, 4, 2
    writer = gguf.GGUFWriter(path, "mamba")
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(n_embd)
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_ssm_conv_kernel(n_conv)
    writer.add_ssm_inner_size(n_inner)
    writer.add_ssm_state_size(n_state)
    writer.add_ssm_time_step_rank(rank)
    shapes: Shapes = {
        "token_embd.weight": (len(TOKENS), n_embd),
        "output_norm.weight": (n_embd,),
        "blk.0.attn_norm.weight": (n_embd,),
        "blk.0.ssm_in.weight": (2 * n_inner, n_embd),
        "blk.0.ssm_conv1d.weight": (n_inner, n_conv),
        "blk.0.ssm_conv1d.bias": (n_inner,),
        "blk.0.ssm_x.weight": (rank + 2 * n_state, n_inner),
        "blk.0.ssm_dt.weight": (n_inner, rank),
        "blk.0.ssm_dt.bias": (n_inner,),
        "blk.0.ssm_a": (n_inner, n_state),
        "blk.0.ssm_d": (n_inner,),
        "blk.0.ssm_out.weight": (n_embd, n_inner),
    }
    rng = np.random.default_rng(0)
    values = {
        name: -np.ones(shape) if name.endswith("ssm_a") else rng.normal(size=shape)
        for name, shape in shapes.items()
    }
    return _write(writer, values)


def mixture(path: Path, *, n_expert: int = 4, n_used: int = 2) -> Path:
    """A mixture of experts, of llama architecture; its weights differ from token to token."""
    writer = _transformer(path, "llama", n_ctx=256)
    writer.add_expert_count(n_expert)
    writer.add_expert_used_count(n_used)
    shapes: Shapes = {"token_embd.weight": (len(TOKENS), N_EMBD), "output_norm.weight": (N_EMBD,)}
    for i in range(2):
        shapes |= attention(i)
        shapes |= {
            f"blk.{i}.ffn_norm.weight": (N_EMBD,),
            f"blk.{i}.ffn_gate_inp.weight": (n_expert, N_EMBD),
            f"blk.{i}.ffn_gate_exps.weight": (n_expert, N_FF, N_EMBD),
            f"blk.{i}.ffn_up_exps.weight": (n_expert, N_FF, N_EMBD),
            f"blk.{i}.ffn_down_exps.weight": (n_expert, N_EMBD, N_FF),
        }
    return _write(writer, random_values(shapes))


def windowed(
    path: Path, *, window: int = 32, n_ctx: int = 512, seed: int = 1, rotated: int = HEAD
) -> Path:
    """A model with sliding-window attention, of gemma3 architecture."""
    writer = _transformer(path, "gemma3", n_ctx=n_ctx, rotated=rotated)
    writer.add_sliding_window(window)
    shapes: Shapes = {
        "token_embd.weight": (len(TOKENS), N_EMBD),
        "output.weight": (len(TOKENS), N_EMBD),  # not the embedding, or each token predicts itself
        "output_norm.weight": (N_EMBD,),
    }
    for i in range(2):
        shapes |= attention(i)
        shapes |= {
            f"blk.{i}.attn_q_norm.weight": (HEAD,),
            f"blk.{i}.attn_k_norm.weight": (HEAD,),
            f"blk.{i}.post_attention_norm.weight": (N_EMBD,),
            f"blk.{i}.ffn_norm.weight": (N_EMBD,),
            f"blk.{i}.ffn_gate.weight": (N_FF, N_EMBD),
            f"blk.{i}.ffn_up.weight": (N_FF, N_EMBD),
            f"blk.{i}.ffn_down.weight": (N_EMBD, N_FF),
            f"blk.{i}.post_ffw_norm.weight": (N_EMBD,),
        }
    return _write(writer, random_values(shapes, seed))


def adapter(
    path: Path, architecture: str = "gemma3", *, strength: float = 1.0, width: int = N_EMBD
) -> Path:
    """A LoRA adapter of rank 4 for the feed-forward and attention outputs of ``windowed``."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", 4.0)
    rng = np.random.default_rng(9)
    for i in range(2):
        for name, n_in in (("ffn_down", N_FF), ("attn_output", N_HEAD * HEAD)):
            for side, shape in (("a", (4, n_in)), ("b", (width, 4))):
                values = strength * rng.normal(size=shape).astype(np.float32)
                writer.add_tensor(f"blk.{i}.{name}.weight.lora_{side}", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _transformer(
    path: Path, architecture: str, *, n_ctx: int, rotated: int = HEAD
) -> gguf.GGUFWriter:
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(2)
    writer.add_context_length(n_ctx)
    writer.add_embedding_length(N_EMBD)
    writer.add_feed_forward_length(N_FF)
    writer.add_head_count(N_HEAD)
    writer.add_head_count_kv(N_HEAD_KV)
    writer.add_key_length(HEAD)
    writer.add_value_length(HEAD)
    writer.add_rope_dimension_count(rotated)
    writer.add_layer_norm_rms_eps(1e-5)
    return writer


def attention(i: int) -> Shapes:
    """The shapes of the attention tensors of layer ``i``."""
    return {
        f"blk.{i}.attn_norm.weight": (N_EMBD,),
        f"blk.{i}.attn_q.weight": (N_HEAD * HEAD, N_EMBD),
        f"blk.{i}.attn_k.weight": (N_HEAD_KV * HEAD, N_EMBD),
        f"blk.{i}.attn_v.weight": (N_HEAD_KV * HEAD, N_EMBD),
        f"blk.{i}.attn_output.weight": (N_EMBD, N_HEAD * HEAD),
    }


def random_values(shapes: Shapes, seed: int = 1) -> dict[str, np.ndarray]:
    """Draw weights of these shapes; those of norms are near 1."""
    rng = np.random.default_rng(seed)
    return {
        name: 1 + 0.1 * rng.normal(size=shape)
        if "norm" in name
        else rng.normal(size=shape) * (0.1 if "embd" in name else shape[-1] ** -0.5)
        for name, shape in shapes.items()
    }


def _write(writer: gguf.GGUFWriter, values: dict[str, np.ndarray]) -> Path:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([gguf.TokenType.NORMAL] * len(TOKENS))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    for name, value in values.items():
        writer.add_tensor(name, value.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Path(writer.path)  # type: ignore[arg-type]
