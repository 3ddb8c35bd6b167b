"""The verify batches that give, bit for bit, the logits of decoding one token at a time.

Which they are depends on the build, the device, the file type, the cache type, the number of
threads and the depth of the text, so qdraft tries it. If drafts stay within these widths, a greedy
text is the target's own, token for token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from qdraft.decoding.engine import TokenSequence

# The depths to try, in tokens before the batch: a short text; across the edge where llama.cpp's
# view of its cache grows from 256 cells to 512; beyond it, where llama.cpp may compute a single row
# in another way; across the next edge.
DEPTHS = (24, 250, 300, 508)
DEEPEST = 1024  # no probe looks at more of the context
_STEP = 5003  # a prime, which spreads the tokens of a probe over the vocabulary


@dataclass(frozen=True, slots=True)
class BitIdentity:
    """The longest draft whose verify batch is bit-identical to one-token decoding.

    Drafts of up to ``n_draft`` tokens are bit-identical at every depth that the probe tried.
    ``depth`` is the depth at which the next longer draft first differed, and ``difference`` the
    largest difference of a logit there. Both are None if no draft that the probe tried differed.
    """

    n_draft: int
    depth: int | None = None
    difference: float | None = None


def probe_bit_identity(target: TokenSequence, n_most: int) -> BitIdentity:
    """Try drafts of 1 to ``n_most`` tokens at each of the ``DEPTHS`` that the context has room for.

    Reads at most 508 tokens and then decodes a few tens of tokens at each depth. ``target`` is a
    sequence of its own, which is empty afterwards.
    """
    room = target.n_ctx - n_most - 2
    depths = [depth for depth in DEPTHS if depth <= room]
    longest = BitIdentity(n_most if depths else 0)
    n_vocab = target.vocab.n_tokens
    tokens = [i * _STEP % n_vocab for i in range(max(depths, default=0) + n_most + 2)]
    target.truncate(0)
    for depth in depths:
        target.eval(tokens[target.n_past : depth], 0)
        n = 1
        while n <= longest.n_draft:
            difference = _difference(target, tokens[depth : depth + n + 2])
            if difference:
                longest = BitIdentity(n - 1, depth, difference)
            n += 1
    target.truncate(0)
    return longest


def _difference(target: TokenSequence, tokens: Sequence[int]) -> float:
    """Return the largest difference of a logit between ``tokens`` one by one and in a batch.

    The batch lacks the last token, which both times is decoded alone: its row shows whether the
    others left the same cells.
    """
    start = target.n_past
    target.checkpoint()
    alone = [target.eval([token], 1)[0].copy() for token in tokens]
    target.truncate(start)
    batch = target.eval(tokens[:-1], len(tokens) - 1).copy()
    after = target.eval(tokens[-1:], 1)
    rows = np.concatenate([batch, after])
    target.truncate(start)
    return float(np.abs(rows - np.stack(alone)).max())
