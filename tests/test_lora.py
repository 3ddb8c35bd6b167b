"""LoRA adapters: on the target and on the draft, with shared KV cells and without."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import tiny
from invoke import one_error, qdraft

from qdraft import DecodeParams, EngineParams, Pair, PairSpec, SamplingParams
from qdraft.cli.options.devices import parse_lora
from qdraft.errors import ModelFileError, ParameterError, UsageError
from qdraft.placement.needs import dry_run, measure_needs
from qdraft.session.generation import Generation
from qdraft.session.store import file_facts

GREEDY = SamplingParams(temperature=0)
PARAMS = EngineParams(n_ctx=256, n_threads=1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.windowed(tmp_path_factory.mktemp("lora") / "model.gguf")


@pytest.fixture(scope="module")
def adapter(model: Path) -> Path:
    return tiny.adapter(model.with_name("adapter.gguf"))


def with_lora(*lora: tuple[Path, float]) -> EngineParams:
    return dataclasses.replace(PARAMS, lora=tuple((str(path), scale) for path, scale in lora))


def write(
    model: Path, params: EngineParams, draft: EngineParams | None = None, share_kv: str = "on"
) -> Generation:
    """A greedy text of the model, drafted by itself."""
    with Pair(PairSpec.of(model, model, params, draft, share_kv=share_kv)) as pair:
        decode = DecodeParams(n_predict=40, n_draft=3, draft_policy="fixed")
        text = pair.generate("abcabd", GREEDY, decode, raw=True)
        text.read()
        assert text.check().same
        return text


@pytest.mark.parametrize("share_kv", ["on", "off"])
def test_the_adapter_acts_on_target_and_draft(model: Path, adapter: Path, share_kv: str) -> None:
    plain, adapted = (
        write(model, params, share_kv=share_kv) for params in (PARAMS, with_lora((adapter, 1.0)))
    )
    assert adapted.tokens != plain.tokens
    assert (adapted.summary.alpha or 0) >= 0.98
    if share_kv == "off":
        lacking = write(model, with_lora((adapter, 1.0)), PARAMS, share_kv)
        assert lacking.tokens == adapted.tokens  # a draft without it costs acceptance alone
        assert (lacking.summary.alpha or 0) < 0.9


def test_the_scale_counts(model: Path, adapter: Path) -> None:
    def row(*lora: tuple[Path, float]) -> np.ndarray:
        with (
            Pair(PairSpec.of(model, None, with_lora(*lora))) as pair,
            pair.sequences() as sequences,
        ):
            return sequences.target.eval([2, 3, 4], 1)[0].copy()

    plain, once = row(), row((adapter, 1.0))
    assert np.abs(once - plain).max() > 0.1
    np.testing.assert_allclose(row((adapter, 0.0)), plain, atol=1e-5)
    np.testing.assert_allclose(row((adapter, 0.25), (adapter, 0.75)), once, atol=1e-3)


def test_memory_and_identity_know_of_it(model: Path, adapter: Path) -> None:
    params = with_lora((adapter, 1.0))
    n_bytes = 2 * 4 * 4 * (tiny.N_FF + tiny.N_EMBD + tiny.N_HEAD * tiny.HEAD + tiny.N_EMBD)
    more = sum(measure_needs(model, params).weights) - sum(measure_needs(model, PARAMS).weights)
    assert more == n_bytes
    of_both = [sum(x.weights for x in dry_run(model, p).shares.values()) for p in (params, PARAMS)]
    assert of_both[0] - of_both[1] == n_bytes
    facts = {file_facts(model, each) for each in (PARAMS, params, with_lora((adapter, 0.5)))}
    assert len(facts) == 3
    tiny.adapter(adapter, strength=1.1)
    assert file_facts(model, params) not in facts
    tiny.adapter(adapter)
    assert EngineParams.of_json(dataclasses.asdict(params)) == params


def test_files_that_are_no_adapter_of_the_model(model: Path, adapter: Path) -> None:
    wide = tiny.adapter(adapter.with_name("wide.gguf"), width=32)
    other = tiny.adapter(adapter.with_name("other.gguf"), "llama")
    cases = {
        model: "is a language model, not a LoRA adapter",
        wide: "does not fit model.gguf.*incorrect shape",
        other: "does not fit model.gguf.*arch mismatch",
        adapter.with_name("missing.gguf"): "missing.gguf",
    }
    for path, message in cases.items():
        with pytest.raises(ModelFileError, match=message):
            Pair(PairSpec.of(model, None, with_lora((path, 1.0))))
    with pytest.raises(ParameterError, match="scale of lora"):
        with_lora((adapter, float("nan")))


def test_on_the_command_line(model: Path, adapter: Path) -> None:
    run = ("run", "-m", str(model), "--no-draft", "--temp", "0", "-n", "20", "-p", "abc", "--quiet")
    plain = qdraft(*run)
    adapted = qdraft(*run, "--lora", str(adapter))
    assert adapted.returncode == 0, adapted.stderr
    assert adapted.stdout != plain.stdout
    assert qdraft(*run, "--lora-scaled", f"{adapter}:0").stdout == plain.stdout
    error = one_error(qdraft(*run, "--lora", str(model)), 3)
    assert "not a LoRA adapter" in error
    error = one_error(qdraft("run", "-m", str(adapter), "--no-draft", "-p", "x", "--quiet"), 3)
    assert "is a LoRA adapter, not a language model" in error


def test_files_and_scales(tmp_path: Path) -> None:
    assert parse_lora("a.gguf") == [("a.gguf", 1.0)]
    assert parse_lora("a.gguf:0.5,b:c.gguf,d.gguf:-2") == [
        ("a.gguf", 0.5),
        ("b:c.gguf", 1.0),
        ("d.gguf", -2.0),
    ]
    odd = tmp_path / "a,b:1"
    odd.touch()
    assert parse_lora(str(odd)) == [(str(odd), 1.0)]
    with pytest.raises(UsageError, match="--lora is a,, but must be"):
        parse_lora("a,,")
