"""`qdraft` as a person or a script meets it: streams, exit codes, errors, interrupt."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import jsonschema
import pytest
import tiny
from invoke import one_error, qdraft, qdraft_process, schema

from qdraft import EngineParams, Pair, PairSpec, SamplingParams
from qdraft.cli.escapes import process_escapes
from qdraft.cli.options.devices import parse_gpu_layers, parse_tensor_split
from qdraft.cli.options.output import RunOutputOptions
from qdraft.cli.options.sampling import parse_logit_bias
from qdraft.cli.options.text import TextOptions, read_prompt
from qdraft.cli.run import show_text
from qdraft.decoding.records import Chunk
from qdraft.errors import UsageError
from qdraft.llama.quantize import Recipe, quantize

PROMPT = ("-p", "What is the capital of France?")
FIXED = ("--draft-policy", "fixed")  # draft lengths, and so seeded texts, do not follow the clock


class TestMistakes:
    """One line, a hint, an exit code, no traceback; none of these loads a model."""

    @pytest.mark.parametrize(
        ("args", "message"),
        [
            (("run", "--tempp", "1"), "--tempp"),
            (("walk",), "walk"),
            (("run", *PROMPT, "-n", "many"), "--n-predict"),
            (("run", *PROMPT, "--top-p", "1.5"), "--top-p is 1.5"),
            (("run", *PROMPT, "-n", "-3"), "--n-predict is -3"),
            (("run", *PROMPT, "--n-draft", "99"), "--n-draft is 99"),
            (("run", *PROMPT, "--stop", ""), "--stop"),
            (("run", *PROMPT, "-ngl", "some"), "--gpu-layers is some"),
            (("run", *PROMPT, "-ts", "a,b"), "--tensor-split is a,b"),
            (("run", *PROMPT, "-l", "12"), "--logit-bias is 12"),
            (("run", *PROMPT, "-ctk", "q3"), "--cache-type-k is q3"),
            (("run", *PROMPT, "-ctv", "q8_0", "-fa", "off"), "needs flash attention"),
            (("run", *PROMPT, "-b", "64", "-ub", "128"), "--ubatch-size is 128"),
            (("run", *PROMPT, "-d", "draft.gguf"), "needs a target"),
            (
                ("run", *PROMPT, "-m", "a.gguf", "--pair", "smollm2"),
                "--pair cannot be combined with --model",
            ),
            (
                ("run", *PROMPT, "-m", "a", "-d", "b", "--no-draft"),
                "--model-draft cannot be combined with --no-draft",
            ),
            (
                ("run", *PROMPT, "-m", "a", "--models-file", "b"),
                "--models-file cannot be combined with",
            ),
            (
                ("run", *PROMPT, "--no-draft", "-cd", "64"),
                "--ctx-size-draft cannot be combined with --no-draft",
            ),
            (
                ("run", *PROMPT, "--no-draft", "--share-kv", "on"),
                "--share-kv cannot be combined with",
            ),
            (
                ("run", *PROMPT, "-m", "a", "-d", "b", "--drafter", "ngram"),
                "--model-draft cannot be combined with --drafter",
            ),
            (
                ("run", *PROMPT, "--drafter", "ngram", "-cd", "64"),
                "--ctx-size-draft cannot be combined with",
            ),
            (("run", *PROMPT, "--drafter", "guess"), "--drafter is guess"),
            (("run", *PROMPT, "--share-kv", "maybe"), "--share-kv is maybe"),
            (("run", *PROMPT, "--verification", "all"), "--verification is all"),
            (("run", *PROMPT, "-c", "4294967300"), "--ctx-size is 4294967300"),
            (("run", *PROMPT, "-t", "100000"), "--threads is 100000"),
            (("run", *PROMPT, "--json", "--color"), "--color cannot be combined with --json"),
            (("run", *PROMPT, "--quiet", "--verbose"), "--verbose cannot be combined with --quiet"),
            (("run", *PROMPT, "-f", "x.txt"), "--prompt cannot be combined with --file"),
            (("run", "-f", "no-such-file.txt"), "cannot be read"),
            (("run", *PROMPT, "--pair", "nothing"), "no pair is called nothing"),
            (("run", *PROMPT, "--models-file", "none.yaml"), "cannot be read"),
        ],
    )
    def test_usage(self, args: tuple[str, ...], message: str) -> None:
        assert message in one_error(qdraft(*args), 2)

    def test_not_a_model(self, tmp_path: Path) -> None:
        assert "does not exist" in one_error(
            qdraft("run", *PROMPT, "-m", "none.gguf", "--no-draft"), 3
        )
        page = tmp_path / "page.gguf"
        page.write_text("<!DOCTYPE html>")
        assert "is a web page" in one_error(
            qdraft("run", *PROMPT, "-m", str(page), "--no-draft"), 3
        )

    def test_demo_extra_missing(self, tmp_path: Path) -> None:
        """A pair whose package is not there names the extra to install."""
        models = tmp_path / "models.yaml"
        models.write_text(
            f"pairs: {{p: {{target: F16, source: {{extra: demo, sha256: '{'0' * 64}', "
            "files: [{package: not-there, path: x}]}}}"
        )
        result = qdraft(
            "run",
            *PROMPT,
            "--pair",
            "p",
            "--models-file",
            str(models),
            QDRAFT_CACHE_DIR=str(tmp_path),
        )
        assert "not-there, which is not installed" in one_error(result, 2)
        assert "qdraft[demo]" in result.stderr


def test_without_a_command_the_help_is_all() -> None:
    result = qdraft()
    assert "Usage" in result.stdout
    assert result.stderr == ""


def test_the_prompt_is_read_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same from a file and from standard input; one newline at the end is the file's."""
    file = tmp_path / "prompt.txt"
    for data, text in (
        (b"a\r\nb\r\n", "a\nb"),
        (b"\xef\xbb\xbfhello", "hello"),
        (b"two\n\n", "two\n"),
        ("日本".encode(), "日本"),
        # As PowerShell's > writes, and other editors.
        (b"\xff\xfe" + "é\r\n日\r\n".encode("utf-16-le"), "é\n日"),
        (b"\xfe\xff" + "é\n".encode("utf-16-be"), "é"),
        (b"\xff\xfe\0\0" + "é".encode("utf-32-le"), "é"),
    ):
        file.write_bytes(data)
        assert read_prompt(None, str(file)) == text
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data)))
        assert read_prompt(None, "-") == text
    file.write_bytes(b"caf\xe9")
    with pytest.raises(UsageError, match="not UTF-8"):
        read_prompt(None, str(file))
    file.write_bytes(b"\xff\xfea")
    with pytest.raises(UsageError, match="not UTF-16") as caught:
        read_prompt(None, str(file))
    assert "UTF-8" in str(caught.value.hint)
    with pytest.raises(UsageError, match="--prompt is not Unicode text: character 2"):
        read_prompt("a\udcff", None)  # a byte of the command line that is no text
    with pytest.raises(UsageError, match="cannot be the name"):
        read_prompt(None, "a\0b")


class TestStandardInput:
    """Text on it goes before the prompt, as with ollama and llm; it was dropped without a word.

    https://github.com/simonw/llm/issues/153
    """

    @pytest.fixture
    def descriptor(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
        """Makes a descriptor standard input; it is closed at the end."""
        with ExitStack() as stack:

            def use(descriptor: int) -> None:
                stream = stack.enter_context(os.fdopen(descriptor, encoding="utf-8"))
                monkeypatch.setattr("sys.stdin", stream)

            yield use

    def test_a_file_or_a_pipe_with_data_is_joined(
        self, tmp_path: Path, descriptor: Callable[[int], None]
    ) -> None:
        report = tmp_path / "report.txt"
        report.write_text("The word is walrus.\n")
        for prompt, file in (("Which?", None), (None, str(tmp_path / "p.txt")), ("Which?", "-")):
            (tmp_path / "p.txt").write_text("Which?\n")
            descriptor(os.open(report, os.O_RDONLY))
            assert read_prompt(prompt, file) == "The word is walrus.\n\nWhich?"
            read_end, write_end = os.pipe()
            os.write(write_end, report.read_bytes())
            os.close(write_end)
            descriptor(read_end)
            assert read_prompt(prompt, file) == "The word is walrus.\n\nWhich?"

    def test_an_open_pipe_without_a_writer_is_left_alone(
        self,
        descriptor: Callable[[int], None],
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        """Under cron, CI and ssh; a read would never return."""
        monkeypatch.setattr("qdraft.cli.standard_input.PATIENCE_S", 0)
        read_end, write_end = os.pipe()
        descriptor(read_end)
        assert read_prompt("Which?", None) == "Which?"
        assert "standard input is an open pipe without data, and is not read" in caplog.text
        os.close(write_end)
        caplog.clear()
        assert read_prompt("Which?", None) == "Which?"
        assert not caplog.text

    def test_a_device_is_not_read(self, descriptor: Callable[[int], None]) -> None:
        descriptor(os.open("/dev/zero", os.O_RDONLY))
        assert read_prompt("Which?", None) == "Which?"

    @pytest.mark.parametrize("stream", [None, "closed"])
    def test_there_may_be_none(self, monkeypatch: pytest.MonkeyPatch, stream: str | None) -> None:
        closed = io.TextIOWrapper(io.BytesIO())
        closed.close()
        monkeypatch.setattr("sys.stdin", stream and closed)
        assert read_prompt("Which?", None) == "Which?"


class TestEscapes:
    r"""Those that llama.cpp processes, in --prompt and --stop; ``--stop '\n'`` never stopped.

    https://github.com/ggml-org/llama.cpp/issues/1362
    """

    @pytest.mark.parametrize(
        ("text", "meaning"),
        [
            (r"a\nb\r\t\'\"\\", "a\nb\r\t'\"\\"),
            (r"\x41\xc3\xa9\x4g\x4", r"Aé\x4g\x4"),
            (r"\q \d+ \0 \u00e9", r"\q \d+ \0 \u00e9"),
            ("\\", "\\"),
            (r"\\n", r"\n"),
            ("日本", "日本"),
        ],
    )
    def test_escapes_are_those_of_llama_cpp(self, text: str, meaning: str) -> None:
        assert process_escapes(text, "--prompt") == meaning
        assert process_escapes(text, "--prompt", literally=True) == text

    def test_bytes_that_are_no_text_are_refused(self) -> None:
        with pytest.raises(UsageError, match=r"^--stop is not UTF-8 text, because of its escapes$"):
            process_escapes(r"\xff", "--stop")
        for literally in (True, False):  # a byte of the command line as Python stores it
            with pytest.raises(UsageError, match=r"^--stop is not Unicode text: character 1$"):
                process_escapes("\udcff", "--stop", literally=literally)

    def test_prompt_and_stop_strings_have_them_and_files_do_not(self, tmp_path: Path) -> None:
        file = tmp_path / "code.py"
        file.write_text(r"print('a\nb')")
        given = {"prompt": r"a\nb", "stop": [r"\n", "x"], "system": r"a\nb"}
        options = TextOptions(**given)
        assert options.read_prompt() == "a\nb"
        assert options.stops() == ("\n", "x")
        assert options.system_message() == r"a\nb"
        options = TextOptions(**given, no_escape=True)
        assert options.read_prompt() == r"a\nb"
        assert options.stops() == (r"\n", "x")
        assert TextOptions(file=str(file)).read_prompt() == r"print('a\nb')"


def test_help_and_version() -> None:
    top = qdraft("--help")
    assert top.returncode == 0
    assert "run" in top.stdout
    page = qdraft("run", "--help")
    for option in ("--prompt", "--n-draft", "-ngl", "--flash-attn", "--check", "--json"):
        assert option in page.stdout
    for default in ("0.8", "40", "0.95", "0.05", "64", "4096, or", "auto", "f16"):
        assert re.search(rf"default:\s+\(?{re.escape(default)}", page.stdout), default
    assert max(len(line) for line in page.stdout.splitlines()) <= 80
    assert re.match(r"qdraft \S+, llama-cpp-python \S+\n$", qdraft("--version").stdout)


def test_option_values() -> None:
    assert [parse_gpu_layers(t, "x") for t in ("auto", "all", "0", "12")] == [None, -1, 0, 12]
    assert parse_tensor_split("3,1") == (3.0, 1.0)
    assert parse_tensor_split(None) == ()
    assert parse_logit_bias(["15043+1", "7-0.5", "3-inf", "7-0.5"]) == {
        15043: 1.0,
        7: -1.0,
        3: -float("inf"),
    }
    for bad in ("x", "-1", "1.5", ""):
        with pytest.raises(UsageError):
            parse_gpu_layers(bad, "x")


@pytest.mark.real
@pytest.mark.usefixtures("smollm2")
class TestRun:
    def test_text_on_stdout_talk_on_stderr(self) -> None:
        result = qdraft_process("run", *PROMPT, *FIXED, "--temp", "0", "-n", "48", "--check")
        assert result.returncode == 0, result.stderr
        assert result.stdout.startswith("The capital of France is Paris")
        for word in (
            "tokens",
            "t/s",
            "first token",
            "alpha",
            "draft yield",
            "tau",
            "rounds",
            "verdict",
            "check",
        ):
            assert word in result.stderr
        for noise in ("llama_", "ggml_", "Traceback", "\x1b"):
            assert noise not in result.stdout + result.stderr
        assert "same as the target alone" in result.stderr or "forked at token" in result.stderr

    def test_json_matches_its_schema(self) -> None:
        for extra in (("--check",), ("--no-draft", "--logprobs", "2"), ("-n", "0"), ("-n", "1")):
            result = qdraft("run", *PROMPT, "-n", "24", "--seed", "7", "--json", *extra)
            report = json.loads(result.stdout)
            jsonschema.validate(report, schema("run"))
            assert report["seed"] == 7
            assert len(report["tokens"]) == report["summary"]["n_tokens"]
            assert (report["draft"] is None) == ("--no-draft" in extra)
            tokens = [each["token"] for each in report["logprobs"] or ()]
            assert tokens == (report["tokens"] if "--logprobs" in extra else [])
            assert sum(r["n_emitted"] for r in report["rounds"]) == len(report["tokens"])

    def test_a_drawn_seed_is_printed_and_repeats_the_text(self) -> None:
        """A seed that was drawn is printed, and gives the same text again.

        https://github.com/abetlen/llama-cpp-python/issues/1809
        """
        first = qdraft("run", *PROMPT, *FIXED, "-n", "24", "--temp", "1.5")
        printed = re.search(r"seed (\d+)", first.stderr)
        assert printed
        again = qdraft("run", *PROMPT, *FIXED, "-n", "24", "--temp", "1.5", "--seed", printed[1])
        other = qdraft("run", *PROMPT, *FIXED, "-n", "24", "--temp", "1.5")
        assert first.stdout == again.stdout != other.stdout

    def test_the_prompt_from_stdin_or_a_file(self, tmp_path: Path) -> None:
        asked = qdraft("run", *PROMPT, "-n", "8", "--temp", "0", "--quiet")
        assert asked.stderr == ""
        file = tmp_path / "prompt.txt"
        file.write_text(PROMPT[1] + "\n")
        for result in (
            qdraft("run", "-n", "8", "--temp", "0", "--quiet", stdin=PROMPT[1]),
            qdraft("run", "-p", "-", "-n", "8", "--temp", "0", "--quiet", stdin=PROMPT[1] + "\n"),
            qdraft("run", "-f", "-", "-n", "8", "--temp", "0", "--quiet", stdin=PROMPT[1]),
            qdraft("run", "-f", str(file), "-n", "8", "--temp", "0", "--quiet"),
        ):
            assert (result.stdout, result.returncode) == (asked.stdout, 0)

    def test_empty_prompt(self) -> None:
        assert one_error(qdraft("run", "--raw", stdin=""), 2) == "error: the prompt is empty"

    def test_colour_needs_a_terminal(self) -> None:
        result = qdraft("run", *PROMPT, "-n", "8", "--temp", "0", "--quiet", "--color")
        assert "\x1b" not in result.stdout
        assert result.stdout.strip()

    def test_verbose_shows_the_native_log(self) -> None:
        assert "llama_context" in qdraft_process("run", *PROMPT, "-n", "1", "--verbose").stderr

    def test_prompt_longer_than_the_context(self) -> None:
        result = qdraft("run", "-p", "word " * 200, "-c", "128")
        assert re.search(
            r"the prompt has 2\d\d tokens, but the context holds 128", one_error(result, 5)
        )

    def test_foreign_files(self, smollm2: tuple[Path, Path], tmp_path: Path) -> None:
        half = tmp_path / "half.gguf"
        half.write_bytes(smollm2[1].read_bytes()[:500_000])
        result = qdraft("run", *PROMPT, "-m", str(smollm2[0]), "-d", str(half))
        assert "half.gguf is a damaged GGUF" in one_error(result, 3)

    def test_a_draft_of_another_vocabulary(self, tmp_path: Path) -> None:
        """A draft of another vocabulary: the error names the first token that differs, in both.

        https://github.com/ggml-org/llama.cpp/pull/3812
        """
        for name, tokens in (("t", ("<s>", "</s>", "a", "b")), ("d", ("<s>", "</s>", "a", "X"))):
            tiny.zeros(tmp_path / f"{name}.gguf", tokens)
        files = ("-m", str(tmp_path / "t.gguf"), "-d", str(tmp_path / "d.gguf"))
        error = one_error(qdraft("run", "-p", "a", *files), 4)
        assert "token 3 is 'b' in the target, 'X' in the draft" in error

    def test_ngram_drafts_without_a_draft_model(self, smollm2: tuple[Path, Path]) -> None:
        prompt = "Repeat this list twice: " + "red green blue yellow black white " * 8
        common = ("-m", str(smollm2[0]), "-p", prompt, "-n", "60", "--temp", "0", "--quiet")
        alone = qdraft("run", *common, "--no-draft")
        drafted = qdraft("run", *common, "--drafter", "ngram", *FIXED, "--json", "--check")
        report = json.loads(drafted.stdout)
        jsonschema.validate(report, schema("run"))
        assert report["check"]["explained"]
        if report["check"]["same"]:
            assert report["text"] == alone.stdout.removesuffix("\n")
        assert report["draft"] is None
        assert {r["source"] for r in report["rounds"] if r["n_draft"]} == {"ngram"}

    def test_a_target_without_a_draft_says_so(self, smollm2: tuple[Path, Path]) -> None:
        result = qdraft("run", *PROMPT, "-m", str(smollm2[0]), "-n", "4")
        assert result.returncode == 0
        assert result.stderr.startswith("info: no draft of ")

    @pytest.mark.skipif(sys.platform == "win32", reason="sends SIGINT to a child")
    def test_interrupt_keeps_the_text_and_shows_the_summary(self) -> None:
        ban = [arg for token in (0, 2, 4) for arg in ("-l", f"{token}-inf")]
        child = subprocess.Popen(
            [sys.executable, "-m", "qdraft", "run", *PROMPT, *ban],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert child.stdout is not None
        head = child.stdout.read(20)
        child.send_signal(signal.SIGINT)
        out, err = child.communicate(timeout=60)
        assert child.returncode == 130
        assert b"Traceback" not in err
        assert b"interrupted" in err
        assert b"t/s" in err
        assert len(head + out) > 20

    def test_interrupted_json_is_whole(
        self, smollm2: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
    ) -> None:
        with Pair(PairSpec.of(*smollm2, EngineParams(n_ctx=256))) as pair:
            text = pair.generate(PROMPT[1], SamplingParams(temperature=0))
            chunks = iter(text)

            class Interrupted:
                def __iter__(self) -> Iterator[Chunk]:
                    yield next(chunks)
                    yield next(chunks)
                    raise KeyboardInterrupt

                def __getattr__(self, name: str) -> object:
                    return getattr(text, name)

            output = RunOutputOptions(as_json=True, check=True)
            status = show_text(pair, Interrupted(), output, None, Interrupted())  # type: ignore[arg-type]
        report = json.loads(capsys.readouterr().out)
        jsonschema.validate(report, schema("run"))
        assert status == 130
        assert report["finish_reason"] == "interrupted"
        assert report["check"] is None
        assert len(report["tokens"]) >= 2

    @pytest.mark.skipif(sys.platform == "win32", reason="sends SIGINT to a child")
    def test_interrupt_while_loading(self) -> None:
        """The signal comes while llama.cpp logs through a callback: not lost, no traceback."""
        for n_lines in (1, 15, 30, 40):
            child = subprocess.Popen(
                [sys.executable, "-m", "qdraft", "run", *PROMPT, "--verbose", "-n", "500"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
            assert child.stderr is not None
            head = b"".join(child.stderr.readline() for _ in range(n_lines))
            child.send_signal(signal.SIGINT)
            out, err = child.communicate(timeout=60)
            assert child.returncode == 130, head + err
            assert b"Traceback" not in head + err
            assert out == b""

    @pytest.mark.parametrize("as_json", [False, True])
    def test_a_stream_without_unicode(self, as_json: bool) -> None:
        result = subprocess.run(
            [
                sys.executable,
                "-m",
                "qdraft",
                "run",
                "--raw",
                "-p",
                "日本語 🦙 means",
                "-n",
                "30",
                "--temp",
                "0",
                "--quiet",
                *(["--json"] if as_json else []),
            ],
            env={**os.environ, "PYTHONIOENCODING": "cp1252"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=120,
            check=False,
        )
        assert result.returncode == 0, result.stderr
        assert result.stderr == b""
        if as_json:
            jsonschema.validate(json.loads(result.stdout), schema("run"))

    @pytest.mark.skipif(sys.platform != "linux", reason="needs /dev/full")
    def test_trouble_with_files_is_one_line(self, smollm2: tuple[Path, Path]) -> None:
        files = ("-m", str(smollm2[0]), "-d", str(smollm2[1]))
        unwritable = qdraft_process("run", *PROMPT, "-n", "4", QDRAFT_CACHE_DIR="/dev/null/x")
        assert "Not a directory" in one_error(unwritable, 1)
        # Two files of the user need no cache: qdraft warns that it cannot keep the answer of the probe.
        own = qdraft_process("run", *PROMPT, "-n", "4", *files, QDRAFT_CACHE_DIR="/dev/null/x")
        assert own.returncode == 0
        assert (
            "warning: the answer of the probe of repacked weights cannot be written" in own.stderr
        )
        full = subprocess.run(
            f"{sys.executable} -m qdraft run -p hello -n 4 --quiet > /dev/full",
            shell=True,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert full.returncode == 1
        assert full.stderr == "error: No space left on device\n"

    def test_children_do_not_import_from_the_working_directory(
        self, source_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in ("numpy", "json", "gguf", "qdraft"):
            (tmp_path / f"{name}.py").write_text("raise ImportError('from the working directory')")
        monkeypatch.chdir(tmp_path)
        quantize(source_file, tmp_path / "out.gguf", Recipe("F16"), threads=2)

    @pytest.mark.skipif(sys.platform == "win32", reason="uses head")
    def test_a_closed_pipe_is_no_error(self) -> None:
        command = f"{sys.executable} -m qdraft run -p 'Count to a hundred.' -n 200 | head -c 1"
        result = subprocess.run(
            command, shell=True, capture_output=True, text=True, timeout=120, check=False
        )
        assert len(result.stdout) == 1
        assert "Traceback" not in result.stderr
        assert "BrokenPipe" not in result.stderr
