"""What a client asks for: one text request, read from the fields of three endpoints."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from qdraft.decoding.records import MAX_N_DRAFT, DecodeParams, SamplingParams
from qdraft.serve.errors import ApiError, invalid
from qdraft.serve.fields import Fields
from qdraft.serve.forms import read_form
from qdraft.serve.messages import read_messages
from qdraft.serve.tools import AUTO, read_tools

CHAT, COMPLETION, NATIVE = "chat", "completion", "native"
MOST_CHOICES = 128  # choices of one request
_MOST_STOPS = 64
_MOST_TOP = 100  # likeliest tokens beside each token

Prompt = str | tuple[int, ...]

# Fields of samplers under other names than ours.
_ALIASES = {
    "typ_p": "typical_p",
    "repetition_penalty": "repeat_penalty",
    "dynatemp_exponent": "dynatemp_exp",
}
_WHOLE = ("top_k", "repeat_last_n", "dry_allowed_length", "dry_penalty_last_n")
_BREAKERS = "dry_sequence_breakers"
# What qdraft does not have, with the values that ask for nothing.
_MISSING: dict[str, tuple[Any, ...]] = {
    "echo": (False,),
    "best_of": (1,),
    "suffix": ("",),
    "mirostat": (0,),
    "adaptive_target": (-1,),
    "samplers": ([],),
    "lora": ([],),
    "image_data": ([],),
    "audio": (),
    "modalities": (["text"],),
    "web_search_options": (),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "t_max_predict_ms": (0, -1),
    "n_indent": (0,),
    "post_sampling_probs": (False,),
}
# What changes nothing here.
_IGNORED = (
    "user",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "store",
    "metadata",
    "service_tier",
    "prediction",
    "verbosity",
    "n_keep",
    "id_slot",
    "slot_id",
    "timings_per_token",
    "return_tokens",
    "draft_model",
    "parallel_tool_calls",
)


@dataclass(frozen=True, slots=True)
class TextRequest:
    """A request for texts: ``n`` of them for each prompt.

    ``kind`` is the shape of the answer: CHAT, COMPLETION or NATIVE (llama-server's /completion).
    A chat has ``messages`` and no prompts; ``variables`` are those of its template, and
    ``continue_last`` says that the last message is the beginning of the answer, as in llama-server.
    ``tool_choice`` other than AUTO says that the answer is a call of one of ``tools``.
    ``split_reasoning`` None leaves that to the server. ``sampling`` and ``decode`` are the
    parameters that the request sets, by the names of ``SamplingParams`` and ``DecodeParams``.
    ``n_top`` is the number of likeliest tokens to report beside each token; None reports neither.
    ``ping_s`` is the time between the comments of a stream that has nothing to say, in seconds;
    None is the server's, 0 none. ``origins`` adds to each chunk where its token comes from.
    """

    kind: str
    model: str | None = None
    prompts: tuple[Prompt, ...] = ()
    messages: tuple[dict[str, Any], ...] = ()
    variables: Mapping[str, Any] = field(default_factory=dict)
    continue_last: bool = False
    tools: tuple[dict[str, Any], ...] = ()
    tool_choice: str = AUTO
    split_reasoning: bool | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    decode: Mapping[str, Any] = field(default_factory=dict)
    ignore_eos: bool = False
    n: int = 1
    n_top: int | None = None
    stream: bool = False
    include_usage: bool = False
    reuse: bool = True
    ping_s: float | None = None
    origins: bool = False

    @property
    def n_choices(self) -> int:
        """The texts that the request asks for."""
        return self.n * (1 if self.kind == CHAT else len(self.prompts))


def read_request(kind: str, fields: Fields) -> TextRequest:
    """Return the request. Raises ApiError or ParameterError, which name the field."""
    _refuse_missing(fields)
    n_top = _read_n_top(kind, fields)
    chat = read_chat(fields) if kind == CHAT else {}
    form = read_form(fields, chat.get("tools", ()), chat.get("tool_choice", AUTO))
    decode = {**_read_decode(fields), "constraint": form}
    if n_top is not None:
        decode["logprobs"] = max(1, n_top)
    request = TextRequest(
        kind=kind,
        model=fields.text("model"),
        prompts=() if kind == CHAT else read_prompts(fields),
        **chat,
        sampling=_read_sampling(fields),
        decode=decode,
        n_top=n_top,
        ignore_eos=fields.flag("ignore_eos") or False,
        n=fields.integer("n", 1, MOST_CHOICES) or 1,
        stream=fields.flag("stream") or False,
        include_usage=_read_stream_options(fields),
        reuse=fields.flag("cache_prompt") is not False,
        ping_s=_read_ping(fields),
        origins=fields.flag("origins") or False,
    )
    if request.n_choices > MOST_CHOICES:
        raise invalid(f"the request asks for {request.n_choices} texts, {MOST_CHOICES} at most")
    if kind == NATIVE and request.n_choices > 1:
        raise invalid("/completion writes one text; use /v1/completions for more", "n")
    SamplingParams(**request.sampling)  # raises before the request waits
    DecodeParams(**request.decode)
    return request


def read_prompts(fields: Fields) -> tuple[Prompt, ...]:
    """Return the prompts: one text, one list of token ids, or a list of these."""
    prompt = fields.raw("prompt")
    if prompt is None:
        raise invalid("prompt is missing", "prompt")
    alone = isinstance(prompt, str) or (
        isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], (str, list))
    )
    each = [prompt] if alone else prompt
    if not isinstance(each, list) or not each:
        raise fields.wrong("prompt", "a string, a list of token ids, or a list of these")
    return tuple(_read_prompt(fields, one_prompt) for one_prompt in each)


def _read_prompt(fields: Fields, prompt: object) -> Prompt:
    if isinstance(prompt, str):
        return Fields({"prompt": prompt}).text("prompt") or ""
    if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
        return tuple(prompt)
    raise fields.wrong("prompt", "a string, a list of token ids, or a list of these")


def read_chat(fields: Fields) -> dict[str, Any]:
    """Return the fields of ``TextRequest`` that a chat alone has."""
    messages = read_messages(fields)
    variables = dict(fields.mapping("chat_template_kwargs") or {})
    effort = fields.text("reasoning_effort")
    if effort is not None:
        variables.setdefault("reasoning_effort", effort)
        if effort == "none":
            variables.setdefault("enable_thinking", False)
    tools, choice = read_tools(fields)
    last = messages[-1]
    form = fields.text("reasoning_format")
    if form not in (None, "auto", "deepseek", "none"):
        raise fields.wrong("reasoning_format", "auto, deepseek or none")
    return {
        "messages": messages,
        "variables": variables,
        "continue_last": last["role"] == "assistant" and "tool_calls" not in last,
        "tools": tuple(tools),
        "tool_choice": choice,
        "split_reasoning": None if form is None else form != "none",
    }


def _read_sampling(fields: Fields) -> dict[str, Any]:
    sampling: dict[str, Any] = {}
    names = [each.name for each in dataclasses.fields(SamplingParams)]
    for name in (*_ALIASES, *names):
        if name not in fields or name in ("logit_bias", _BREAKERS):
            continue
        own = _ALIASES.get(name, name)
        sampling[own] = fields.integer(name) if own in _WHOLE else fields.number(name)
    if "top_k" in sampling:
        sampling["top_k"] = max(0, sampling["top_k"])  # below 0 is off, as in llama.cpp
    if (breakers := fields.items(_BREAKERS)) is not None:
        if not all(isinstance(each, str) for each in breakers):
            raise fields.wrong(_BREAKERS, "a list of strings")
        sampling[_BREAKERS] = tuple(breakers)
    if (bias := fields.raw("logit_bias")) is not None:
        sampling["logit_bias"] = _read_bias(fields, bias)
    return sampling


def _read_bias(fields: Fields, bias: object) -> dict[int, float]:
    """Return the bias of each token: of an object, or of a list of pairs."""
    pairs = list(bias.items()) if isinstance(bias, dict) else bias
    biases: dict[int, float] = {}
    if not isinstance(pairs, list):
        raise fields.wrong("logit_bias", "an object of token ids and numbers")
    for pair in pairs:
        token, value = pair if isinstance(pair, (list, tuple)) and len(pair) == 2 else (None, None)
        if isinstance(token, str) and token.isdecimal() and len(token) < 10:
            token = int(token)
        if value is False:  # llama-server's word for a token that must not come
            value = -float("inf")
        if type(token) is not int or isinstance(value, bool) or not isinstance(value, (int, float)):
            raise fields.wrong("logit_bias", "an object of token ids and numbers")
        try:
            biases[token] = float(value)
        except OverflowError:
            raise fields.wrong("logit_bias", "an object of token ids and finite numbers") from None
    return biases


def _read_decode(fields: Fields) -> dict[str, Any]:
    decode: dict[str, Any] = {}
    limits = {
        name: n
        for name in ("max_completion_tokens", "max_tokens", "n_predict")
        if (n := fields.integer(name, -1)) is not None
    }
    if len(set(limits.values())) > 1:
        raise invalid(f"{' and '.join(limits)} differ, but mean the same", next(iter(limits)))
    if limits:
        decode["n_predict"] = next(iter(limits.values()))
    if (seed := fields.integer("seed")) is not None:
        decode["seed"] = -1 if seed < 0 or seed == 2**32 - 1 else seed
    if stops := _read_stops(fields):
        decode["stop"] = stops
    n_draft = fields.integer("n_draft", 0, MAX_N_DRAFT)
    speculative = fields.flag("speculative")
    if speculative is False:
        if n_draft:
            raise invalid("n_draft cannot be combined with speculative false", "n_draft")
        n_draft = 0
    if n_draft is not None:
        decode["n_draft"] = n_draft
    return decode


def _read_n_top(kind: str, fields: Fields) -> int | None:
    """Return how many likeliest tokens to report beside each token; None for neither."""
    if kind == NATIVE:
        return fields.integer("n_probs", 0, _MOST_TOP) or None
    if kind == COMPLETION:
        return fields.integer("logprobs", 0, _MOST_TOP)
    n_top = fields.integer("top_logprobs", 0, _MOST_TOP)
    if fields.flag("logprobs"):
        return n_top or 0
    if n_top:
        raise invalid("top_logprobs needs logprobs true", "top_logprobs")
    return None


def _read_stops(fields: Fields) -> tuple[str, ...]:
    stop = fields.raw("stop")
    stops = [stop] if isinstance(stop, str) else stop
    if stops is None:
        return ()
    if not isinstance(stops, list) or not all(isinstance(each, str) for each in stops):
        raise fields.wrong("stop", "a string or a list of strings")
    if len(stops) > _MOST_STOPS:
        raise invalid(f"stop has {len(stops)} strings, {_MOST_STOPS} at most", "stop")
    return tuple(Fields({"stop": each}).text("stop") or "" for each in stops if each)


def _read_stream_options(fields: Fields) -> bool:
    """Tell whether a stream ends with a chunk for the usage."""
    options = Fields(fields.mapping("stream_options") or {}, "stream_options")
    return options.flag("include_usage") or False


def _read_ping(fields: Fields) -> float | None:
    """Return the seconds between two comments; 0 for none, as for numbers below 0."""
    seconds = fields.number("sse_ping_interval")
    return None if seconds is None else max(0.0, float(seconds))


def _refuse_missing(fields: Fields) -> None:
    """Raise ApiError for what is asked for and not there; note what changes nothing."""
    for name in _IGNORED:
        fields.raw(name)
    known = {each.name for each in dataclasses.fields(SamplingParams)}
    for name, off in _MISSING.items():
        if name not in known and name in fields and fields.raw(name) not in off:
            raise missing(name)


def missing(name: str) -> ApiError:
    """Return the error for a field that qdraft does not have."""
    return invalid(f"qdraft does not have {name}: leave it out", name)
