"""Every recurrent and hybrid architecture of llama.cpp, on a tiny model with random weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from zoo import ZOO, Species

from qdraft.gguf import kind
from qdraft.gguf.facts import read_facts
from qdraft.llama import model as model_module
from qdraft.llama.context import LlamaContext
from qdraft.llama.model import LlamaModel
from qdraft.llama.native import lib
from qdraft.llama.params import EngineParams

PARAMS = EngineParams(n_ctx=256, n_threads=1)


@pytest.fixture(params=ZOO)
def species(request: pytest.FixtureRequest) -> Species:
    return ZOO[request.param]


@pytest.fixture
def model(
    species: Species, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[LlamaModel]:
    # The trial in a child process has tests of its own.
    monkeypatch.setattr(model_module, "require_loadable", lambda _path: None)
    model = LlamaModel(species.write(tmp_path / "model.gguf"), PARAMS)
    yield model
    model.close()


def test_the_zoo_holds_every_architecture_that_has_a_state() -> None:
    assert {species.architecture for species in ZOO.values()} == kind._RECURRENT


def test_it_loads_decodes_and_says_something(species: Species, model: LlamaModel) -> None:
    """Batches give what tokens one by one give, so that the self-pair's alpha can be 1."""
    assert read_facts(model.path).recurrent
    assert not model.can_roll_back
    text = [int(token) for token in np.random.default_rng(0).integers(2, 28, 60)]
    context = LlamaContext(model, PARAMS)
    sequence = context.sequence()
    single = np.array([sequence.eval([token], 1)[0].copy() for token in text])
    sequence.close()
    sequence = context.sequence()
    batched = np.concatenate([sequence.eval(text[i : i + 5], 5).copy() for i in range(0, 60, 5)])
    context.close()
    assert np.abs(single - batched).max() < 0.02
    probs = np.exp(single - single.max(axis=1, keepdims=True))
    probs /= probs.sum(axis=1, keepdims=True)
    assert 0.5 < -(probs * np.log(probs)).sum(axis=1).mean() < 2.5  # nats, of at most 3.3
    assert len(set(single.argmax(axis=1))) > 10
    assert not (single.argmax(axis=1) == 1).any()  # the end of the text


def test_who_grants_a_rollback_of_the_state(species: Species, model: LlamaModel) -> None:
    params = lib().llama_context_default_params()
    params.n_ctx, params.n_seq_max, params.n_rs_seq = 64, 2, 4
    context = lib().llama_init_from_model(model.native, params)
    granted = lib().llama_n_rs_seq(context)
    lib().llama_free(context)
    assert granted == (4 if species.rolls_back else 0)
