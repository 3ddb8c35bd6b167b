"""The JSON of answers: chats, completions and llama-server's own, whole and in pieces."""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from qdraft.decoding.records import Chunk, FinishReason
from qdraft.llama.native import build_id
from qdraft.serve.logprobs import as_lists
from qdraft.serve.mailbox import Outcome
from qdraft.serve.requests import CHAT, NATIVE, TextRequest
from qdraft.serve.tools import AUTO, ForcedReader, ToolReader

Json = dict[str, Any]

_FINISHES = {FinishReason.END_OF_GENERATION: "stop", FinishReason.STOP_STRING: "stop"}
_STOP_TYPES = {FinishReason.END_OF_GENERATION: "eos", FinishReason.STOP_STRING: "word"}


def timings(outcome: Outcome) -> Json:
    """Return the times and counts of a text: llama-server's names, and ours beside them."""
    summary = outcome.summary
    prompt_ms = 1000 * summary.prompt_s
    writing_ms = 1000 * (summary.draft_s + summary.verify_s + summary.other_s)
    speed = summary.tokens_per_second
    drafts = {"draft_n": summary.n_drafted, "draft_n_accepted": summary.n_accepted}
    return {
        "cache_n": outcome.n_cached,
        "prompt_n": summary.n_prompt,
        "prompt_ms": prompt_ms,
        "prompt_per_token_ms": prompt_ms / summary.n_prompt if summary.n_prompt else 0.0,
        "prompt_per_second": 1000 * summary.n_prompt / prompt_ms if prompt_ms else 0.0,
        "predicted_n": summary.n_tokens,
        "predicted_ms": writing_ms,
        "predicted_per_token_ms": 1000 / speed if speed else 0.0,
        "predicted_per_second": speed or 0.0,
        **(drafts if summary.n_drafted else {}),
        "rounds": summary.n_rounds,
        "n_draft": outcome.n_most_drafted,
        "alpha": summary.alpha,
        "tau": summary.tau,
        "speedup": summary.speedup,
    }


def usage(outcomes: Sequence[Outcome], n: int = 1) -> Json:
    """Return the counts of all texts; the ``n`` texts of a prompt share it."""
    n_prompt = sum(each.n_prompt for each in outcomes if each.index % n == 0)
    n_written = sum(len(each.tokens) for each in outcomes)
    n_accepted = sum(each.summary.n_accepted for each in outcomes)
    n_rejected = sum(each.summary.n_drafted for each in outcomes) - n_accepted
    return {
        "prompt_tokens": n_prompt,
        "completion_tokens": n_written,
        "total_tokens": n_prompt + n_written,
        "prompt_tokens_details": {
            "cached_tokens": sum(each.n_cached for each in outcomes if each.index % n == 0)
        },
        "completion_tokens_details": {
            "accepted_prediction_tokens": n_accepted,
            "rejected_prediction_tokens": n_rejected,
        },
    }


def finish_of(outcome: Outcome) -> str:
    """Return OpenAI's word for what ended a text."""
    return _FINISHES.get(outcome.finish, "length")


class Shape:
    """The pieces and the whole of an answer; each endpoint has its own."""

    ids = "cmpl-"

    def __init__(self, request: TextRequest, model: str) -> None:
        self._request = request
        self._model = model
        self._id = self.ids + secrets.token_urlsafe(18)
        self._created = int(time.time())

    def head(self, index: int) -> list[Json]:
        """Return what comes before the first chunk of a text."""
        return []

    def pieces(self, index: int, chunk: Chunk, entry: Json | None = None) -> list[Json]:
        """Return the parts of a stream for one chunk; none if it has nothing to say.

        ``entry`` is the log-probability of its token, if the client asks.
        """
        raise NotImplementedError

    def last(self, outcome: Outcome) -> list[Json]:
        """Return the last parts for a text."""
        raise NotImplementedError

    def tail(self, outcomes: Sequence[Outcome]) -> list[Json]:
        """Return what follows the last text, which is the usage if the client asks for it."""
        if not self._request.include_usage:
            return []
        return [{**self._frame("chunk"), "choices": [], "usage": self._usage(outcomes)}]

    def whole(self, outcomes: Sequence[Outcome]) -> Json:
        """Return the answer in one piece."""
        raise NotImplementedError

    def _usage(self, outcomes: Sequence[Outcome]) -> Json:
        return usage(outcomes, self._request.n)

    def _frame(self, kind: str = "") -> Json:
        raise NotImplementedError

    def _says_nothing(self, chunk: Chunk) -> bool:
        says = chunk.text or chunk.reasoning
        return not says and not (self._request.origins and chunk.token is not None)

    def _origin(self, chunk: Chunk) -> Json:
        """Return where a token comes from, if the client asks."""
        if not self._request.origins or chunk.origin is None:
            return {}
        return {"origin": chunk.origin.value, "round": chunk.round_index}


class ChatShape(Shape):
    """/v1/chat/completions; the reasoning and the calls of tools are apart from the content."""

    ids = "chatcmpl-"

    def __init__(self, request: TextRequest, model: str) -> None:
        super().__init__(request, model)
        self._readers: dict[int, ToolReader] = {}

    def head(self, index: int) -> list[Json]:
        if self._request.tools:
            self._readers[index] = self._reader()
        return [self._piece(index, {"role": "assistant", "content": None})]

    def pieces(self, index: int, chunk: Chunk, entry: Json | None = None) -> list[Json]:
        if self._says_nothing(chunk) and entry is None:
            return []
        deltas: list[Json] = []
        if chunk.reasoning:
            deltas.append({"reasoning_content": chunk.reasoning})
        if reader := self._readers.get(index):
            deltas += reader.push(chunk.text)
        elif chunk.text or not deltas:
            deltas.append({"content": chunk.text})
        if entry is not None and not deltas:  # a reader holds the text back
            deltas.append({})
        pieces = [{**self._piece(index, delta), **self._origin(chunk)} for delta in deltas]
        if entry is not None:
            pieces[0]["choices"][0]["logprobs"] = {"content": [entry]}
        return pieces

    def last(self, outcome: Outcome) -> list[Json]:
        reader = self._readers.get(outcome.index)
        pieces = [self._piece(outcome.index, delta) for delta in (reader.flush() if reader else [])]
        finish = self._piece(outcome.index, {}, _finish_of_chat(outcome, reader))
        return [*pieces, {**finish, "timings": timings(outcome)}]

    def whole(self, outcomes: Sequence[Outcome]) -> Json:
        return {
            **self._frame(),
            "choices": [self._choice(outcome) for outcome in outcomes],
            "usage": self._usage(outcomes),
            "timings": timings(outcomes[-1]),
        }

    def _choice(self, outcome: Outcome) -> Json:
        message: Json = {"role": "assistant", "content": outcome.text}
        if outcome.reasoning:
            message["reasoning_content"] = outcome.reasoning
        reader = self._reader() if self._request.tools else None
        if reader:
            deltas = [*reader.push(outcome.text), *reader.flush()]
            message["content"] = "".join(delta.get("content", "") for delta in deltas)
            calls = [
                {key: value for key, value in call.items() if key != "index"}
                for delta in deltas
                for call in delta.get("tool_calls", ())
            ]
            if calls:
                message["tool_calls"] = calls
        return {
            "index": outcome.index,
            "message": message,
            "logprobs": None if outcome.entries is None else {"content": list(outcome.entries)},
            "finish_reason": _finish_of_chat(outcome, reader),
        }

    def _reader(self) -> ToolReader:
        return ToolReader() if self._request.tool_choice == AUTO else ForcedReader()

    def _piece(self, index: int, delta: Json, finish: str | None = None) -> Json:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish}
        return {**self._frame("chunk"), "choices": [choice]}

    def _frame(self, kind: str = "") -> Json:
        return {
            "id": self._id,
            "object": f"chat.completion{'.' if kind else ''}{kind}",
            "created": self._created,
            "model": self._model,
            "system_fingerprint": build_id(),
        }


class CompletionShape(Shape):
    """/v1/completions."""

    def __init__(self, request: TextRequest, model: str) -> None:
        super().__init__(request, model)
        self._n_written: Counter[int] = Counter()  # characters of each text in a stream

    def pieces(self, index: int, chunk: Chunk, entry: Json | None = None) -> list[Json]:
        if self._says_nothing(chunk) and entry is None:
            return []
        choice = _choice(index, chunk.text)
        if entry is not None:
            choice["logprobs"] = as_lists([entry], self._n_written[index])
            self._n_written[index] += len(entry["token"])
        return [{**self._frame(), "choices": [choice], **self._origin(chunk)}]

    def last(self, outcome: Outcome) -> list[Json]:
        choice = _choice(outcome.index, "", finish_of(outcome))
        return [{**self._frame(), "choices": [choice], "timings": timings(outcome)}]

    def whole(self, outcomes: Sequence[Outcome]) -> Json:
        choices = [_choice(each.index, each.text, finish_of(each)) for each in outcomes]
        for choice, each in zip(choices, outcomes, strict=True):
            choice["logprobs"] = None if each.entries is None else as_lists(each.entries)
        return {
            **self._frame(),
            "choices": choices,
            "usage": self._usage(outcomes),
            "timings": timings(outcomes[-1]),
        }

    def _frame(self, kind: str = "") -> Json:
        return {
            "id": self._id,
            "object": "text_completion",
            "created": self._created,
            "model": self._model,
            "system_fingerprint": build_id(),
        }


class NativeShape(Shape):
    """llama-server's /completion."""

    def pieces(self, index: int, chunk: Chunk, entry: Json | None = None) -> list[Json]:
        if self._says_nothing(chunk) and entry is None:
            return []
        tokens = [] if chunk.token is None else [chunk.token]
        return [
            {
                "content": chunk.text,
                "tokens": tokens,
                "stop": False,
                **_probabilities([entry] if entry else None),
                **self._origin(chunk),
            }
        ]

    def last(self, outcome: Outcome) -> list[Json]:
        return [self._end(outcome, "")]

    def tail(self, outcomes: Sequence[Outcome]) -> list[Json]:
        return []

    def whole(self, outcomes: Sequence[Outcome]) -> Json:
        return self._end(outcomes[0], outcomes[0].text)

    def _end(self, outcome: Outcome, content: str) -> Json:
        return {
            "index": outcome.index,
            "content": content,
            "tokens": [] if self._request.stream else list(outcome.tokens),
            "stop": True,
            "model": self._model,
            "tokens_predicted": len(outcome.tokens),
            "tokens_evaluated": outcome.n_prompt,
            "tokens_cached": outcome.n_cached,
            "truncated": False,
            "stop_type": _STOP_TYPES.get(outcome.finish, "limit"),
            "stopping_word": "",
            **_probabilities(None if self._request.stream else outcome.entries),
            "generation_settings": {"seed": outcome.seed, "n_draft": outcome.n_most_drafted},
            "timings": timings(outcome),
        }


def shape_for(request: TextRequest, model: str) -> Shape:
    """Return the shape of the endpoint that a request came to."""
    kinds = {CHAT: ChatShape, NATIVE: NativeShape}
    return kinds.get(request.kind, CompletionShape)(request, model)


def _finish_of_chat(outcome: Outcome, reader: ToolReader | None) -> str:
    finish = finish_of(outcome)
    return "tool_calls" if reader and reader.n_calls and finish == "stop" else finish


def _probabilities(entries: Sequence[Json] | None) -> Json:
    return {"completion_probabilities": list(entries)} if entries else {}


def _choice(index: int, text: str, finish: str | None = None) -> Json:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": finish}
