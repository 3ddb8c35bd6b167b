"""What a GGUF file is: the facts of its header, and those that its file type hides."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from qdraft.errors import ModelFileError
from qdraft.gguf.header import TOKENS, Header, LongArray, Tensor, Value
from qdraft.gguf.kind import file_kind
from qdraft.gguf.parts import read_parts
from qdraft.gguf.recommended import Recommended, read_recommended
from qdraft.gguf.state import recurrent_state

_TYPE_OF_FILE = re.compile(r"^(I?Q\d+|TQ\d|F16|F32|BF16|MXFP4|NVFP4)")


@dataclass(frozen=True, slots=True)
class Facts:
    """The facts of one model, all of its parts together; None if the file does not say."""

    path: Path
    kind: str  # the name of its FileKind
    refusal: str  # why it can be neither target nor draft, after its name; empty if it can
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
    n_recurrent_layers: int
    state_bytes: int  # of the recurrent state of one text
    vocabulary: str
    pre_tokenizer: str
    n_vocab: int | None
    tokens_sha256: str
    special: dict[str, int]
    add_bos: bool | None
    add_eos: bool | None
    chat_template: str
    rope: dict[str, Value]
    sampling: Recommended
    file_type: str
    bits_per_weight: float
    types: dict[str, tuple[int, int]]  # by tensor type: how many tensors, and their bytes
    in_name_only: str
    parts: tuple[Path, ...]


def read_facts(path: Path) -> Facts:
    """Read the facts of a file, or of all parts of a split model if ``path`` is any of them.

    Raises ModelFileError if a file is damaged or a part is missing.
    """
    return _facts(read_parts(path))


def _facts(headers: Sequence[Header]) -> Facts:
    head = headers[0]
    kind = file_kind(headers)
    state = recurrent_state(headers)
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
    tokens = head.metadata.get(TOKENS)
    matrices = [tensor for tensor in tensors if len(tensor.shape) > 1]
    file_type = _file_type(head)
    return Facts(
        path=headers[0].path,
        kind=kind.name,
        refusal=kind.refusal,
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
        recurrent=kind.recurrent,
        n_recurrent_layers=len(state.layers) if state else 0,
        state_bytes=state.n_bytes if state else 0,
        vocabulary=head.text("tokenizer.ggml.model"),
        pre_tokenizer=head.text("tokenizer.ggml.pre"),
        n_vocab=_length(tokens) or number("vocab_size"),
        tokens_sha256=tokens.sha256 if isinstance(tokens, LongArray) else "",
        special={
            key.removeprefix("tokenizer.ggml.").removesuffix("_token_id"): value
            for key, value in head.metadata.items()
            if key.endswith("_token_id") and type(value) is int
        },
        add_bos=_flag(head, "add_bos_token"),
        add_eos=_flag(head, "add_eos_token"),
        chat_template=head.text("tokenizer.chat_template"),
        rope={
            key.removeprefix(f"{architecture}."): value
            for key, value in head.metadata.items()
            if key.startswith(f"{architecture}.rope.")
        },
        sampling=read_recommended(head.metadata),
        file_type=file_type,
        bits_per_weight=8 * n_weight_bytes / n_parameters if n_parameters else 0.0,
        types=types,
        in_name_only=_in_name_only(file_type, matrices),
        parts=tuple(header.path for header in headers),
    )


def _flag(head: Header, name: str) -> bool | None:
    value = head.metadata.get(f"tokenizer.ggml.{name}")
    return value if isinstance(value, bool) else None


def require_model(path: Path) -> Facts:
    """Read the facts of a language model.

    Their ``path`` is the file that llama.cpp loads: of a split model, the first part. Raises
    ModelFileError if the file is damaged or not a language model that llama.cpp loads.
    """
    return _facts(require_model_parts(path))


def require_model_parts(path: Path) -> list[Header]:
    """Read the headers of all parts of a language model. Raises what ``require_model`` raises."""
    headers = read_parts(path)
    kind = file_kind(headers)
    if kind.refusal:
        raise ModelFileError(f"{path} {kind.refusal}", hint=kind.hint)
    return headers


def _file_type(head: Header) -> str:
    from gguf import LlamaFileType

    try:
        name: str = LlamaFileType(head.number("general.file_type") or 0).name
    except ValueError:
        return "unknown"
    has_type = "general.file_type" in head.metadata
    return name.removeprefix("MOSTLY_").removeprefix("ALL_") if has_type else "unknown"


def _in_name_only(file_type: str, matrices: Sequence[Tensor]) -> str:
    """Return a sentence if few matrices, and few weights, have the type in the file's name."""
    match = _TYPE_OF_FILE.match(file_type)
    if not match or not matrices:
        return ""
    base = match[1]
    named = [tensor for tensor in matrices if tensor.type.startswith(base)]
    n_weights = sum(tensor.n_elements for tensor in named)
    n_all = sum(tensor.n_elements for tensor in matrices)
    if len(named) >= len(matrices) / 4 or n_weights >= n_all / 4:
        return ""
    most, n_most = Counter(tensor.type for tensor in matrices).most_common(1)[0]
    return (
        f"{file_type} in name only: {len(named)} of {len(matrices)} matrices are {base}, {n_most} "
        f"are {most}"
    )


def _length(value: Value | None) -> int | None:
    if isinstance(value, LongArray):
        return value.n
    return len(value) if isinstance(value, tuple) else None
