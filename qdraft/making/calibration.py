"""The texts to collect an importance matrix over, and to compare drafts over.

The calibration text is a small built-in text (code, prose, dialogue and mathematics in several
languages) and text that the target itself generates, because a draft meets the activations of such
text.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from importlib.resources import files

from qdraft.decoding.records import DecodeParams, SamplingParams
from qdraft.errors import UsageError
from qdraft.llama.imatrix import CHUNK
from qdraft.llama.progress import Progress, no_progress
from qdraft.session.pair import Pair
from qdraft.session.prompt import encode_prompt

log = logging.getLogger(__name__)

PROMPTS = (
    "Write a Python function that counts the words of a file, and explain how it works.",
    "What is the difference between weather and climate?",
    "Tell me a short story about a boy who finds an old map.",
    "Translate into French, German and Spanish: Where is the nearest station?",
    "A shop sells pens at 3 for 2 euros. How much do 24 pens cost? Explain each step.",
    "Write a polite letter that asks the landlord to repair the heating.",
    "Give me a list of ten ideas for a rainy weekend.",
    "Summarize how a bill becomes a law.",
)

MAX_WRITTEN = 768 * len(PROMPTS)  # each text has to fit its context
N_WRITTEN = 2048  # tokens that the target writes if no number is asked for


def built_in_text() -> str:
    """The calibration text that comes with qdraft."""
    return files("qdraft.making").joinpath("data/calibration.txt").read_text(encoding="utf-8")


def evaluation_text() -> str:
    """The text to compare quantizations over; the calibration text has no passage of it."""
    return files("qdraft.making").joinpath("data/evaluation.txt").read_text(encoding="utf-8")


def write_texts(
    pair: Pair,
    prompts: Sequence[str],
    n_tokens: int,
    sampling: SamplingParams,
    progress: Progress = no_progress,
) -> list[tuple[int, list[int]]]:
    """Generate texts with the target alone, at most ``n_tokens`` in all besides the prompts.

    Returns the number of prompt tokens and all tokens of each text.
    """
    texts: list[tuple[int, list[int]]] = []
    raw = not takes_a_chat(pair, prompts[0])
    n_each = -(-n_tokens // len(prompts))
    n_done = 0
    for i, prompt in enumerate(prompts):
        params = DecodeParams(n_predict=min(n_each, n_tokens - n_done), n_draft=0, seed=i)
        if params.n_predict < 1:
            break
        text = pair.generate(prompt, sampling, params, raw=raw)
        for _ in text:
            progress("writing texts", n_done + len(text.tokens), n_tokens)
        n_done += len(text.tokens)
        texts.append((len(text.prompt), [*text.prompt, *text.tokens]))
    return texts


def takes_a_chat(pair: Pair, prompt: str) -> bool:
    """Return whether the chat template takes a plain prompt; warn if it does not."""
    try:
        encode_prompt(pair.vocab, prompt)
    except UsageError as error:
        log.warning("%s: qdraft generates texts without the template", error)
        return False
    return True


def to_chunks(texts: Sequence[Sequence[int]], bos: int) -> list[list[int]]:
    """Join the texts and cut them into chunks of ``CHUNK`` tokens, without what is left over.

    ``bos`` replaces the first token of each chunk, as in llama-imatrix; -1 for a model without
    one. Raises UsageError if there is less than one chunk.
    """
    tokens = [token for text in texts for token in text]
    chunks = [tokens[i : i + CHUNK] for i in range(0, len(tokens) - CHUNK + 1, CHUNK)]
    if not chunks:
        raise UsageError(f"the calibration text has {len(tokens)} tokens, fewer than {CHUNK}")
    return [[bos, *chunk[1:]] if bos >= 0 else chunk for chunk in chunks]
