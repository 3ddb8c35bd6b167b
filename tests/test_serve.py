"""`qdraft serve` over a fake pair: endpoints, fields, errors, streams, cancelling and the queue."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("uvicorn", reason="needs the serve extra")
pytest.importorskip("starlette", reason="needs the serve extra")

from serving import N_CTX, FakePair, Service, eventually, serving

import qdraft.serve.models
from qdraft.constraints.grammar import compile_grammar
from qdraft.decoding.records import Chunk, FinishReason, Origin
from qdraft.decoding.summary import summarize
from qdraft.serve.errors import ApiError
from qdraft.serve.fields import Fields
from qdraft.serve.gate import Rules, host_name, one_spelling
from qdraft.serve.kept import KeptSessions
from qdraft.serve.mailbox import Outcome
from qdraft.serve.requests import CHAT, TextRequest, read_request
from qdraft.serve.shapes import ChatShape
from qdraft.serve.tools import ForcedReader, ToolReader, call_schema

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in ("look", "leap")
]

ALPHABET = "bcdefghijklmnopqrstuvwxyz"


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with serving() as running:
        yield running


class TestAnswers:
    def test_a_chat_in_one_piece(self, service: Service) -> None:
        reply = service.chat(max_tokens=5)
        assert reply.status == 200
        answer = reply.json
        choice = answer["choices"][0]
        assert choice["message"] == {"role": "assistant", "content": "bcdef"}
        assert choice["finish_reason"] == "length"
        usage = answer["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (
            1,
            5,
            6,
        )
        details = usage["completion_tokens_details"]
        timings = answer["timings"]
        assert details["accepted_prediction_tokens"] == timings["draft_n_accepted"] == 1
        assert timings["predicted_n"] == 5
        assert timings["alpha"] == 1
        assert answer["model"] == "fake"

    def test_a_text_ends_by_itself(self, service: Service) -> None:
        choice = service.chat().json["choices"][0]
        assert choice["message"]["content"] == ALPHABET
        assert choice["finish_reason"] == "stop"

    @pytest.mark.parametrize("with_usage", [True, False])
    def test_a_chat_as_a_stream(self, service: Service, with_usage: bool) -> None:
        options = {"stream_options": {"include_usage": True}} if with_usage else {}
        reply = service.chat(stream=True, max_tokens=7, **options)
        assert reply.headers["content-type"].startswith("text/event-stream")
        parts = reply.parts
        assert parts[0]["choices"][0]["delta"] == {"role": "assistant", "content": None}
        if with_usage:
            usage = parts.pop()
            assert usage["choices"] == []
            assert usage["usage"]["completion_tokens"] == 7
        assert not any("usage" in part for part in parts)
        last = parts[-1]
        assert last["choices"][0]["delta"] == {}
        assert last["choices"][0]["finish_reason"] == "length"
        assert last["timings"]["predicted_n"] == 7
        deltas = [part["choices"][0]["delta"] for part in parts[1:-1]]
        assert "".join(delta["content"] for delta in deltas) == ALPHABET[:7]
        assert {part["id"] for part in parts} == {parts[0]["id"]}
        assert {part["choices"][0]["finish_reason"] for part in parts[:-1]} == {None}

    def test_origins_are_told_when_asked_for(self, service: Service) -> None:
        parts = service.chat(stream=True, max_tokens=8, origins=True).parts[1:-1]
        assert [part["origin"] for part in parts] == [*["target"] * 3, *["draft"] * 4, "bonus"]
        assert "origin" not in json.dumps(service.chat(stream=True, max_tokens=6).parts)

    def test_completions(self, service: Service) -> None:
        asked = {"prompt": ["x", [3, 4]], "n": 2, "max_tokens": 3}
        answer = service.ask("/v1/completions", asked).json
        assert [choice["text"] for choice in answer["choices"]] == ["yz", "yz", "efg", "efg"]
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
        assert answer["usage"]["prompt_tokens"] == 3
        parts = service.ask("/v1/completions", {**asked, "stream": True}).parts
        texts = ["", "", "", ""]
        for part in parts:
            texts[part["choices"][0]["index"]] += part["choices"][0]["text"]
        assert texts == ["yz", "yz", "efg", "efg"]

    def test_llama_servers_own_completion(self, service: Service) -> None:
        asked = {"prompt": "a", "n_predict": 4}
        answer = service.ask("/completion", asked).json
        assert answer["content"] == "bcde"
        assert (answer["stop"], answer["stop_type"]) == (True, "limit")
        assert answer["timings"]["predicted_n"] == answer["tokens_predicted"] == 4
        parts = service.ask("/completion", {**asked, "stream": True}).parts
        assert "".join(part["content"] for part in parts) == "bcde"
        assert [part["stop"] for part in parts] == [False] * 4 + [True]

    def test_a_stop_string_is_never_in_the_text(self, service: Service) -> None:
        for stop in ("ef", ["zz", "ef"]):
            choice = service.chat(stop=stop).json["choices"][0]
            assert (choice["message"]["content"], choice["finish_reason"]) == ("bcd", "stop")

    def test_the_target_alone_for_one_request(self, service: Service) -> None:
        alone = service.chat(speculative=False, max_tokens=6).json
        assert "draft_n" not in alone["timings"]
        assert alone["timings"]["n_draft"] == 0
        few = service.chat(n_draft=2, max_tokens=7).json
        assert few["timings"]["n_draft"] == 2
        assert alone["choices"][0]["message"]["content"] == ALPHABET[:6]

    def test_log_probabilities(self, service: Service) -> None:
        asked = {"max_tokens": 2, "logprobs": True, "top_logprobs": 2}
        whole = service.chat(**asked).json["choices"][0]["logprobs"]["content"]
        assert [each["token"] for each in whole] == ["b", "c"]
        assert [each["bytes"] for each in whole] == [[98], [99]]
        assert all(-1e-6 < each["logprob"] <= 0 for each in whole)
        assert [len(each["top_logprobs"]) for each in whole] == [2, 2]
        assert whole[0]["top_logprobs"][0]["logprob"] == whole[0]["logprob"]
        parts = service.chat(stream=True, **asked).parts
        streamed = [part["choices"][0]["logprobs"] for part in parts]
        assert [each["content"][0] for each in streamed if each] == whole
        plain = service.chat(max_tokens=2, logprobs=True).json["choices"][0]["logprobs"]
        assert [each["top_logprobs"] for each in plain["content"]] == [[], []]
        asked = {"prompt": "a", "max_tokens": 3, "logprobs": 1}
        lists = service.ask("/v1/completions", asked).json["choices"][0]["logprobs"]
        assert (lists["tokens"], lists["text_offset"]) == (["b", "c", "d"], [0, 1, 2])
        assert [list(each) for each in lists["top_logprobs"]] == [["b"], ["c"], ["d"]]
        parts = service.ask("/v1/completions", {**asked, "stream": True}).parts
        offsets = [part["choices"][0]["logprobs"]["text_offset"] for part in parts[:-1]]
        assert offsets == [[0], [1], [2]]
        own = service.ask("/completion", {"prompt": "a", "n_predict": 2, "n_probs": 1}).json
        assert [each["id"] for each in own["completion_probabilities"]] == [2, 3]

    def test_words(self, service: Service) -> None:
        asked = {"content": "ab é"}
        assert service.ask("/tokenize", asked).json == {"tokens": [1, 2, 27, 28]}
        pieces = service.ask("/tokenize", {**asked, "with_pieces": True}).json["tokens"]
        assert [piece["piece"] for piece in pieces] == ["a", "b", " ", [0xC3]]
        assert service.ask("/detokenize", {"tokens": [1, 27, 2]}).json == {"content": "a b"}
        messages = {"messages": [{"role": "user", "content": "ab"}]}
        assert service.ask("/apply-template", messages).json == {"prompt": "ab"}

    def test_paths_have_many_spellings(self, service: Service) -> None:
        for path in ("/v1//chat/completions", "//v1/chat/completions/", "/chat/completions"):
            asked = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
            assert service.ask(path, asked).status == 200
        assert one_spelling("/v1/v1/models") == "/models"
        assert one_spelling("/v1x") == "/v1x"

    def test_metrics_add_up(self) -> None:
        with serving() as own:
            own.chat(max_tokens=8)
            own.chat(max_tokens=8)
            text = own.ask("/metrics").text
        values = dict(line.rsplit(" ", 1) for line in text.splitlines() if line[0] != "#")
        assert values["llamacpp:tokens_predicted_total"] == "16"
        assert values["llamacpp:spec_decode_num_draft_tokens_total"] == "8"
        assert values["llamacpp:spec_decode_num_drafts_total"] == "2"
        assert values['llamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="3"}'] == "2"
        assert values["qdraft_alpha"] == "1"
        assert values['qdraft_texts_total{finish="length"}'] == "2"


def nested(n: int) -> Any:
    """A schema of lists, ``n`` deep."""
    schema: Any = {}
    for _ in range(n):
        schema = {"items": schema}
    return schema


class TestFields:
    def test_null_is_absent_and_unknown_fields_are_ignored(self, service: Service) -> None:
        names = ("max_tokens", "stop", "seed", "temperature", "logit_bias", "stream", "tools", "n")
        reply = service.chat(max_completion_tokens=3, never_heard_of=1, **dict.fromkeys(names))
        assert reply.json["choices"][0]["message"]["content"] == "bcd"

    def test_parts_of_a_message_are_joined(self, service: Service) -> None:
        parts = [{"type": "text", "text": "k"}, {"type": "text", "text": "a"}]
        messages = [{"role": "developer", "content": "x"}, {"role": "user", "content": parts}]
        asked = {"messages": messages, "max_tokens": 1}
        answer = service.ask("/v1/chat/completions", asked).json
        assert answer["choices"][0]["message"]["content"] == "b"
        assert answer["usage"]["prompt_tokens"] == 3

    @pytest.mark.parametrize("bias", [{"3": -100}, [[3, -100]], [[3, False]]])
    def test_a_token_can_be_banned(self, service: Service, bias: Any) -> None:
        content = service.chat(logit_bias=bias, max_tokens=3).json["choices"][0]["message"]
        assert "c" not in content["content"]

    @pytest.mark.parametrize(
        ("fields", "param"),
        [
            ({"max_tokens": "many"}, "max_tokens"),
            ({"max_tokens": 1.5}, "max_tokens"),
            ({"max_tokens": -2}, "max_tokens"),
            ({"max_tokens": 1, "n_predict": 2}, "max_tokens"),
            ({"temperature": True}, "temperature"),
            ({"temperature": -1}, "temperature"),
            ({"top_p": 1.5}, "top_p"),
            ({"top_k": 10**400}, "top_k"),
            ({"seed": 2**64}, "seed"),
            ({"stop": 3}, "stop"),
            ({"stop": [3]}, "stop"),
            ({"stop": "\ud800"}, "stop"),
            ({"n": 0}, "n"),
            ({"n_draft": 64}, "n_draft"),
            ({"n_draft": 3, "speculative": False}, "n_draft"),
            ({"logit_bias": {"a": 1}}, "logit_bias"),
            ({"logit_bias": 3}, "logit_bias"),
            ({"mirostat": 2}, "mirostat"),
            ({"best_of": 3}, "best_of"),
            ({"top_logprobs": 3}, "top_logprobs"),
            ({"logprobs": 3}, "logprobs"),
            ({"dry_sequence_breakers": [1]}, "dry_sequence_breakers"),
            ({"xtc_probability": 2}, "xtc_probability"),
            ({"reasoning_format": "loud"}, "reasoning_format"),
            ({"messages": []}, "messages"),
            ({"messages": ["a"]}, "messages.0"),
            ({"messages": [{"role": "user"}]}, "messages.0.content"),
            ({"messages": [{"role": "king", "content": "a"}]}, "messages.0.role"),
            (
                {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
                "messages.0.content.0",
            ),
            ({"messages": [{"role": "user", "content": "\udc00"}]}, "messages.0.content"),
            ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ],
    )
    def test_what_is_wrong_is_named(self, service: Service, fields: Any, param: str) -> None:
        reply = service.chat(**fields)
        assert reply.status == 400
        assert reply.error["type"] == "invalid_request_error"
        assert reply.error["param"] == param
        assert param.split(".")[0] in reply.error["message"]

    @pytest.mark.parametrize("body", [b"{", b"[]", b"3", b"", b"\xff", b"[" * 100_000])
    def test_a_body_that_is_no_object(self, service: Service, body: bytes) -> None:
        reply = service.ask("/v1/chat/completions", body)
        assert (reply.status, reply.error["type"]) == (400, "invalid_request_error")

    def test_a_prompt_that_is_too_long_names_both_numbers(self, service: Service) -> None:
        reply = service.chat("a" * 300)
        assert reply.status == 400
        error = reply.error
        assert error["type"] == "exceed_context_size_error"
        assert error["code"] == "context_length_exceeded"
        assert (error["n_prompt_tokens"], error["n_ctx"]) == (300, N_CTX)

    def test_a_token_that_does_not_exist(self, service: Service) -> None:
        reply = service.ask("/v1/completions", {"prompt": [1, 99]})
        assert (reply.status, reply.error["param"]) == (400, "prompt")

    def test_what_is_not_here_says_so(self, service: Service) -> None:
        for path in ("/v1/embeddings", "/v1/responses", "/rerank"):
            reply = service.ask(path, {})
            assert (reply.status, reply.error["type"]) == (501, "not_supported_error")
        assert service.ask("/v1/nothing").error["type"] == "not_found_error"
        assert service.ask("/v1/chat/completions").status == 405

    @pytest.mark.parametrize(
        ("asked", "kind"),
        [
            ({"response_format": {"type": "text"}}, None),
            ({"response_format": {"type": "json_object"}}, "json_object"),
            ({"response_format": {"type": "json_object", "schema": SCHEMA}}, "json_schema"),
            (
                {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
                "json_schema",
            ),
            ({"grammar": 'root ::= "a"'}, "grammar"),
            ({"json_schema": SCHEMA}, "json_schema"),
            ({"tools": TOOLS, "tool_choice": "auto"}, None),
            ({"tools": TOOLS, "tool_choice": "required"}, "json_schema"),
        ],
    )
    def test_forms_are_constraints(self, asked: Any, kind: str | None) -> None:
        pytest.importorskip("llguidance")
        fields = Fields({"messages": [{"role": "user", "content": "a"}], **asked})
        form = read_request(CHAT, fields).decode["constraint"]
        assert (form and form.kind) == kind

    @pytest.mark.parametrize(
        ("fields", "param"),
        [
            ({"response_format": {"type": "xml"}}, "response_format"),
            ({"response_format": {"type": "json_schema"}}, "response_format"),
            ({"grammar": "root ::= ["}, "grammar"),
            ({"json_schema": {"type": "color"}}, "json_schema"),
            ({"grammar": 'root ::= "a"', "json_schema": {}}, "json_schema"),
            ({"grammar": 'root ::= "a"', "ignore_eos": True}, "ignore_eos"),
            ({"json_schema": {"const": "\ud800"}}, "json_schema"),
            ({"json_schema": {"minimum": 10**400}}, "json_schema"),
            ({"json_schema": nested(300)}, "json_schema"),
            ({"logit_bias": {"3": 10**400}}, "logit_bias"),
        ],
    )
    def test_a_wrong_form_is_named(self, service: Service, fields: Any, param: str) -> None:
        pytest.importorskip("llguidance")
        reply = service.chat(**fields)
        assert (reply.status, reply.error["param"]) == (400, param)

    def test_forms_without_their_package_name_the_extra(
        self, service: Service, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "llguidance", None)
        reply = service.chat(json_schema=SCHEMA)
        assert (reply.status, reply.error["param"]) == (501, "json_schema")
        assert "qdraft[json]" in reply.error["message"]
        assert service.chat(max_tokens=1).status == 200

    def test_values_that_ask_for_nothing_are_let_through(self) -> None:
        fields = Fields(
            {"messages": [{"role": "user", "content": "a"}], "mirostat": 0, "echo": False}
        )
        assert read_request(CHAT, fields).n == 1
        with pytest.raises(ApiError, match="does not have echo"):
            read_request(CHAT, Fields({"messages": [], "echo": True}))


class TestTools:
    WRITTEN = (
        'I look.\n<tool_call>\n{"name": "look", "arguments": {"at": "é"}}\n</tool_call>\n'
        '<tool_call>{"name": "leap", "arguments": {}}</tool_call>'
    )

    @pytest.mark.parametrize("size", [1, 3, 7, 1000])
    def test_calls_are_split_from_the_content_as_they_stream(self, size: int) -> None:
        reader = ToolReader()
        deltas = []
        for i in range(0, len(self.WRITTEN), size):
            deltas += reader.push(self.WRITTEN[i : i + size])
        deltas += reader.flush()
        assert "".join(delta.get("content", "") for delta in deltas).strip() == "I look."
        calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
        assert [call["function"]["name"] for call in calls] == ["look", "leap"]
        assert [call["index"] for call in calls] == [0, 1]
        assert json.loads(calls[0]["function"]["arguments"]) == {"at": "é"}
        assert len({call["id"] for call in calls}) == 2

    @pytest.mark.parametrize(
        "text", ["a <tool_call> b", "<tool_call>no</tool_call> c", "a <tool", "<tool_call>[1]"]
    )
    def test_what_is_no_call_stays_in_the_content(self, text: str) -> None:
        reader = ToolReader()
        deltas = [delta for letter in text for delta in reader.push(letter)] + reader.flush()
        assert "".join(delta["content"] for delta in deltas) == text
        assert reader.n_calls == 0

    def test_a_forced_call_is_all_of_the_answer(self) -> None:
        schema = call_schema(TOOLS, "required")
        assert [call["properties"]["name"] for call in schema["anyOf"]] == [
            {"const": "look"},
            {"const": "leap"},
        ]
        assert call_schema(TOOLS, "leap")["properties"]["name"] == {"const": "leap"}
        reader = ForcedReader()
        assert reader.push('{"name": "look", ') == []
        reader.push('"arguments": {"at": 1}}')
        (delta,) = reader.flush()
        assert delta["tool_calls"][0]["function"] == {"name": "look", "arguments": '{"at": 1}'}
        assert reader.n_calls == 1

    @pytest.mark.parametrize("named", [True, False])
    def test_the_references_of_parameters_hold_in_a_call(self, named: bool) -> None:
        llguidance = pytest.importorskip("llguidance")
        parameters = {"$ref": "#/$defs/Where", "$defs": {"Where": {"enum": ["here", "there"]}}}
        tools = [
            {"type": "function", "function": {"name": name, "parameters": parameters}}
            for name in ("look", "leap")
        ]
        choice = {"type": "function", "function": {"name": "leap"}} if named else "required"
        messages = [{"role": "user", "content": "a"}]
        fields = Fields({"messages": messages, "tools": tools, "tool_choice": choice})
        form = read_request(CHAT, fields).decode["constraint"]
        matcher = llguidance.LLMatcher(
            llguidance.LLTokenizer("byte"), compile_grammar(form), log_level=0
        )
        for text, is_allowed in (
            ('{"name": "leap", "arguments": "there"}', True),
            ('{"name": "look", "arguments": "here"}', not named),
            ('{"name": "leap", "arguments": "away"}', False),
        ):
            tokens = list(text.encode())
            assert (matcher.validate_tokens(tokens) == len(tokens)) is is_allowed

    def test_tools_need_a_template_that_takes_them(self, service: Service) -> None:
        reply = service.chat(tools=TOOLS)
        assert (reply.status, reply.error["param"]) == (501, "tools")
        assert service.chat(tools=TOOLS, tool_choice="none", max_tokens=1).status == 200

    @pytest.mark.parametrize(
        ("fields", "param"),
        [
            ({"tools": [3]}, "tools.0.function"),
            ({"tools": [{"type": "function", "function": {}}]}, "tools.0.function.name"),
            ({"tools": [{"type": "shell", "function": {}}]}, "tools.0.type"),
            ({"tools": TOOLS, "tool_choice": "maybe"}, "tool_choice"),
            ({"tool_choice": "required"}, "tool_choice"),
            (
                {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "fly"}}},
                "tool_choice",
            ),
        ],
    )
    def test_what_is_wrong_is_named(self, service: Service, fields: Any, param: str) -> None:
        reply = service.chat(**fields)
        assert (reply.status, reply.error["param"]) == (400, param)

    def test_the_answer_has_calls_and_reasoning_apart(self) -> None:
        request = TextRequest(CHAT, tools=tuple(TOOLS))
        summary = summarize([])
        outcome = Outcome(
            0, self.WRITTEN, "Hm.", (), FinishReason.END_OF_GENERATION, 1, 0, 4, 1, summary
        )
        choice = ChatShape(request, "fake").whole([outcome])["choices"][0]
        message = choice["message"]
        assert choice["finish_reason"] == "tool_calls"
        assert message["reasoning_content"] == "Hm."
        assert message["content"].strip() == "I look."
        assert [call["function"]["name"] for call in message["tool_calls"]] == ["look", "leap"]
        shape = ChatShape(request, "fake")
        parts = shape.head(0)
        parts += shape.pieces(0, Chunk("", 1, Origin.TARGET, 0, "Hm."))
        parts += shape.pieces(0, Chunk(self.WRITTEN, 2, Origin.TARGET, 0))
        parts += shape.last(outcome)
        keys = [list(part["choices"][0]["delta"]) for part in parts]
        assert keys[1:] == [["reasoning_content"], ["content"], ["tool_calls"], ["tool_calls"], []]
        assert parts[-1]["choices"][0]["finish_reason"] == "tool_calls"


class TestQueue:
    def test_requests_wait_in_order_and_further_ones_are_refused(self) -> None:
        with serving(n_queue=1) as service:
            service.pair.gate.clear()
            first = service.begin(max_tokens=2)
            eventually(service.pair.waiting.is_set)
            second = service.begin(max_tokens=3)
            eventually(lambda: service.worker.n_waiting == 1)
            refused = service.chat()
            assert (refused.status, refused.error["type"]) == (503, "unavailable_error")
            assert int(refused.headers["retry-after"]) >= 1
            service.pair.gate.set()
            lengths = [
                json.load(connection.getresponse())["usage"]["completion_tokens"]
                for connection in (first, second)
            ]
            assert lengths == [2, 3]

    @pytest.mark.parametrize("stream", [True, False])
    def test_a_client_that_leaves_frees_the_place_within_a_round(self, stream: bool) -> None:
        with serving() as service:
            service.pair.gate.clear()
            leaving = service.begin(stream=stream)
            eventually(service.pair.waiting.is_set)
            leaving.close()
            eventually(service.pair.is_cancelled)
            service.pair.gate.set()
            eventually(lambda: not service.worker.is_busy)
            # The prompt of one token and no more.
            assert service.pair.n_read == 1
            assert service.chat(max_tokens=2).status == 200

    def test_a_client_that_leaves_while_it_waits_never_runs(self) -> None:
        with serving() as service:
            service.pair.gate.clear()
            first = service.begin(max_tokens=2)
            eventually(service.pair.waiting.is_set)
            leaving = service.begin(max_tokens=9)
            eventually(lambda: service.worker.n_waiting == 1)
            leaving.close()
            eventually(lambda: service.worker.n_waiting == 0)
            service.pair.gate.set()
            assert json.load(first.getresponse())["usage"]["completion_tokens"] == 2
            assert 'completion_tokens": 9' not in service.ask("/metrics").text

    def test_a_stream_that_has_nothing_to_say_sends_comments(self) -> None:
        with serving(ping_s=0.01) as service:
            service.pair.gate.clear()
            connection = service.begin(stream=True, max_tokens=2)
            response = connection.getresponse()
            assert [response.readline() for _ in range(4)] == [b": \n", b"\n"] * 2
            service.pair.gate.set()
            assert b"[DONE]" in response.read()
            service.pair.gate.clear()
            quiet = service.begin(stream=True, max_tokens=2, sse_ping_interval=0)
            eventually(service.pair.waiting.is_set)
            service.pair.gate.set()
            assert b": " not in [line[:2] for line in quiet.getresponse().read().splitlines()]

    def test_an_error_after_the_first_event_is_a_part_of_the_stream(self) -> None:
        with serving(ping_s=0.01) as service:
            service.pair.gate.clear()
            running = service.begin(max_tokens=1)
            eventually(service.pair.waiting.is_set)
            late = service.connect()
            asked = {"prompt": "a" * 300, "stream": True}
            late.request("POST", "/v1/completions", json.dumps(asked))
            response = late.getresponse()
            assert response.status == 200
            assert response.readline() == b": \n"
            service.pair.gate.set()
            frames = [line for line in response.read().splitlines() if line.startswith(b"data: ")]
            assert json.loads(frames[-1][6:])["error"]["type"] == "exceed_context_size_error"
            running.getresponse().read()

    def test_the_end_of_the_server_ends_texts(self) -> None:
        with serving() as service:
            service.pair.gate.clear()
            running = service.begin(stream=False)
            eventually(service.pair.waiting.is_set)
            waiting = service.begin()
            eventually(lambda: service.worker.n_waiting == 1)
            service.worker.stop()
            for connection in (running, waiting):
                assert connection.getresponse().status == 503
            assert service.chat().status == 503
            service.pair.gate.set()
            assert service.worker.join(10)
            assert service.pair.closed


class TestConversations:
    def test_a_turn_reads_only_what_is_new(self) -> None:
        with serving() as service:
            first = service.ask("/completion", {"prompt": "hello x", "n_predict": 2}).json
            n_before = service.pair.n_read
            prompt = "hello x" + first["content"] + " a"
            second = service.ask("/completion", {"prompt": prompt, "n_predict": 1}).json
            # The last token of the text before was never decoded: it had no successor yet.
            assert second["timings"]["cache_n"] == len("hello x") + 1
            assert second["timings"]["prompt_n"] == service.pair.n_read - n_before == 3

    def test_two_conversations_are_kept_beside_each_other(self) -> None:
        with serving(n_kept=2) as service:
            for content, n_cached in (("aaaa", 0), ("bbbb", 0), ("aaaax", 4), ("bbbbx", 4)):
                answer = service.chat(content, max_tokens=1).json
                assert answer["timings"]["cache_n"] == n_cached, content
            assert len(service.pair.sessions) == 2
            # A third one takes the place of the one that was not used for longest.
            assert service.chat("cccc", max_tokens=1).json["timings"]["cache_n"] == 0
            assert service.chat("bbbbx", max_tokens=1).json["timings"]["cache_n"] == 4
            assert service.chat("aaaax", max_tokens=1).json["timings"]["cache_n"] == 0

    def test_a_model_with_a_state_keeps_few(self) -> None:
        pair = FakePair()
        pair.contexts.target.n_texts = 2
        kept = KeptSessions(pair, 4)  # type: ignore[arg-type]
        assert len({id(kept.choose([token])) for token in range(1, 5)}) == 1

    def test_a_text_that_needs_the_room_takes_it(self) -> None:
        with serving(n_kept=2) as service:
            service.chat("a" * 150, max_tokens=1)
            assert service.chat("b" * 150, max_tokens=1).json["usage"]["prompt_tokens"] == 150
            first = service.pair.sessions[0]
            assert first.sequences is None

    def test_nothing_is_reused_if_the_client_wants_that(self) -> None:
        with serving() as service:
            for _ in range(2):
                answer = service.chat("abc", max_tokens=1, cache_prompt=False).json
                assert answer["timings"]["cache_n"] == 0


class TestModels:
    def test_one_model_has_any_name(self, service: Service) -> None:
        assert service.chat(model="gpt-4o", max_tokens=1).json["model"] == "fake"

    def test_several_are_loaded_on_demand(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for fits, loaded in ((True, ["one", "two"]), (False, ["two"])):
            monkeypatch.setattr(qdraft.serve.models, "fits_beside", lambda *_, fits=fits: fits)
            with serving("one", "two") as service:
                assert list(service.pairs) == ["one"]
                assert service.chat(model="two", max_tokens=2).json["model"] == "two"
                assert [name for name, pair in service.pairs.items() if not pair.closed] == loaded
                assert service.chat(max_tokens=2).json["model"] == "one"
                reply = service.chat(model="three")
                assert (reply.status, reply.error["code"]) == (404, "model_not_found")
                assert "one, two" in reply.error["message"]

    def test_words_of_a_model_that_is_not_loaded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(qdraft.serve.models, "fits_beside", lambda *_: True)
        with serving("one", "two") as service:
            assert service.ask("/tokenize", {"model": "two", "content": "a"}).json == {
                "tokens": [1]
            }


class TestGate:
    KEYS = Rules(keys=("secret", "other"))

    def test_a_key_is_required(self) -> None:
        with serving(rules=self.KEYS) as service:
            for headers in ({}, {"Authorization": "Bearer no"}, {"X_Api_Key": "sécret"}):
                data = {k: v.encode().decode("latin-1") for k, v in headers.items()}
                reply = service.ask("/v1/models", **data)
                assert (reply.status, reply.error["type"]) == (401, "authentication_error")
            assert service.ask("/metrics", Authorization="Bearer secret").status == 200
            assert service.ask("/metrics", X_Api_Key="other").status == 200
            assert service.ask("/health").status == 200
            assert service.ask("/").status == 200

    def test_other_hosts_are_refused(self, service: Service) -> None:
        assert service.ask("/health", Host="evil.example").status == 403
        assert service.ask("/health", Host="localhost:1").status == 200
        assert [host_name(h) for h in ("[::1]:80", "A.b:8", "", "::1")] == ["::1", "a.b", "", "::1"]

    def test_pages_of_this_machine_may_use_it(self) -> None:
        preflight = {"method": "OPTIONS", "Access_Control_Request_Method": "POST"}
        with serving(rules=self.KEYS) as service:
            good = service.ask("/v1/models", Origin="http://localhost:3000", **preflight)
            assert good.status == 204
            assert good.headers["access-control-allow-origin"] == "http://localhost:3000"
            for origin in ("https://evil.example", "null", "http://localhost.evil.example"):
                bad = service.ask("/v1/models", Origin=origin, **preflight)
                assert bad.status == 403
                assert "access-control-allow-origin" not in bad.headers
            # An error is readable for the page, too.
            refused = service.ask("/v1/models", Origin="http://127.0.0.1:9")
            assert refused.status == 401
            assert refused.headers["access-control-allow-origin"] == "http://127.0.0.1:9"

    def test_named_origins_may_use_it(self) -> None:
        with serving(rules=Rules(origins=("https://good.example",))) as service:
            assert service.ask("/health", Origin="https://good.example").status == 200
            assert service.ask("/health", Origin="https://evil.example").status == 403


def test_many_clients_at_once() -> None:
    """Requests with and without a stream, of which half leave: every other one is whole."""
    with serving(n_queue=100) as service:
        service.pair.gate.clear()
        leaving = [service.begin(stream=bool(i % 2)) for i in range(8)]
        texts: list[str] = []

        def ask(i: int) -> None:
            texts.append(
                service.chat(max_tokens=i % 5 + 1).json["choices"][0]["message"]["content"]
            )

        threads = [threading.Thread(target=ask, args=(i,)) for i in range(16)]
        for thread in threads:
            thread.start()
        eventually(lambda: service.worker.n_waiting == 23)
        for connection in leaving:
            connection.close()
        eventually(lambda: service.worker.n_waiting == 16)
        service.pair.gate.set()
        for thread in threads:
            thread.join(20)
        assert sorted(texts) == sorted(ALPHABET[: i % 5 + 1] for i in range(16))
        eventually(lambda: not service.worker.is_busy)
