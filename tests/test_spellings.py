"""Command lines of llama.cpp: each option works here, or one line names it and what to use."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import tiny
import typer
from invoke import one_error, qdraft

from qdraft.cli.command import OwnOption, QdraftCommand, Translation
from qdraft.cli.main import app
from qdraft.cli.options.text import TextOptions
from qdraft.cli.spellings import SPELLINGS, drafter_of
from qdraft.decoding.records import SamplingParams
from qdraft.errors import ModelFileError, UsageError
from qdraft.gguf.identify import require_gguf
from qdraft.llama.model import LlamaModel
from qdraft.llama.params import EngineParams
from qdraft.pairs.hub import choose_as_llama_cpp
from qdraft.session.endless import ban_ends

NAMES = [
    line
    for line in (Path(__file__).parent / "llama_options.txt").read_text().splitlines()
    if not line.startswith("#")
]
# Model cards and guides have these; llama.cpp has dropped them, or has them in another form.
OLDER = ("-ins", "-cml", "--draft-max=", "--draft-min=", "-ps=", "-gqa=")


def commands() -> dict[str, QdraftCommand]:
    group: Any = typer.main.get_command(app)
    nested = {f"models {name}": each for name, each in group.commands["models"].commands.items()}
    return {name: each for name, each in group.commands.items() if name != "models"} | nested


MISSING = "-sp is --special in qdraft, but this command has none"
OWN = commands()["run"]._own_options()


def translate(*args: str, own: dict[str, OwnOption] = OWN) -> tuple[list[str], list[str]]:
    translation = Translation(args, own)
    return translation.run(), translation.left_out


def outcome(option: str, *value: str) -> str:
    """What becomes of an option: the words for it here, "left out", or the error."""
    try:
        words, left_out = translate(option, *value, "-p", "x")
    except UsageError as error:
        return str(error)
    assert words[-2:] == ["-p", "x"], words  # it does not eat the next option
    assert not left_out or left_out == [option]
    return "left out" if left_out else " ".join(words[:-2])


def test_every_option_works_or_says_what_to_use() -> None:
    others = []
    for name in (*NAMES, *OLDER):
        option, takes_value, _ = name.partition("=")
        became = outcome(option, *(["1"] if takes_value else []))
        first = became.split(" ")[0]
        is_own = first in OWN and became == f"{first} 1" if takes_value else became in OWN
        if not (is_own or became == "left out" or f"{option} of llama.cpp is not in" in became):
            others.append((option, became))
    assert others == [
        ("-co", "--color"),
        ("--color", "--color"),
        ("-fa", "-fa on"),
        ("--flash-attn", "--flash-attn on"),
        ("-rea", "-rea on"),
        ("--reasoning", "--reasoning on"),
        *([] if "-sp" in OWN else [("-sp", MISSING), ("--special", "--special")]),
        (
            "--spec-type",
            "--spec-type 1 of llama.cpp is not in qdraft: use --drafter model, ngram or hybrid",
        ),
    ]


def test_what_is_the_same_is_there() -> None:
    missing = {each.option for each in SPELLINGS.values() if each.option} - OWN.keys()
    assert missing <= {"--special"}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("-md d.gguf --draft-max 8", "-md d.gguf --n-draft 8"),
        ("--draft-p-min=0.5 --top_k 5", "--p-min 0.5 --top-k 5"),
        ("-fa -ngl 3", "-fa on -ngl 3"),
        ("-ngl 3 -fa", "-ngl 3 -fa on"),
        ("-fa 0 --flash-attn enabled -fa -1", "-fa off --flash-attn on -fa auto"),
        ("--color -n 5", "--color -n 5"),
        ("--color auto -co on", "--color --color"),
        ("-co off", ""),
        ("-n -2 -t -1 --predict 4", "-n -1 -t 0 --n-predict 4"),
        ("-no-cnv -r stop", "--raw --stop stop"),
        ("--spec-type draft-simple", "--drafter model"),
        ("--spec-type none", "--no-draft"),
        ("-p -hf --stop -st", "-p -hf --stop -st"),
        ("-p --jinja -- --jinja", "-p --jinja -- --jinja"),
        ("-p Which? -", "-p Which? --file -"),
        ("-n5 -c128", "-n5 -c128"),
        ("-hf o/n:Q4_0 -hff f.gguf -hfd o/d", "-hf o/n:Q4_0 -hff f.gguf -hfd o/d"),
        ("--mirostat 0.0 --top-nsigma=-1 -np 1 --samplers edskypmxt -st", None),
    ],
)
def test_a_pasted_line_is_translated(line: str, words: str | None) -> None:
    if words is None:
        with pytest.raises(UsageError, match="--samplers of llama"):
            translate(*line.split())
        return
    assert translate(*line.split())[0] == words.split()


def test_what_asks_for_nothing_is_left_out() -> None:
    words, left_out = translate("--mirostat", "0.0", "-np=1", "-st", "--prio", "0", "-lm", "mmap")
    assert (words, left_out) == ([], ["--mirostat", "-np", "-st", "--prio", "-lm"])


def test_what_is_left_out_is_said_once(tmp_path: Path) -> None:
    model = tiny.windowed(tmp_path / "tiny.gguf")
    args = ("plan", "-m", str(model), "--no-draft", "--jinja", "-st", "--no-warmup")
    said = "info: left out what qdraft does not need: --jinja, -st, --no-warmup\n"
    assert qdraft(*args).stderr == said
    assert qdraft(*args, "--quiet").stderr == ""


def test_a_command_without_the_option_says_so() -> None:
    assert one_error(qdraft("inspect", "x", "--draft-max", "3"), 2) == (
        "error: --draft-max is --n-draft in qdraft, but this command has none"
    )


def test_ways_to_draft() -> None:
    assert drafter_of("ngram-mod,draft-simple") == "hybrid"
    assert drafter_of("ngram-map-k4v") == "ngram"
    assert drafter_of("draft-mtp") is drafter_of("draft-simple,draft-eagle3") is None
    assert "use --drafter" in one_error(qdraft("run", "--spec-type", "draft-mtp"), 2)


@pytest.mark.parametrize("name", commands())
def test_no_cluster_of_letters_is_a_help_page(name: str) -> None:
    """``-hf owner/name`` was read as ``-h -f owner/name``, and ended with exit code 0."""
    for word in ("-hx", "-hz=x"):
        error = one_error(qdraft(*name.split(), word, "x"), 2)
        assert error == f"error: there is no option {word}"


def test_no_option_comes_before_a_command() -> None:
    assert "before a command" in one_error(qdraft("-hf", "o/n"), 2)
    assert "before a command" in one_error(qdraft("models", "-hf", "o/n"), 2)


class TestHub:
    """``-hf`` does what it does in llama.cpp."""

    @pytest.fixture
    def pulled(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
        model = tiny.windowed(tmp_path / "tiny.gguf")
        pulled: list[tuple[str, str]] = []

        def pull(repo: str, wanted: str, choose: object) -> list[Path]:
            assert choose is choose_as_llama_cpp
            pulled.append((repo, wanted))
            return [model]

        monkeypatch.setattr("qdraft.pairs.hub.pull", pull)
        return pulled

    @pytest.mark.parametrize(
        ("args", "wanted"),
        [
            (("-hf", "o/n:Q4_0", "--no-draft"), [("o/n", "Q4_0")]),
            (("-hfr", "o/n", "--no-draft"), [("o/n", None)]),
            (("-hf", "o/n:Q4_0", "-hff", "f.gguf", "--no-draft"), [("o/n", "f.gguf")]),
            (("-hf", "o/n", "-hfd", "o/d:Q2_K"), [("o/n", None), ("o/d", "Q2_K")]),
        ],
    )
    def test_it_names_target_and_draft(
        self, pulled: list[tuple[str, str]], args: tuple[str, ...], wanted: list[tuple[str, str]]
    ) -> None:
        done = qdraft("plan", *args)
        assert done.returncode == 0, done.stderr
        assert pulled == wanted

    @pytest.mark.parametrize(
        ("args", "message"),
        [
            (("-hf", "o/n", "-m", "x"), "--hf-repo cannot be combined with --model"),
            (("-hf", "o/n", "--pair", "x"), "--hf-repo cannot be combined with --pair"),
            (("-hf", "n"), "--hf-repo is n but must be OWNER/NAME or OWNER/NAME:TYPE"),
            (("-hff", "x"), "--hf-file needs --hf-repo"),
            (("-hfd", "o/n"), "--hf-repo-draft needs a target"),
            (("-m", "x", "-hfd", "o/n", "-d", "y"), "cannot be combined with --model-draft"),
        ],
    )
    def test_contradictions_download_nothing(
        self, pulled: list[tuple[str, str]], args: tuple[str, ...], message: str
    ) -> None:
        assert message in one_error(qdraft("run", *args, "-p", "x"), 2)
        assert not pulled

    @pytest.mark.parametrize(
        ("files", "chosen"),
        [
            (["m-F16.gguf", "m-Q8_0.gguf", "m-Q4_K_M.gguf"], ["m-Q4_K_M.gguf"]),
            (["mmproj-Q4_K_M.gguf", "m-F16.gguf", "m-q8_0.gguf"], ["m-q8_0.gguf"]),
            (["a.txt", "m-F16.gguf", "m-Q2_K.gguf"], ["m-F16.gguf"]),
            (
                ["Q8_0/m-Q8_0-00002-of-00002.gguf", "Q8_0/m-Q8_0-00001-of-00002.gguf"],
                ["Q8_0/m-Q8_0-00001-of-00002.gguf", "Q8_0/m-Q8_0-00002-of-00002.gguf"],
            ),
        ],
    )
    def test_without_a_type(self, files: list[str], chosen: list[str]) -> None:
        assert choose_as_llama_cpp(files, None) == chosen

    def test_without_the_package(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "huggingface_hub", None)
        done = qdraft("run", "-hf", "o/n", "-p", "x")
        assert "huggingface_hub, which is not installed" in one_error(done, 2)
        assert "qdraft models pull o/n:Q4_K_M" in done.stderr

    @pytest.mark.parametrize(
        ("path", "repo"),
        [("o/n:Q4_K_M", "o/n:Q4_K_M"), ("o/n", "o/n:Q4_K_M"), ("o/n.gguf", None), ("n", None)],
    )
    def test_a_repository_in_place_of_a_file(self, path: str, repo: str | None) -> None:
        with pytest.raises(ModelFileError, match="does not exist") as caught:
            require_gguf(Path(path))
        hint = caught.value.hint
        assert hint == (repo and hint)
        assert repo is None or f"qdraft models pull {repo}" in (hint or "")


def test_a_text_that_no_token_ends(tmp_path: Path) -> None:
    """--ignore-eos, which only a bench had."""
    vocab = LlamaModel(tiny.zeros(tmp_path / "m.gguf", tiny.TOKENS), EngineParams()).vocab
    banned = ban_ends(SamplingParams(logit_bias={3: 1.0}), vocab).logit_bias
    assert banned == {3: 1.0, 1: -float("inf")}
    assert TextOptions(ignore_eos=True).ignore_eos
