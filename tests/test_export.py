"""`qdraft export`: a pair as other programs take it."""

from __future__ import annotations

import configparser
import contextlib
import json
import shlex
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import tiny
from invoke import one_error, qdraft, schema
from servers import free_port

from qdraft.pairs.export import LLAMA_CPP, PROGRAMS, Settings, export
from qdraft.paths import cache_dir

# The user's cache, before the tests have one of their own.
TOOLS = cache_dir() / "llama.cpp"


@pytest.fixture
def pair(tmp_path: Path) -> tuple[str, ...]:
    """The options of a pair whose paths need quotes."""
    folder = tmp_path / "it's here"
    folder.mkdir()
    target = tiny.windowed(folder / "big one.gguf")
    draft = tiny.windowed(folder / "small.gguf")
    return ("-m", str(target), "-d", str(draft))


def words(program: str, *args: str) -> list[str]:
    """The command line as a shell reads it."""
    done = qdraft("export", program, *args)
    assert done.returncode == 0, done.stderr
    return shlex.split(done.stdout.replace("\\\n", ""), comments=True)


def pairs(line: Sequence[str]) -> dict[str, str]:
    return dict(zip(line[1::2], line[2::2], strict=True))


@pytest.mark.parametrize("program", ["llama-server", "llama-cli"])
def test_llama_cpp(pair: tuple[str, ...], program: str) -> None:
    given = ("--draft-policy", "fixed", "--n-draft", "6", "-t", "3", "-ctk", "q8_0", "-c", "256")
    line = words(program, *pair, *given, "-ngl", "all", "-ot", "ffn=CPU", "-fa", "on")
    assert line[0] == program
    assert pairs(line) == {
        "--model": pair[1],
        "--spec-draft-model": pair[3],
        "--spec-type": "draft-simple",
        "--spec-draft-n-max": "6",
        "--spec-draft-n-min": "0",
        "--spec-draft-p-min": "0",
        "--ctx-size": "256",
        "--gpu-layers": "all",
        "--override-tensor": "ffn=CPU",
        "--threads": "3",
        "--cache-type-k": "q8_0",
        "--spec-draft-type-k": "q8_0",  # a draft's cache is f16 there unless it is set
        "--flash-attn": "on",
    }


def test_the_context_is_what_qdraft_takes(pair: tuple[str, ...]) -> None:
    assert pairs(words("llama-server", *pair))["--ctx-size"] == "512"  # all that the model has
    assert pairs(words("llama-server", *pair, "-c", "0"))["--ctx-size"] == "512"


def test_tuned_settings_stand_and_the_command_line_wins(
    pair: tuple[str, ...], tmp_path: Path
) -> None:
    models, template = tmp_path / "models.yaml", tmp_path / "plain.jinja"
    template.write_text("{{ messages[0]['content'] }}")
    models.write_text(
        f"pairs:\n  mine:\n    target: {pair[1]}\n    draft: {pair[3]}\n    context: 128\n"
        f"    template: {template}\n    devices: {{device: none}}\n"
        "    tuned: {draft-policy: confidence, n-draft: 7, p-min: 0.4, threads: 2}\n"
    )
    mine = ("--pair", "mine", "--models-file", str(models))
    line = words("llama-server", *mine)
    assert "--jinja" in line
    line.remove("--jinja")
    tuned = pairs(line)
    expected = {
        "--spec-draft-n-max": "7",
        "--spec-draft-p-min": "0.4",
        "--ctx-size": "128",
        "--threads": "2",
        "--device": "none",
        "--chat-template-file": str(template),
    }
    assert tuned.items() >= expected.items()
    line = words("koboldcpp", *mine, "--draft-policy", "fixed", "--n-draft", "3")
    assert pairs(line)["--draftamount"] == "3"
    assert words("ik_llama.cpp", *mine)[5:7] == ["--spec-type", "draft:n_max=7,p_min=0.4"]
    entry = configparser.ConfigParser()
    entry.read_string(qdraft("export", "preset", *mine).stdout)
    assert entry["mine"]["spec-draft-model"] == pair[3]
    assert entry["mine"]["spec-draft-n-max"] == "7"
    assert entry["mine"]["jinja"] == "true"


def test_what_a_program_has_no_option_for_is_named(pair: tuple[str, ...]) -> None:
    given = ("--draft-policy", "fixed", "--p-min", "0.3", "-ctk", "q8_0")
    notes = qdraft("export", "koboldcpp", *pair, *given).stderr
    for name in ("cache-type-k", "spec-draft-type-k", "spec-draft-p-min"):
        assert name in notes
    assert qdraft("export", "koboldcpp", *pair, *given, "--quiet").stderr == ""
    assert "qdraft chooses the draft length in each round" in qdraft("export", *pair).stderr


def test_lm_studio_and_ollama(pair: tuple[str, ...]) -> None:
    body = json.loads(qdraft("export", "lm-studio", *pair).stdout)
    assert body == {"model": "big one", "draft_model": "small"}
    done = qdraft("export", "ollama", *pair, "-t", "2")
    lines = done.stdout.splitlines()
    assert lines[2:] == [f"FROM {pair[1]}", "PARAMETER num_ctx 512", "PARAMETER num_thread 2"]
    assert "without a draft" in lines[1]
    assert "without a draft" in done.stderr


def test_all_of_them_in_json(pair: tuple[str, ...]) -> None:
    done = qdraft("export", *pair, "--json")
    outcome = json.loads(done.stdout)
    jsonschema.validate(outcome, schema("export"))
    by_program = {each["program"]: each for each in outcome["exports"]}
    assert list(by_program) == list(PROGRAMS)
    assert by_program["llama-server"]["checked_against"] == LLAMA_CPP
    assert by_program["llama-server"]["command"] == words("llama-server", *pair)
    assert by_program["vllm"]["text"] == ""
    assert "GGUF" in by_program["vllm"]["reason"]
    text = qdraft("export", *pair)
    assert "vllm is left out: " in text.stderr
    for program, each in by_program.items():
        assert (f"# {program}\n{each['text']}" in text.stdout) == bool(each["text"])


def test_repetitions(pair: tuple[str, ...]) -> None:
    line = words("llama-server", "-m", pair[1], "--drafter", "ngram")
    assert line[3:5] == ["--spec-type", "ngram-simple"]
    assert "--spec-draft-n-max" not in line
    both = pairs(words("llama-server", *pair, "--drafter", "hybrid"))
    assert both["--spec-type"] == "ngram-simple,draft-simple"
    assert "koboldcpp cannot run this pair" in one_error(
        qdraft("export", "koboldcpp", "-m", pair[1], "--drafter", "ngram", "--quiet"), 2
    )


def test_a_file_is_written_once(pair: tuple[str, ...], tmp_path: Path) -> None:
    path = tmp_path / "preset.ini"
    args = ("export", "preset", *pair, "--quiet", "-o", str(path))
    done = qdraft(*args)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert path.read_text() == qdraft("export", "preset", *pair).stdout
    path.write_text("mine")
    assert one_error(qdraft(*args), 2) == f"error: {path} already exists"
    assert path.read_text() == "mine"
    assert qdraft(*args, "--force").returncode == 0
    assert path.read_text() != "mine"


@pytest.mark.parametrize(
    ("args", "status", "message"),
    [
        (("lama",), 2, "PROGRAM is lama but must be one of llama-server, llama-cli, preset"),
        (("vllm",), 2, "vllm cannot run this pair: vLLM reads a GGUF file by a plugin"),
        (("--n-draft", "0"), 2, "--n-draft is 0 but must be at least 1"),
        (("--force",), 2, "--force needs --out"),
        (("-o", f"{__file__}/preset.ini"), 2, "preset.ini cannot be written"),
        (("-ctk", "q9"), 2, "--cache-type-k is q9"),
    ],
)
def test_what_is_refused(
    pair: tuple[str, ...], args: tuple[str, ...], status: int, message: str
) -> None:
    assert message in one_error(qdraft("export", *pair, *args, "--quiet"), status)


def test_a_target_without_a_draft(pair: tuple[str, ...]) -> None:
    done = qdraft("export", "-m", pair[1], "--quiet")
    assert f"there is no draft of {pair[1]} to export" in one_error(done, 2)
    assert "hint: make one with qdraft make" in done.stderr


def test_a_preset_cannot_hold_every_path() -> None:
    """# and ; begin a comment in the middle of a value."""
    for name in ("a#b.gguf", "a;b.gguf", "a\nb.gguf"):
        settings = Settings(name="x", target=Path(name), draft=Path("d"), n_ctx=64, n_draft=4)
        exported = export("preset", settings)
        assert (exported.text, bool(exported.reason)) == ("", True)
        assert export("llama-server", settings).command


def tool(name: str) -> Path:
    """One of the tools that benchmarks/llamacpp.py builds, of the version that is installed."""
    try:
        built = (TOOLS / version("llama-cpp-python")).glob(f"build*/bin/{name}")
    except PackageNotFoundError:
        pytest.skip("needs llama-cpp-python")
    for path in built:
        return path
    pytest.skip(f"needs {name} of this version: python benchmarks/llamacpp.py builds it")


@contextlib.contextmanager
def started(command: Sequence[str]) -> Iterator[str]:
    """A server on a port of its own, once it is ready: its address."""
    port = free_port()
    process = subprocess.Popen(
        [*command, "--port", str(port), "--no-repack"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            assert process.poll() is None, "the server has ended"
            with contextlib.suppress(urllib.error.URLError, ConnectionError):
                urllib.request.urlopen(f"{address}/health", timeout=5)
                break
            time.sleep(0.1)
        yield address
    finally:
        process.terminate()
        process.wait(timeout=30)


def ask(address: str, **body: Any) -> dict[str, Any]:
    """The timings of a chat's answer."""
    message = {"role": "user", "content": "Why is the sky blue?"}
    data = json.dumps({"messages": [message], "max_tokens": 16, **body}).encode()
    request = urllib.request.Request(
        f"{address}/v1/chat/completions", data, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        return dict(json.load(response)["timings"])


@pytest.mark.real
class TestStarted:
    """llama.cpp's programs take what is printed, and draft."""

    @pytest.fixture
    def files(self, shallow: tuple[Path, Path]) -> tuple[str, ...]:
        context = ("-c", "256", "-t", "1", "-ctk", "q8_0", "-ctv", "q8_0", "-fa", "on")
        return ("-m", str(shallow[0]), "-d", str(shallow[1]), *context)

    def test_llama_server(self, files: tuple[str, ...]) -> None:
        program = tool("llama-server")
        _, *options = words("llama-server", *files, "--draft-policy", "fixed", "--n-draft", "5")
        with started([str(program), *options]) as address:
            assert ask(address, temperature=0)["draft_n"] > 0

    def test_a_preset(self, files: tuple[str, ...], tmp_path: Path) -> None:
        program = tool("llama-server")
        path = tmp_path / "preset.ini"
        assert qdraft("export", "preset", *files, "-o", str(path)).returncode == 0
        with started([str(program), "--models-preset", str(path)]) as address:
            assert ask(address, temperature=0, model="shallow-Q4_1")["draft_n"] > 0

    def test_llama_cli(self, files: tuple[str, ...]) -> None:
        program = tool("llama-cli")
        _, *options = words("llama-cli", *files)
        done = subprocess.run(
            [program, *options, "--no-repack", "-p", "Hi", "-n", "8", "--single-turn"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
