"""What the worker does for a request: write texts, or call a function of a loaded pair."""

from __future__ import annotations

import logging
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from qdraft.decoding.records import Chunk, DecodeParams, SamplingParams
from qdraft.errors import QDraftError
from qdraft.llama.chat_template import TemplateOptions
from qdraft.serve.errors import ApiError, invalid, not_supported, too_long, translate
from qdraft.serve.logprobs import entry
from qdraft.serve.mailbox import Failed, Finished, Mailbox, Outcome, Written
from qdraft.serve.metrics import Metrics
from qdraft.serve.models import Loaded
from qdraft.serve.requests import CHAT, Prompt, TextRequest
from qdraft.session.endless import ban_ends
from qdraft.session.generation import Generation
from qdraft.session.prompt import encode_messages, encode_prompt

log = logging.getLogger(__name__)


class Job:
    """A piece of work on the pair ``model``; what comes of it goes into ``mailbox``."""

    def __init__(self, model: str, mailbox: Mailbox) -> None:
        self.model = model
        self.mailbox = mailbox
        self._cancelled = threading.Event()

    @property
    def is_cancelled(self) -> bool:
        return self._cancelled.is_set()

    def cancel(self) -> None:
        """Note that nobody waits for the job any more."""
        self._cancelled.set()

    def run(self, loaded: Loaded) -> None:
        """Do the work, in the worker's thread."""
        raise NotImplementedError

    def fail(self, error: BaseException) -> None:
        """Tell the client that the work has failed, and the log if the client is not to blame."""
        failed = translate(error)
        if isinstance(error, QDraftError):
            log.log(logging.ERROR if failed.status >= 500 else logging.INFO, "%s", error)
        elif not isinstance(error, ApiError):
            log.error("%s", "".join(traceback.format_exception(error)))
        self.mailbox.put(Failed(failed))


class CallJob(Job):
    """Calls a function with the loaded pair, and gives its result."""

    def __init__(self, model: str, mailbox: Mailbox, function: Callable[[Loaded], Any]) -> None:
        super().__init__(model, mailbox)
        self._function = function

    def run(self, loaded: Loaded) -> None:
        self.mailbox.put(Finished(self._function(loaded)))


class TextJob(Job):
    """Writes the texts of a request, one after another."""

    def __init__(
        self, model: str, mailbox: Mailbox, request: TextRequest, metrics: Metrics
    ) -> None:
        super().__init__(model, mailbox)
        self._request = request
        self._metrics = metrics

    def run(self, loaded: Loaded) -> None:
        request = self._request
        sampling, decode = params_for(request, loaded)
        prompts = [encode(request, loaded, each) for each in request.prompts or ("",)]
        for tokens in prompts:
            if len(tokens) >= loaded.n_ctx:
                raise too_long(len(tokens), loaded.n_ctx)
        splits = request.kind == CHAT and (
            loaded.defaults.split_reasoning
            if request.split_reasoning is None
            else request.split_reasoning
        )
        loaded.pair.cancel_if(lambda: self.is_cancelled)
        for index in range(request.n_choices):
            if self.is_cancelled:
                return
            # A seed repeats the whole request, but its texts are not all the same.
            seed = decode.seed + index % request.n if decode.seed >= 0 else -1
            prompt = prompts[index // request.n]
            session = loaded.kept.choose(prompt, reuse=request.reuse)
            params = replace(decode, seed=seed)
            text = session.generate(prompt, sampling, params, split_reasoning=splits)
            self._write(index, text, loaded, decode)
        self.mailbox.put(Finished())

    def _write(self, index: int, text: Generation, loaded: Loaded, decode: DecodeParams) -> None:
        """Write one text, a round at a time; stop where it is if nobody waits for it."""
        known: list[dict[str, Any]] = []
        try:
            loaded.kept.make_room(len(text.prompt))
            while not self.is_cancelled and (chunks := text.step()):
                entries = self._entries(chunks, loaded)
                known += [each for each in entries if each is not None]
                if self._request.stream:  # else nobody is to be woken
                    self.mailbox.put(Written(index, tuple(chunks), entries))
                loaded.kept.make_room(len(text.prompt) + len(text.tokens))
        finally:
            text.close()
            summary = text.summary
            self._metrics.add(text, summary)
        if self.is_cancelled:
            return
        outcome = Outcome(
            index,
            text.text,
            text.reasoning,
            tuple(text.tokens),
            text.finish_reason,
            len(text.prompt),
            text.n_reused.target,
            decode.most_drafted,
            text.seed,
            summary,
            None if self._request.n_top is None else tuple(known),
        )
        self.mailbox.put(outcome)

    def _entries(
        self, chunks: Sequence[Chunk], loaded: Loaded
    ) -> tuple[dict[str, Any] | None, ...]:
        """Return the log-probabilities of chunks; none if the client does not ask for them."""
        n_top, vocab = self._request.n_top, loaded.pair.vocab
        if n_top is None:
            return ()
        return tuple(entry(each, n_top, lambda t: vocab.piece(t, special=True)) for each in chunks)


def params_for(request: TextRequest, loaded: Loaded) -> tuple[SamplingParams, DecodeParams]:
    """Return how to write: as the request says, else by the defaults of the pair."""
    sampling = replace(loaded.defaults.sampling, **request.sampling)
    if request.ignore_eos:
        sampling = ban_ends(sampling, loaded.pair.vocab)
    return sampling, replace(loaded.defaults.decode, **request.decode)


def template_for(request: TextRequest, loaded: Loaded) -> TemplateOptions:
    """Return what the chat template gets. Raises ApiError if it takes no tools."""
    if request.tools and "tools" not in loaded.pair.vocab.chat_template:
        raise not_supported(f"the chat template of {loaded.name} takes no tools", "tools")
    own = loaded.defaults.template
    return TemplateOptions(
        {**own.kwargs, **request.variables},
        list(request.tools) or None,
        continue_last=request.continue_last,
    )


def encode(request: TextRequest, loaded: Loaded, prompt: Prompt) -> list[int]:
    """Return the tokens of a prompt, or of the messages of a chat. Raises ApiError, UsageError."""
    vocab = loaded.pair.vocab
    if request.kind == CHAT:
        if not vocab.has_chat_template:
            raise invalid(
                f"{loaded.name} has no chat template: use /v1/completions with a prompt", "messages"
            )
        return encode_messages(vocab, request.messages, template=template_for(request, loaded))
    if isinstance(prompt, str):
        return encode_prompt(vocab, prompt, raw=True)
    if wrong := [token for token in prompt if not 0 <= token < vocab.n_tokens]:
        raise invalid(f"prompt holds {wrong[0]}, which is not a token of {loaded.name}", "prompt")
    return list(prompt)
