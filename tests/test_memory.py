"""Caches that do not fit the memory of this machine are refused before anything is loaded.

https://github.com/ggml-org/llama.cpp/issues/8817
"""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import tiny

pytest.importorskip("llama_cpp", reason="needs llama-cpp-python")

from qdraft import host
from qdraft.errors import HostMemoryError
from qdraft.gguf.facts import require_model
from qdraft.host import MemoryBound
from qdraft.llama.params import MAX_N_CTX, EngineParams
from qdraft.llama.spec import Both, ModelSpec, PairSpec
from qdraft.placement import buffers, needs
from qdraft.placement.buffers import buffers_on_host, require_memory
from qdraft.placement.needs import measure_needs
from qdraft.placement.plan import make_plan
from qdraft.session.pair import Pair
from qdraft.study.measure_quant import _opened

MIB = 2**20


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tiny.windowed(tmp_path / "w.gguf", n_ctx=200_000)


@pytest.fixture
def bounds(monkeypatch: pytest.MonkeyPatch) -> dict[str, MemoryBound | None]:
    """What bounds the memory and the addresses of this process."""
    given: dict[str, MemoryBound | None] = {"memory": None, "addresses": None}
    monkeypatch.setattr(buffers, "memory_bound", lambda: given["memory"])
    monkeypatch.setattr(buffers, "address_bound", lambda: given["addresses"])
    return given


def require(models: Both[ModelSpec]) -> None:
    require_memory(models, models.map(lambda model: require_model(model.path)))


def with_context(models: Both[ModelSpec], n_ctx: int) -> Both[ModelSpec]:
    return models.map(lambda model: replace(model, params=replace(model.params, n_ctx=n_ctx)))


@pytest.mark.parametrize("has_draft", [False, True])
def test_both_numbers_and_a_context_that_fits(
    file: Path, bounds: dict[str, MemoryBound | None], has_draft: bool
) -> None:
    """The caches of both models count."""
    bounds["memory"] = bound = MemoryBound(100 * MIB, "the memory limit of this control group")
    models = PairSpec.of(file, file if has_draft else None, EngineParams(n_ctx=0)).models
    need = buffers_on_host(models) / 2**30
    with pytest.raises(HostMemoryError) as caught:
        require(models)
    assert str(caught.value) == (
        f"caches and compute buffers need {need:.2f} GiB of memory at a context of 200000 tokens, "
        "but 0.10 GiB are free under the memory limit of this control group"
    )
    assert caught.value.exit_code == 6
    fits = re.fullmatch(r"use -c (\d+), which fits, or smaller cache types .*", caught.value.hint)
    assert fits is not None
    n_ctx = int(fits[1])
    assert 0.5 * bound.n_bytes < buffers_on_host(with_context(models, n_ctx)) < bound.n_bytes
    require(with_context(models, n_ctx))
    with pytest.raises(HostMemoryError):
        require(with_context(models, 2 * n_ctx))


def test_a_draft_keeps_a_context_of_its_own(
    file: Path, bounds: dict[str, MemoryBound | None]
) -> None:
    bounds["memory"] = MemoryBound(60 * MIB, "")
    own = EngineParams(n_ctx=512)
    models = PairSpec.of(file, file, EngineParams(n_ctx=0), own).models
    with pytest.raises(HostMemoryError) as caught:
        require(models)
    n_ctx = int(re.findall(r"-c (\d+)", caught.value.hint or "")[0])
    resized = replace(models.target.params, n_ctx=n_ctx)
    require(PairSpec.of(file, file, resized, own).models)


def test_nothing_fits(file: Path, bounds: dict[str, MemoryBound | None]) -> None:
    bounds["memory"] = MemoryBound(MIB, "")
    with pytest.raises(HostMemoryError, match=r"but 0\.00 GiB are free$") as caught:
        require(PairSpec.of(file, None, EngineParams(n_ctx=1024)).models)
    assert "-c" not in (caught.value.hint or "").split()


def test_mapped_weights_count_only_as_addresses(
    file: Path, bounds: dict[str, MemoryBound | None]
) -> None:
    """A target larger than the memory runs; under `ulimit -v` it cannot even be mapped."""
    models = PairSpec.of(file, None, EngineParams(n_ctx=1024)).models
    need = buffers_on_host(models)
    bounds["memory"] = MemoryBound(need, "")
    require(models)
    bounds["addresses"] = MemoryBound(need + file.stat().st_size // 2, "ulimit -v")
    with pytest.raises(
        HostMemoryError, match=r"of mapped weights, but .* are free under ulimit -v"
    ):
        require(models)


@pytest.mark.parametrize("mode", ["none", "mlock", "mmap+mlock"])
def test_weights_that_are_not_mapped_or_locked_count(
    file: Path, bounds: dict[str, MemoryBound | None], mode: str
) -> None:
    mapped, held = (
        PairSpec.of(file, None, EngineParams(n_ctx=1024, load_mode=load_mode)).models
        for load_mode in ("mmap", mode)
    )
    bounds["memory"] = MemoryBound(buffers_on_host(mapped), "")
    require(mapped)
    with pytest.raises(HostMemoryError, match=r"^caches, compute buffers and weights that are not"):
        require(held)


def test_ample_memory_costs_no_dry_run(
    file: Path, bounds: dict[str, MemoryBound | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buffers, "dry_run", None)
    models = PairSpec.of(file, None, EngineParams(n_ctx=1024)).models
    require(models)
    bounds["memory"] = bounds["addresses"] = MemoryBound(2**35, "")
    require(models)


def test_before_anything_is_loaded(
    file: Path, bounds: dict[str, MemoryBound | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a pair, which runs, makes, tunes and benches, and by a comparison; a plan says the same."""
    bounds["memory"] = MemoryBound(20 * MIB, "")
    monkeypatch.setattr(Pair, "_load", None)
    params = EngineParams(n_ctx=0)
    with pytest.raises(HostMemoryError):
        Pair(PairSpec.of(file, None, params))
    with pytest.raises(HostMemoryError), _opened(file, params):
        pass
    monkeypatch.setattr(host, "memory_bound", lambda root: bounds["memory"])
    plan = make_plan(PairSpec.of(file, None, params).models)
    assert plan.too_small == ["CPU"]
    assert plan.uses[-1].free == 20 * MIB
    assert plan.n_ctx_most < 200_000


def test_a_context_near_the_limit_is_measured(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice a context of ten million tokens, on which models are trained, is no valid one."""
    made: list[int] = []

    class Context:
        lines = ()
        placed = None

        def __init__(self, model: object, params: EngineParams) -> None:
            self.n_ctx = params.n_ctx or 0
            made.append(self.n_ctx)

        def close(self) -> None:
            pass

    monkeypatch.setattr(needs, "LlamaContext", Context)
    monkeypatch.setattr(needs, "_compute", lambda placed: len(made))
    for n_ctx in (1024, MAX_N_CTX):
        measure_needs(file, EngineParams(n_ctx=n_ctx))
    assert made == [1024, 2048, MAX_N_CTX, MAX_N_CTX // 2]


@pytest.mark.real
@pytest.mark.skipif(sys.platform != "linux", reason="ulimit -v is Linux's")
def test_the_command_under_ulimit(source_file: Path) -> None:
    command = f"'{sys.executable}' -m qdraft run -m '{source_file}' --no-draft -c 400000 -p hi -n 1"
    done = subprocess.run(
        ["sh", "-c", f"ulimit -v 8000000; {command}"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 6, done.stderr
    assert re.search(r"need \d+\.\d\d GiB of memory at a context of 400000 tokens", done.stderr)
    assert "GiB are free under ulimit -v" in " ".join(done.stderr.split())
    assert "hint: use -c " in done.stderr
