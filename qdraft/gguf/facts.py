"""What a GGUF file is: the facts of its header, and those that its file type hides."""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from qdraft.errors import ModelFileError
from qdraft.gguf.header import Header, LongArray, Value, read_header

_SPLIT = re.compile(r"^(?P<stem>.*)-(?P<no>\d{5})-of-(?P<n>\d{5})\.gguf$")
_RECURRENT = frozenset(
    [
        "mamba",
        "mamba2",
        "rwkv6",
        "rwkv7",
        "rwkv6qwen2",
        "arwkv7",
        "falcon-h1",
        "jamba",
        "granitehybrid",
        "nemotron_h",
        "nemotron_h_moe",
        "plamo2",
        "lfm2",
        "lfm2moe",
        "qwen3next",
        "qwen35",
        "qwen35moe",
        "kimi-linear",
    ]
)
_RECURRENT_KEYS = ("ssm.state_size", "ssm.conv_kernel", "shortconv.l_cache", "wkv.head_size")
_EMBEDDING = frozenset(
    [
        "bert",
        "nomic-bert",
        "nomic-bert-moe",
        "jina-bert-v2",
        "jina-bert-v3",
        "t5encoder",
        "gemma-embedding",
        "neo-bert",
        "modern-bert",
        "eurobert",
    ]
)
KINDS = {
    "embedding": "an embedding model",
    "projector": "a projector for images or sound (mmproj)",
    "adapter": "a LoRA adapter",
    "imatrix": "an importance matrix",
}
_TYPE_OF_FILE = re.compile(r"^(I?Q\d+|TQ\d|F16|F32|BF16|MXFP4)")


@dataclass(frozen=True, slots=True)
class Facts:
    """The facts of one model, all of its parts together; None if the file does not say."""

    path: Path
    kind: str  # model, embedding, projector, adapter, imatrix
    name: str
    architecture: str
    n_parameters: int
    n_bytes: int
    n_layers: int | None
    n_embd: int | None
    n_ff: int | None
    n_head: int | None
    n_head_kv: int | None
    n_ctx_train: int | None
    sliding_window: int | None
    n_experts: int | None
    n_experts_used: int | None
    recurrent: bool
    vocabulary: str
    n_vocab: int | None
    tokens_sha256: str
    special: dict[str, int]
    add_bos: bool | None
    chat_template: str
    rope: dict[str, Value]
    file_type: str
    bits_per_weight: float
    types: dict[str, tuple[int, int]]  # by tensor type: how many tensors, and their bytes
    in_name_only: str
    parts: tuple[Path, ...]


def read_facts(path: Path) -> Facts:
    """Read the facts of a file, or of all parts of a split model if ``path`` is any of them.

    Raises ModelFileError if a file is damaged or a part is missing.
    """
    headers = [read_header(part) for part in parts_of(path)]
    head = headers[0]
    tensors = [tensor for header in headers for tensor in header.tensors]
    architecture = head.text("general.architecture")

    def number(key: str) -> int | None:
        return head.number(f"{architecture}.{key}")

    types: dict[str, tuple[int, int]] = {}
    for tensor in tensors:
        n, size = types.get(tensor.type, (0, 0))
        types[tensor.type] = (n + 1, size + (tensor.n_bytes or 0))
    types = dict(sorted(types.items(), key=lambda item: -item[1][1]))
    n_parameters = sum(tensor.n_elements for tensor in tensors)
    n_weight_bytes = sum(size for _, size in types.values())
    tokens = head.metadata.get("tokenizer.ggml.tokens")
    matrices = Counter(tensor.type for tensor in tensors if len(tensor.shape) > 1)
    file_type = _file_type(head)
    add_bos = head.metadata.get("tokenizer.ggml.add_bos_token")
    return Facts(
        path=headers[0].path,
        kind=_kind(head, architecture),
        name=head.text("general.name"),
        architecture=architecture,
        n_parameters=n_parameters,
        n_bytes=sum(header.n_bytes for header in headers),
        n_layers=number("block_count"),
        n_embd=number("embedding_length"),
        n_ff=number("feed_forward_length"),
        n_head=number("attention.head_count"),
        n_head_kv=number("attention.head_count_kv"),
        n_ctx_train=number("context_length"),
        sliding_window=number("attention.sliding_window"),
        n_experts=number("expert_count"),
        n_experts_used=number("expert_used_count"),
        recurrent=architecture in _RECURRENT
        or any(f"{architecture}.{key}" in head.metadata for key in _RECURRENT_KEYS),
        vocabulary=head.text("tokenizer.ggml.model"),
        n_vocab=_length(tokens) or number("vocab_size"),
        tokens_sha256=tokens.sha256 if isinstance(tokens, LongArray) else repr(tokens or ""),
        special={
            key.removeprefix("tokenizer.ggml.").removesuffix("_token_id"): value
            for key, value in head.metadata.items()
            if key.endswith("_token_id") and isinstance(value, int)
        },
        add_bos=add_bos if isinstance(add_bos, bool) else None,
        chat_template=head.text("tokenizer.chat_template"),
        rope={
            key.removeprefix(f"{architecture}."): _finite(value)
            for key, value in head.metadata.items()
            if key.startswith(f"{architecture}.rope.")
        },
        file_type=file_type,
        bits_per_weight=8 * n_weight_bytes / n_parameters if n_parameters else 0.0,
        types=types,
        in_name_only=_in_name_only(file_type, matrices),
        parts=tuple(header.path for header in headers),
    )


def require_model(path: Path) -> Facts:
    """Read the facts of a language model.

    Their ``path`` is the file that llama.cpp loads: of a split model, the first part. Raises
    ModelFileError if the file is damaged or not a language model.
    """
    facts = read_facts(path)
    if facts.kind != "model":
        raise ModelFileError(f"{path} is {KINDS[facts.kind]}, not a language model")
    return facts


def parts_of(path: Path) -> list[Path]:
    """Return all parts of a split model in order if ``path`` is any of them, else the file alone.

    Raises ModelFileError that lists the missing parts.
    """
    split = _SPLIT.match(path.name)
    if not split:
        return [path]
    n = int(split["n"])
    if not 1 <= int(split["no"]) <= n:
        raise ModelFileError(f"{path} cannot be part {int(split['no'])} of {n}, as its name says")
    names = [f"{split['stem']}-{i:05}-of-{n:05}.gguf" for i in range(1, n + 1)]
    missing = [name for name in names if not path.with_name(name).is_file()]
    if missing:
        shown = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if missing[3:] else "")
        raise ModelFileError(f"{path} is one of {n} parts, of which {shown} are missing")
    return [path.with_name(name) for name in names]


def _kind(head: Header, architecture: str) -> str:
    kind = head.text("general.type")
    if kind == "imatrix" or any(t.name.endswith(".in_sum2") for t in head.tensors):
        return "imatrix"
    if kind == "adapter" or any(t.name.endswith((".lora_a", ".lora_b")) for t in head.tensors):
        return "adapter"
    if kind == "mmproj" or architecture == "clip":
        return "projector"
    return "embedding" if architecture in _EMBEDDING else "model"


def _file_type(head: Header) -> str:
    from gguf import LlamaFileType

    try:
        name: str = LlamaFileType(head.number("general.file_type") or 0).name
    except ValueError:
        return "unknown"
    has_type = "general.file_type" in head.metadata
    return name.removeprefix("MOSTLY_").removeprefix("ALL_") if has_type else "unknown"


def _in_name_only(file_type: str, matrices: Counter[str]) -> str:
    """Return a sentence if few matrices have the type in the file's name, else ``""``."""
    match = _TYPE_OF_FILE.match(file_type)
    n = sum(matrices.values())
    if not match or not n:
        return ""
    base = match[1]
    n_of = sum(count for kind, count in matrices.items() if kind.startswith(base))
    if n_of >= n / 4:
        return ""
    most = matrices.most_common(1)[0]
    return f"{file_type} in name only: {n_of} of {n} matrices are {base}, {most[1]} are {most[0]}"


def _finite(value: Value) -> Value:
    """Turn an infinity into text, because JSON has none."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _length(value: Value | None) -> int | None:
    if isinstance(value, LongArray):
        return value.n
    return len(value) if isinstance(value, tuple) else None
