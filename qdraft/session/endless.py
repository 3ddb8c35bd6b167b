"""Texts that no token ends."""

from __future__ import annotations

from dataclasses import replace

from qdraft.decoding.records import SamplingParams
from qdraft.llama.vocab import LlamaVocab


def ban_ends(sampling: SamplingParams, vocab: LlamaVocab) -> SamplingParams:
    """Return ``sampling`` without the tokens that end a text, as llama.cpp's --ignore-eos."""
    ends = (token for token in range(vocab.n_tokens) if vocab.is_end(token))
    return replace(
        sampling, logit_bias={**sampling.logit_bias, **dict.fromkeys(ends, -float("inf"))}
    )
