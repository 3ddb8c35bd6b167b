"""What a GGUF file is, from what it holds; every command asks this module.

The keys, tensors and architectures are those of llama.cpp's llama-arch.cpp, and the limits those of
llama-hparams.h and llama-vocab.cpp, as of llama-cpp-python 0.3.36.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from qdraft.gguf.header import TOKENS, Header, LongArray

_ENCODERS = frozenset(
    (
        "bert",
        "modern-bert",
        "nomic-bert",
        "nomic-bert-moe",
        "neo-bert",
        "jina-bert-v2",
        "jina-bert-v3",
        "eurobert",
        "t5encoder",
        "gemma-embedding",
        "llama-embed",
    )
)
_DIFFUSION = frozenset(["dream", "llada", "llada-moe", "rnd1"])
_HEADS = frozenset(
    (
        "eagle",
        "eagle2",
        "eagle3",
        "dflash",
        "medusa",
        "gemma4-assistant",
        "gemma4_assistant",
    )
)
_SPEECH = frozenset(["wavtokenizer-dec", "qwen3tts", "pockettts"])
_RECURRENT = frozenset(
    (
        "mamba",
        "mamba2",
        "rwkv6",
        "rwkv6qwen2",
        "rwkv7",
        "arwkv7",
        "jamba",
        "falcon-h1",
        "plamo2",
        "granitehybrid",
        "lfm2",
        "lfm2moe",
        "nemotron_h",
        "nemotron_h_moe",
        "qwen3next",
        "kimi-linear",
        "bailingmoe3",
        "kimi-k3",
        "glm5-next",
        "qwen35",
        "qwen35moe",
        "qwen4exp",
        "deepseek4",
        "minimax-01",
    )
)
_RECURRENT_KEYS = re.compile(
    r"\.(ssm|wkv|shortconv|kda)\.|\.attention\.recurrent_layers$|\.full_attention_interval$"
)
_RECURRENT_TENSORS = re.compile(r"^blk\.\d+\.(ssm_|time_mix_|shortconv\.)")
_PICTURES = re.compile(
    r"^(double_blocks|single_blocks|joint_blocks|transformer_blocks|input_blocks|output_blocks"
    r"|blocks|layers|patch_embedding|first_stage_model|model\.diffusion_model)\."
)
_PICTURE_NAMES = frozenset(
    (
        "flux",
        "sd1",
        "sd2",
        "sd3",
        "sdxl",
        "wan",
        "qwen_image",
        "lumina2",
        "hidream",
        "hyvid",
        "hunyuan_video",
        "cosmos",
        "ltxv",
        "aura",
        "auraflow",
        "pixart",
        "chroma",
        "z_image",
    )
)
_BLOCK = re.compile(r"^(?:(?:enc|dec)\.)?blk\.(\d+)\.")
_RANK = 4  # LLAMA_POOLING_TYPE_RANK
_MAX_LAYERS, _MAX_EXPERTS = 512, 1024  # of llama.cpp
_NO_TOKENIZER = ("", "none", "no_vocab")


@dataclass(frozen=True, slots=True)
class FileKind:
    """What a file is.

    ``noun`` names it in a sentence. ``refusal`` says why it can be neither target nor draft, after
    the name of the file; empty if it can. ``recurrent`` models keep a state, beside KV cells or in
    place of them.
    """

    name: str
    noun: str
    refusal: str = ""
    hint: str | None = None
    recurrent: bool = False


def _other(name: str, noun: str, hint: str | None = None) -> FileKind:
    return FileKind(name, noun, f"is {noun}, not a language model", hint)


MODEL = FileKind("model", "a language model")
_HEAD = FileKind(
    "head",
    "a drafting head",
    "is a drafting head: it works on the hidden states of its target, but qdraft uses independent "
    "models as drafts",
    "make a draft of the target with qdraft make",
)


class _Content:
    """The content of a file as the rules below ask for it."""

    def __init__(self, headers: Sequence[Header]) -> None:
        self.head = head = headers[0]
        self.architecture = head.text("general.architecture")
        self.type = head.text("general.type")
        self.names = [tensor.name for header in headers for tensor in header.tensors]
        self.tokenizer = head.text("tokenizer.ggml.model")
        pooling = head.metadata.get(f"{self.architecture}.pooling_type")
        self.pooling = pooling if isinstance(pooling, int) else 0
        self.causal = head.metadata.get(f"{self.architecture}.attention.causal") is not False

    def has(self, *prefixes: str) -> bool:
        """Tell whether a tensor's name starts with one of ``prefixes``."""
        return any(name.startswith(prefixes) for name in self.names)

    def ends(self, *suffixes: str) -> bool:
        """Tell whether a tensor's name ends with one of ``suffixes``."""
        return any(name.endswith(suffixes) for name in self.names)

    def has_key(self, pattern: str) -> bool:
        return any(re.search(pattern, key) for key in self.head.metadata)

    @property
    def is_head(self) -> bool:
        """Whether it holds a drafting head and no layers of a trunk."""
        blocks = {m[1] for name in self.names if (m := _BLOCK.match(name))}
        heads = {m[1] for name in self.names if ".nextn." in name and (m := _BLOCK.match(name))}
        return (
            self.architecture in _HEADS
            or (bool(heads) and blocks == heads)
            or self.has("nextn.", "fc.", "d2t", "medusa")
        )

    @property
    def has_vocabulary(self) -> bool:
        tokens = self.head.metadata.get(TOKENS)
        named = self.tokenizer not in _NO_TOKENIZER
        return named and isinstance(tokens, LongArray) and tokens.n > 0


# The first rule that holds decides, so what is certain comes before what is likely.
_RULES: tuple[tuple[FileKind, Callable[[_Content], bool]], ...] = (
    (
        _other("imatrix", "an importance matrix"),
        lambda c: c.type == "imatrix" or c.ends(".in_sum2") or c.has_key(r"^imatrix\."),
    ),
    (
        _other("adapter", "a LoRA adapter", "name its model with --model, and it with --lora"),
        lambda c: c.type == "adapter" or c.ends(".lora_a", ".lora_b") or c.has_key(r"^adapter\."),
    ),
    (
        _other("control-vector", "a control vector"),
        lambda c: c.architecture == "controlvector" or c.has("direction."),
    ),
    (
        _other("projector", "a projector for images or sound (mmproj)"),
        lambda c: (
            c.type == "mmproj"
            or c.architecture == "clip"
            or (c.has_key(r"^clip\.") and not c.has("token_embd."))
        ),
    ),
    (_HEAD, lambda c: c.is_head),
    (
        _other("speech", "a speech model"),
        lambda c: c.architecture in _SPEECH or c.has("posnet.", "convnext."),
    ),
    (
        _other("encoder-decoder", "an encoder-decoder model"),
        lambda c: c.architecture == "t5" or c.has("dec.blk."),
    ),
    (
        _other("diffusion", "a diffusion model of text"),
        lambda c: c.architecture in _DIFFUSION or c.has_key(r"^diffusion\.|\.diffusion\."),
    ),
    (
        _other("reranker", "a reranker"),
        lambda c: (
            c.pooling == _RANK
            or c.has("cls.", "classifier.", "score.")
            or c.has_key(r"\.classifier\.")
        ),
    ),
    (
        _other("embedding", "an embedding model"),
        lambda c: (
            c.architecture in _ENCODERS
            or c.pooling > 0
            or not c.causal
            or c.has("enc.blk.", "token_types.", "dense_2.")
        ),
    ),
    (
        _other("pictures", "a model for pictures or video"),
        lambda c: (
            c.architecture in _PICTURE_NAMES
            or (not c.has("token_embd.") and any(map(_PICTURES.match, c.names)))
        ),
    ),
    (
        FileKind("no-tokenizer", "a model without a tokenizer", "has no tokenizer"),
        lambda c: not c.has_vocabulary,
    ),
    (
        FileKind("vocabulary", "a vocabulary", "holds a vocabulary, but no weights of a model"),
        lambda c: not c.names,
    ),
    (
        FileKind("other", "not a language model", "is not a language model: it has no token_embd"),
        lambda c: not c.has("token_embd."),
    ),
)


def file_kind(headers: Sequence[Header]) -> FileKind:
    """Return what a model is, given the headers of all its parts."""
    content = _Content(headers)
    for kind, holds in _RULES:
        if holds(content):
            return kind
    refusal = _wrong_vocabulary(content) or _wrong_numbers(content)
    return replace(MODEL, refusal=refusal, recurrent=_is_recurrent(content))


def _is_recurrent(content: _Content) -> bool:
    return (
        content.architecture in _RECURRENT
        or any(map(_RECURRENT_KEYS.search, content.head.metadata))
        or any(map(_RECURRENT_TENSORS.match, content.names))
    )


def _wrong_vocabulary(content: _Content) -> str:
    """Return what is wrong with a vocabulary on which llama.cpp would abort, else ``""``."""
    tokens = content.head.metadata[TOKENS]
    if isinstance(tokens, LongArray) and tokens.repeated:
        first, second = tokens.repeated
        return (
            f"does not load: tokens {first} and {second} have the same text, which llama.cpp does "
            "not accept"
        )
    return ""


def _wrong_numbers(content: _Content) -> str:
    """Return which count is one on which llama.cpp would abort, else ``""``."""
    for key, what, least, most in (
        ("block_count", "layers", 1, _MAX_LAYERS),
        ("expert_count", "experts", 0, _MAX_EXPERTS),
    ):
        n = content.head.number(f"{content.architecture}.{key}")
        if n is not None and not least <= n <= most:
            return f"does not load: it claims {n} {what}, but llama.cpp takes {least} to {most}"
    return ""
