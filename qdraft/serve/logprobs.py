"""Log-probabilities as clients read them: a chat's entries, and the lists of completions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

from qdraft.decoding.records import Chunk

Json = dict[str, Any]
_LEAST = -9999.0  # OpenAI's word for a probability of 0, which JSON's numbers lack


def entry(chunk: Chunk, n_top: int, piece: Callable[[int], bytes]) -> Json | None:
    """Return the entry of a token with its ``n_top`` likeliest; None for a chunk without a token.

    ``piece`` gives the bytes of a token.
    """
    if chunk.token is None or chunk.logprobs is None:
        return None
    top = [_token(token, logprob, piece) for token, logprob in chunk.logprobs.top[:n_top]]
    return {**_token(chunk.token, chunk.logprobs.logprob, piece), "top_logprobs": top}


def _token(token: int, logprob: float, piece: Callable[[int], bytes]) -> Json:
    data = piece(token)
    return {
        "id": token,
        "token": data.decode("utf-8", "replace"),
        "bytes": list(data),
        "logprob": max(_LEAST, logprob),
    }


def as_lists(entries: Sequence[Json], offset: int = 0) -> Json:
    """Return entries as /v1/completions has them; ``offset`` is the length of the text before."""
    lengths = [len(each["token"]) for each in entries]
    return {
        "tokens": [each["token"] for each in entries],
        "token_logprobs": [each["logprob"] for each in entries],
        "top_logprobs": [
            {top["token"]: top["logprob"] for top in each["top_logprobs"]} for each in entries
        ],
        "text_offset": list(accumulate(lengths, initial=offset))[:-1],
    }
