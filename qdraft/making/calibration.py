"""The text that an importance matrix is collected over.

A small text of our own (code, prose, dialogue and mathematics in several languages), and what
the target itself writes: there its activations are those that a draft will meet.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from importlib.resources import files

from qdraft.decoding.records import DecodeParams, SamplingParams
from qdraft.errors import UsageError
from qdraft.llama.imatrix import CHUNK
from qdraft.llama.quantize import Progress
from qdraft.session.pair import Pair
from qdraft.session.text import encode_prompt

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


def built_in_text() -> str:
    """The text that comes with qdraft."""
    return files("qdraft.making").joinpath("data/calibration.txt").read_text(encoding="utf-8")


def evaluation_text() -> str:
    """The text that quantizations are compared over; no passage of it is in the other."""
    return files("qdraft.making").joinpath("data/evaluation.txt").read_text(encoding="utf-8")


def write_texts(
    pair: Pair,
    prompts: Sequence[str],
    n_tokens: int,
    sampling: SamplingParams,
    progress: Progress | None = None,
) -> list[tuple[int, list[int]]]:
    """Texts by the target alone, at most ``n_tokens`` in all beside the prompts.

    Each comes with the number of its tokens that are prompt.
    """
    texts: list[tuple[int, list[int]]] = []
    raw = not takes_a_chat(pair, prompts[0])
    each = -(-n_tokens // len(prompts))
    n_done = 0
    for i, prompt in enumerate(prompts):
        params = DecodeParams(n_predict=min(each, n_tokens - n_done), n_draft=0, seed=i)
        if params.n_predict < 1:
            break
        text = pair.generate(prompt, sampling, params, raw=raw)
        for _ in text:
            if progress:
                progress(n_done + len(text.tokens), n_tokens)
        n_done += len(text.tokens)
        texts.append((len(text.prompt), [*text.prompt, *text.tokens]))
    return texts


def takes_a_chat(pair: Pair, prompt: str) -> bool:
    """False, with a warning, where the chat template is broken or refuses a plain prompt."""
    try:
        encode_prompt(pair.target_engine.vocab, prompt)
    except UsageError as error:
        log.warning("%s: texts are written without the template", error)
        return False
    return True


def to_chunks(texts: Sequence[Sequence[int]], bos: int) -> list[list[int]]:
    """Texts one after the other, cut to chunks of ``CHUNK`` tokens; a rest is left out.

    ``bos`` replaces the first token of each chunk, as llama-imatrix has it; -1 where the model
    wants none. Raises UsageError when there is less than one chunk.
    """
    tokens = [token for text in texts for token in text]
    chunks = [tokens[i : i + CHUNK] for i in range(0, len(tokens) - CHUNK + 1, CHUNK)]
    if not chunks:
        raise UsageError(f"the calibration text has {len(tokens)} tokens, fewer than {CHUNK}")
    return [[bos, *chunk[1:]] if bos >= 0 else chunk for chunk in chunks]
