"""What to open, described once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from qdraft.errors import UsageError
from qdraft.llama.params import EngineParams
from qdraft.llama.progress import no_progress
from qdraft.llama.spec import Both, ModelSpec, PairSpec


def test_both_iterates_over_those_that_are_there() -> None:
    assert list(Both(1, 2)) == [1, 2]
    assert list(Both(1)) == [1]
    assert list(Both(0, 0)) == [0, 0]  # not by truth


def test_both_maps_those_that_are_there() -> None:
    assert Both(1, 2).map(str) == Both("1", "2")
    assert Both(1).map(str) == Both("1")
    assert Both[int](1).draft is None


def test_two_are_zipped_by_model() -> None:
    assert Both(1, 2).zip(Both("a", "b")) == Both((1, "a"), (2, "b"))
    assert Both(1, 2).zip(Both("a")) == Both(1).zip(Both("a", "b")) == Both((1, "a"))
    assert Both(0, 0).zip(Both("", "")) == Both((0, ""), (0, ""))  # not by truth


def test_a_pair_by_its_files() -> None:
    params = EngineParams(n_ctx=64, n_gpu_layers=3)
    pair = PairSpec.of("t.gguf", Path("d.gguf"), params, EngineParams(), keep_draft=True)
    assert pair.models == Both(
        ModelSpec(Path("t.gguf"), replace(params, n_rs_seq=3)),
        ModelSpec(Path("d.gguf"), EngineParams()),
    )
    assert pair.keep_draft
    assert pair.share_kv == "auto"


def test_a_draft_without_params_is_loaded_like_the_target() -> None:
    params = EngineParams(n_ctx=64, devices=("RPC0",))
    draft = PairSpec.of("t.gguf", "d.gguf", params).models.draft
    assert draft == ModelSpec(Path("d.gguf"), params, like_target=True)
    assert PairSpec.of("t.gguf", "d.gguf", params, params).models.draft != draft


def test_a_target_alone() -> None:
    params = EngineParams(n_rs_seq=3)  # what a target with a recurrent state takes back at once
    assert PairSpec.of("t.gguf").models == Both(ModelSpec(Path("t.gguf"), params))
    given = EngineParams(n_rs_seq=0)
    assert PairSpec.of("t.gguf", None, given).models.target.params == given


def test_share_kv_is_one_of_three() -> None:
    with pytest.raises(UsageError, match="share_kv is maybe but must be one of auto, on, off"):
        PairSpec.of("t.gguf", share_kv="maybe")


def test_no_progress_takes_any_step() -> None:
    no_progress("loading", 0.5, 1)
