"""`qdraft serve` on the demo pair, as a person and a program meet it."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from invoke import one_error, qdraft

pytest.importorskip("uvicorn", reason="needs the serve extra")
pytest.importorskip("starlette", reason="needs the serve extra")

TOP = Path(__file__).parent.parent


def openai_block(document: str) -> str:
    """The Python of a document that calls a server through OpenAI's client."""
    text = (TOP / document).read_text(encoding="utf-8")
    return next(
        block for block in re.findall(r"```python\n(.*?)```", text, re.S) if "openai" in block
    )


COUPLED = ("--verification", "coupled")


class Running:
    """A server in a process of its own; ``lines`` are what it said until it was ready."""

    def __init__(self, *args: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "qdraft", "serve", "--port", "0", *args],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stderr
        self.lines = []
        for line in self.process.stderr:
            self.lines.append(line)
            if match := re.search(r"listening on (http://\S+) ", line):
                self.address = match[1]
                return
        raise AssertionError("".join(self.lines))

    def ask(self, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        with urllib.request.urlopen(self.address + path, data, timeout=60) as reply:
            return json.load(reply)

    def stop(self, number: int) -> tuple[str, str, int]:
        self.process.send_signal(number)
        out, err = self.process.communicate(timeout=60)
        return out, err, self.process.returncode


@pytest.fixture(scope="module")
def running(smollm2: tuple[Path, Path]) -> Iterator[Running]:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("QDRAFT_MODELS", raising=False)
        server = Running(
            "-m", str(smollm2[0]), "-d", str(smollm2[1]), "-c", "512", "-t", "1", *COUPLED
        )
    yield server
    if server.process.poll() is None:
        server.stop(signal.SIGKILL)


@pytest.mark.real
class TestDemoPair:
    def test_it_says_what_runs(self, running: Running) -> None:
        said = "".join(running.lines)
        for words in (
            "target smollm2-F16.gguf (F16",
            "draft smollm2-Q2_K.gguf",
            "context 512 tokens",
        ):
            assert words in said
        model = running.ask("/v1/models")["data"][0]
        assert model["id"] == "smollm2-F16"
        assert (model["meta"]["n_ctx"], model["meta"]["draft"]["ftype"]) == (512, "Q2_K")
        assert running.ask("/props")["qdraft"]["kv"]["shared"] is True

    def test_the_client_of_the_readme(
        self, running: Running, capsys: pytest.CaptureFixture[str]
    ) -> None:
        pytest.importorskip("openai", reason="needs the test extra")
        code = openai_block("README.md").replace("http://127.0.0.1:8080", running.address)
        code = code.replace("stream=True", "stream=True, max_tokens=8, temperature=0")
        exec(compile(code, "README", "exec"), {"__name__": "README"})
        shown = capsys.readouterr().out
        messages = [{"role": "user", "content": "Why is the sky blue?"}]
        asked = {"messages": messages, "max_tokens": 8, "temperature": 0}
        answer = running.ask("/v1/chat/completions", asked)
        assert shown == answer["choices"][0]["message"]["content"]
        assert answer["timings"]["cache_n"] == answer["usage"]["prompt_tokens"] - 1

    def test_the_client_of_the_guide(
        self, running: Running, capsys: pytest.CaptureFixture[str]
    ) -> None:
        pytest.importorskip("openai", reason="needs the test extra")
        code = openai_block("docs/guides/serve.md").replace(
            "http://127.0.0.1:8080", running.address
        )
        code = code.replace('model="any"', 'model="any", max_tokens=6')
        exec(compile(code, "guide", "exec"), {"__name__": "guide"})
        assert "'n_draft': 4" in capsys.readouterr().out

    def test_a_text_is_that_of_run_for_the_same_seed(
        self, running: Running, smollm2: tuple[Path, Path]
    ) -> None:
        files = ("-m", str(smollm2[0]), "-d", str(smollm2[1]), "-c", "512", "-t", "1")
        asked = ("-p", "Tell a story.", "-n", "24", "--seed", "5", "--json", *COUPLED)
        text = json.loads(qdraft("run", *files, *asked).stdout)["text"]
        messages = [{"role": "user", "content": "Tell a story."}]
        body = {"messages": messages, "max_tokens": 24, "seed": 5, "cache_prompt": False}
        answers = [
            running.ask("/v1/chat/completions", {**body, **more})
            for more in ({}, {"speculative": False}, {"n_draft": 2})
        ]
        assert [each["choices"][0]["message"]["content"] for each in answers] == [text] * 3

    def test_an_answer_keeps_to_a_schema(self, running: Running) -> None:
        pytest.importorskip("llguidance")
        schema = {
            "type": "object",
            "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
            "required": ["name", "age"],
            "additionalProperties": False,
        }
        form = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema}}
        asked = {"messages": [{"role": "user", "content": "Describe a person."}], "seed": 3}
        answer = running.ask(
            "/v1/chat/completions", {**asked, "response_format": form, "max_tokens": 80}
        )
        choice = answer["choices"][0]
        assert choice["finish_reason"] == "stop"
        person = json.loads(choice["message"]["content"])
        assert set(person) == {"name", "age"}
        assert isinstance(person["age"], int)

    def test_a_second_turn_reads_only_what_is_new(self, running: Running) -> None:
        messages = [{"role": "user", "content": "Count to three."}]
        asked = {"messages": messages, "max_tokens": 8, "temperature": 0}
        first = running.ask("/v1/chat/completions", asked)
        messages += [first["choices"][0]["message"], {"role": "user", "content": "On."}]
        second = running.ask("/v1/chat/completions", asked)
        n_known = first["usage"]["total_tokens"] - 1
        assert second["timings"]["cache_n"] == n_known
        assert second["timings"]["prompt_n"] == second["usage"]["prompt_tokens"] - n_known

    def test_a_signal_ends_it_within_a_round(self, running: Running) -> None:
        asked = {"messages": [{"role": "user", "content": "Tell a story."}], "stream": True}
        request = urllib.request.Request(
            running.address + "/v1/chat/completions", json.dumps(asked).encode()
        )
        with urllib.request.urlopen(request, timeout=60) as reply:
            assert reply.readline().startswith(b"data: ")
            out, err, status = running.stop(signal.SIGTERM)
            frames = [line for line in reply.read().splitlines() if line]
        assert (
            json.loads(frames[-1].removeprefix(b"data: "))["error"]["type"] == "unavailable_error"
        )
        assert (out, status) == ("", 0)
        assert err.splitlines()[-1] == "info: stopped"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--host", "0.0.0.0"), "--host 0.0.0.0 lets other machines use the server"),
        (("--port", "70000"), "--port"),
        (("--host", "no such host", "--no-api-key"), "qdraft cannot listen on no such host"),
        (("--api-key", ""), "--api-key is empty"),
        (("--pairs", "a,b", "-m", "c"), "--pairs cannot be combined with --model"),
        (("--pairs", "nothing"), "no pair is called nothing"),
        (("--pairs", ","), "--pairs names no pair"),
        (("--alias", "a", "--pairs", "b"), "--alias cannot be combined with --pairs"),
        (("--top-p", "2"), "--top-p is 2"),
        (("--keep-sessions", "9"), "--keep-sessions"),
    ],
)
def test_mistakes(args: tuple[str, ...], message: str) -> None:
    assert message in one_error(qdraft("serve", *args), 2)


def test_a_missing_file_ends_it(tmp_path: Path) -> None:
    result = qdraft("serve", "--port", "0", "-m", str(tmp_path / "none.gguf"))
    assert result.returncode == 3
    assert result.stderr.count("error: ") == 1
    assert result.stderr.count("none.gguf does not exist") == 1


def test_a_missing_extra_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qdraft.cli.serve.find_spec", lambda name: None)
    result = qdraft("serve")
    assert "qdraft serve needs starlette and uvicorn" in one_error(result, 2)
    assert "qdraft[serve]" in result.stderr
