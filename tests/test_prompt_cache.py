"""Prompt caches: a later run goes on from the file, and no other file is taken."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from invoke import one_error, qdraft

pytest.importorskip("llama_cpp", reason="needs llama-cpp-python")

from qdraft import DecodeParams, EngineParams, Pair, PairSpec, SamplingParams
from qdraft.errors import DiskSpaceError, UsageError
from qdraft.session.generation import Generation
from qdraft.session.prompt_cache import PromptCache

PARAMS = EngineParams(n_ctx=512, n_threads=1, n_batch=64, n_ubatch=64)
GREEDY = SamplingParams(temperature=0, logit_bias={1: -np.inf})
PROMPT = [0, *(2 + (7 * i) % 26 for i in range(199))]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("cache")
    return tiny.windowed(folder / "target.gguf"), tiny.windowed(folder / "other.gguf", seed=2)


@pytest.fixture(scope="module", params=["on", "off"])
def pair(request: pytest.FixtureRequest, files: tuple[Path, Path]) -> Iterator[Pair]:
    with Pair(PairSpec.of(*files, PARAMS, share_kv=request.param)) as opened:
        yield opened


def write(
    pair: Pair, path: Path, prompt: list[int] = PROMPT, n_predict: int = 6, **options: bool
) -> Generation:
    """Generate a text with a prompt cache, as ``run`` does."""
    cache = PromptCache(pair, path, **options)
    session = pair.session()
    few = DecodeParams(n_predict=n_predict, draft_policy="fixed", n_draft=2)
    text = session.generate(prompt, GREEDY, few)
    cache.restore(session, prompt)
    cache.require_space(len(prompt), n_predict)
    for _ in cache.saving(session, text):
        pass
    assert session.sequences is None
    return text


def test_a_later_run_reads_what_is_new(pair: Pair, tmp_path: Path) -> None:
    path = tmp_path / "prompt"
    first = write(pair, path)
    alone = pair.session().generate(PROMPT, GREEDY, DecodeParams(n_predict=6, n_draft=0))
    alone.read()
    assert first.n_reused.target == 0
    assert first.tokens == alone.tokens
    inode = path.stat().st_ino
    again = write(pair, path)
    assert again.n_reused.target == len(PROMPT) - 1
    assert again.rounds[0].n_prompt == 1
    assert again.tokens == first.tokens
    assert path.stat().st_ino == inode  # it held the prompt already
    longer = write(pair, path, [*PROMPT, 5, 6, 7])
    assert longer.n_reused.target == len(PROMPT)
    other = write(pair, path, [*PROMPT[:100], 9, *PROMPT[101:]])
    assert other.n_reused.target == 100
    assert write(pair, path, PROMPT).tokens == first.tokens


def test_what_is_saved(pair: Pair, tmp_path: Path) -> None:
    path = tmp_path / "prompt"
    whole = write(pair, path, with_text=True)
    n_known = len(PROMPT) + len(whole.tokens) - 1  # nothing has read the last token
    longer = [*PROMPT, *whole.tokens, 5]
    assert write(pair, path, longer, read_only=True).n_reused.target == n_known
    assert write(pair, path, longer, read_only=True).n_reused.target == n_known
    with pytest.raises(UsageError, match="does not exist"):
        write(pair, tmp_path / "none", read_only=True)
    with pytest.raises(UsageError, match="is not a folder"):
        write(pair, tmp_path / "none" / "prompt")


def test_an_interrupt_keeps_what_was_read(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the file, and in a session, whose next text goes on from there."""
    path = tmp_path / "prompt"
    decode = pair.contexts.target.decode

    def interrupted(id: int, start: int, *more: Any) -> None:
        if start >= 128:
            raise KeyboardInterrupt
        decode(id, start, *more)

    with monkeypatch.context() as patch, pair.session() as session:
        patch.setattr(pair.contexts.target, "decode", interrupted)
        with pytest.raises(KeyboardInterrupt):
            write(pair, path)
        with pytest.raises(KeyboardInterrupt):
            session.generate(PROMPT, GREEDY, DecodeParams(n_predict=2)).read()
        patch.undo()
        text = session.generate(PROMPT, GREEDY, DecodeParams(n_predict=2))
        text.read()
        assert text.n_reused.target == 128
    assert write(pair, path).n_reused.target == 128


def test_an_interrupt_between_cells_and_tokens_keeps_nothing(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = pair.contexts.target.decode

    def interrupted(*args: Any) -> None:
        decode(*args)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pair.session() as session:
        patch.setattr(pair.contexts.target, "decode", interrupted)
        with pytest.raises(KeyboardInterrupt):
            session.generate(PROMPT, GREEDY, DecodeParams(n_predict=2)).read()
        assert session.sequences is None


def test_a_disk_without_room(pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qdraft.disk.free_bytes", lambda folder: 1000)
    with pytest.raises(DiskSpaceError, match=r"prompt for 200 tokens needs .*, but 0 MB is free"):
        write(pair, tmp_path / "prompt")
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def target(files: tuple[Path, Path]) -> Iterator[Pair]:
    with Pair(PairSpec.of(files[0], None, PARAMS)) as opened:
        yield opened


class TestFiles:
    @pytest.mark.parametrize("place", ["magic", "length", "head", "tokens", "cells", "sum", "end"])
    def test_damage_is_refused(self, target: Pair, tmp_path: Path, place: str) -> None:
        path = tmp_path / "prompt"
        write(target, path)
        data = bytearray(path.read_bytes())
        n_head = data.index(b"}", data.index(b"n_cell_bytes")) + 1
        at = {
            "magic": 3,
            "length": 24,
            "head": data.index(b"n_tokens") + 12,
            "tokens": n_head + 8,
            "cells": n_head + 4000,
            "sum": len(data) - 5,
            "end": 0,
        }[place]
        if place == "end":
            del data[-1000:]
        else:
            data[at] ^= 1
        path.write_bytes(data)
        with pytest.raises(UsageError, match=r"is damaged|is not a prompt cache") as refused:
            write(target, path)
        assert "\n" not in str(refused.value)
        assert refused.value.hint == "delete it, or name another file"
        assert path.read_bytes() == data

    def test_foreign_files_are_refused(
        self, target: Pair, files: tuple[Path, Path], tmp_path: Path
    ) -> None:
        path = tmp_path / "prompt"
        write(target, path)
        moved = shutil.copy(files[0], tmp_path / "moved.gguf")
        quantized = EngineParams(n_ctx=512, n_threads=1, cache_type_k="f32")
        templated = PairSpec.of(files[0], None, PARAMS, template="{{ messages[0].content }}")
        for spec, what in (
            (PairSpec.of(files[1], None, PARAMS), "another model"),
            (PairSpec.of(files[0], None, quantized), "another cache type"),
            (templated, "another chat template"),
            (PairSpec.of(moved, None, PARAMS), ""),
        ):
            with Pair(spec) as other:
                if not what:
                    assert write(other, path).n_reused.target == len(PROMPT) - 1
                    continue
                with pytest.raises(UsageError, match=f"was made with {what}"):
                    write(other, path)
        with Pair(PairSpec.of(files[0], None, EngineParams(n_ctx=128, n_threads=1))) as small:
            with pytest.raises(UsageError, match="holds 200 tokens, but the context holds 128"):
                write(small, path, PROMPT[:50])
            assert write(small, path, [3, 4]).n_reused.target == 0


def test_run(files: tuple[Path, Path], tmp_path: Path) -> None:
    path = tmp_path / "prompt"
    args = ("run", "-m", str(files[0]), "--no-draft", "-c", "64", "-n", "3", "--temp", "0")
    args = (*args, "--logit-bias", "1-inf", "-p", "abcdefgh", "--prompt-cache", str(path))
    reports = [json.loads(qdraft(*args, "--json").stdout) for _ in range(2)]
    assert reports[0]["text"] == reports[1]["text"]
    assert [each["rounds"][0]["n_prompt"] for each in reports] == [8, 1]
    again = qdraft(*args, "--check")
    assert f"info: 8 of 8 tokens of the prompt are in {path}" in again.stderr
    assert "same as the target alone" in again.stderr
    full = qdraft(*args[: args.index("-n")], "-n", "-1", *args[args.index("-n") + 2 :])
    assert "warning: the context of 64 tokens is full (prompt 8, text 56), so" in full.stderr
    path.write_bytes(b"ggsn")
    assert "is not a prompt cache of this version of qdraft" in one_error(qdraft(*args), 2)
    for option in ("--prompt-cache-ro", "--prompt-cache-all"):
        assert f"{option} needs a file" in one_error(qdraft("run", option), 2)
    both = one_error(qdraft(*args, "--prompt-cache-ro", "--prompt-cache-all"), 2)
    assert "--prompt-cache-all cannot be combined with --prompt-cache-ro" in both


def test_a_recurrent_target_is_refused_by_name(tmp_path: Path) -> None:
    model, path = tiny.mamba(tmp_path / "mamba.gguf"), tmp_path / "prompt"
    done = qdraft("run", "-m", str(model), "--no-draft", "-p", "a", "--prompt-cache", str(path))
    assert "mamba.gguf is recurrent or hybrid: a prompt cache cannot" in one_error(done, 4)
    assert not path.exists()
