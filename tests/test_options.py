"""Groups of options: each is written once, and what a command does with them."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import pytest
import tiny
import typer
from invoke import one_error, qdraft

from qdraft.cli.main import app
from qdraft.cli.options.devices import DeviceOptions
from qdraft.cli.options.drafting import DraftingOptions
from qdraft.cli.options.group import (
    Defaults,
    Group,
    Only,
    Without,
    option,
    option_names,
    parameter_names,
    rename_parameters,
    takes_options,
)
from qdraft.cli.options.sampling import SamplingOptions
from qdraft.decoding.records import SamplingParams
from qdraft.errors import UsageError
from qdraft.llama.params import EngineParams


def parameters_of(command: object) -> dict[str, inspect.Parameter]:
    assert callable(command)
    return dict(inspect.signature(command).parameters)


def test_a_command_takes_a_part_of_a_group_with_other_defaults() -> None:
    @takes_options
    def command(
        sampling: Annotated[SamplingOptions, Only("top_k", "seed"), Defaults(seed=1)],
        drafting: Annotated[DraftingOptions, Without("exact")],
    ) -> None:
        """Do nothing."""

    parameters = parameters_of(command)
    assert parameters["seed"].default == 1
    assert parameters["top_k"].default == 40
    assert "top_p" not in parameters
    assert "exact" not in parameters
    assert parameters["n_draft"].default is None


def test_the_help_shows_the_default_of_the_command() -> None:
    """Not the words for the default that other commands have."""
    page = " ".join(qdraft("bench", "--help").stdout.split())
    assert re.search(r"--ctx-size .{0,200}?\[default: 2048\]", page)


def test_defaults_are_those_of_the_library() -> None:
    assert SamplingOptions().params() == SamplingParams()
    assert DeviceOptions().engines()[0] == EngineParams()


def test_every_option_has_a_help_that_is_a_sentence() -> None:
    commands = [each.callback for each in app.registered_commands]
    groups = [group.typer_instance for group in app.registered_groups]
    commands += [each.callback for group in groups if group for each in group.registered_commands]
    for command in commands:
        for parameter in parameters_of(command).values():
            for beside in getattr(parameter.annotation, "__metadata__", ()):
                text = getattr(beside, "help", None)
                if text is not None:
                    assert text[0].isupper() or text[0] == "J", parameter.name
                    assert text.endswith("."), (parameter.name, text)


def test_parameters_become_options_in_errors() -> None:
    names = parameter_names(DeviceOptions) | parameter_names(SamplingOptions)
    assert names["n_ctx"] == "--ctx-size"
    assert option_names(DeviceOptions)["device"] == "--device"
    assert rename_parameters("n_ctx is 5", names) == "--ctx-size is 5"
    assert rename_parameters("seed is -2", names) == "--seed is -2"
    assert rename_parameters("a seed of n_ctx", names) == "a seed of --ctx-size"
    assert rename_parameters("threads are many", names) == "threads are many"
    assert rename_parameters("x/n_ctx.gguf is gone", names) == "x/n_ctx.gguf is gone"


@pytest.mark.parametrize("name", ["prompt", "n_ctx"])
def test_a_file_keeps_its_name_in_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A file called like a parameter became an option: "--ctx-size is not UTF-8 text"."""
    monkeypatch.chdir(tmp_path)
    Path(name).write_bytes(b"caf\xe9")
    assert one_error(qdraft("run", "-f", name), 2) == f"error: {name} is not UTF-8 text"


def test_the_draft_has_options_of_its_own_in_errors() -> None:
    with pytest.raises(UsageError, match=r"^--ctx-size-draft is -1"):
        DeviceOptions(ctx_size_draft=-1).engines()
    with pytest.raises(UsageError, match=r"^--cache-type-k-draft is f7"):
        DeviceOptions(cache_type_k_draft="f7").engines()


@pytest.mark.parametrize(
    ("options", "other"),
    [
        ({"device": "none"}, "--device none"),
        ({"device_draft": "none"}, "--device-draft none"),
        ({"device": "none", "device_draft": "none"}, "--device-draft none"),
    ],
)
def test_draft_layers_without_a_device_name_the_option(options: dict[str, str], other: str) -> None:
    """``-dev none -ngld 3`` blamed --device-draft, which was not given."""
    with pytest.raises(UsageError, match=f"^--gpu-layers-draft cannot be combined with {other}$"):
        DeviceOptions(gpu_layers_draft="3", **options).engines()


@dataclass(frozen=True, kw_only=True)
class _Sizes(Group):
    n: Annotated[int, option("Sizes", "--size", help="Size.")] = 3
    m: Annotated[int, option("Sizes", "--most", help="Most.")] = 4


def test_a_group_knows_what_was_given(capsys: pytest.CaptureFixture[str]) -> None:
    """An option that is given with its default value asks for nothing."""
    small = typer.Typer()

    @small.command()
    @takes_options
    def command(sizes: _Sizes) -> None:
        print(sizes.first_given(), sizes.first_given("m"))

    for args, printed in (
        ([], "None None"),
        (["--size", "3"], "None None"),
        (["--size", "5"], "--size None"),
        (["--most", "1"], "--most --most"),
    ):
        small(args, standalone_mode=False)
        assert capsys.readouterr().out.strip() == printed


class TestOldNames:
    """They work for one release, hidden from the help, with a warning."""

    def test_verify_is_verification(self) -> None:
        done = qdraft("run", "-p", "x", "--verify", "all")
        assert done.returncode == 2
        warning, error = done.stderr.splitlines()
        assert warning == (
            "warning: --verify is now called --verification; the next release removes the old name"
        )
        assert error.startswith("error: --verification is all")

    def test_quiet_says_nothing_of_old_names(self) -> None:
        one_error(qdraft("run", "-p", "x", "--verify", "all", "--quiet"), 2)

    def test_both_names_are_one_too_many(self) -> None:
        result = qdraft("run", "-p", "x", "--verify", "block", "--verification", "token")
        assert "--verify cannot be combined with --verification" in one_error(result, 2)

    @pytest.mark.parametrize("command", ["run", "bench", "replay", "plan"])
    def test_old_names_are_not_in_the_help(self, command: str) -> None:
        page = qdraft(command, "--help").stdout
        assert "--verify" not in page
        assert ("--compare-loaded" if command == "plan" else "--verification") in page

    def test_verify_of_plan_is_compare_loaded(self, tmp_path: Path) -> None:
        model = tiny.windowed(tmp_path / "tiny.gguf")
        done = qdraft("plan", "-m", str(model), "--no-draft", "--verify", "--vram", "1G")
        assert done.returncode == 2
        warning, error = done.stderr.splitlines()
        assert warning.startswith("warning: --verify is now called --compare-loaded")
        assert error.startswith("error: --compare-loaded cannot be combined with --vram")


@pytest.mark.parametrize("key", ["verify", "verification"])
def test_an_entry_that_sets_the_verification_can_be_planned(tmp_path: Path, key: str) -> None:
    """The key of the entry was once taken for the flag ``plan --verify``."""
    tiny.windowed(tmp_path / "tiny.gguf")
    models = tmp_path / "models.yaml"
    models.write_text(f"pairs: {{p: {{target: tiny.gguf, tuned: {{{key}: token}}}}}}")
    done = qdraft("plan", "--pair", "p", "--models-file", str(models))
    assert done.returncode == 0, done.stderr
    assert "tiny" not in done.stderr
