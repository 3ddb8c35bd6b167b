"""Every recurrent and hybrid architecture of llama.cpp, on a tiny model with random weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from zoo import ZOO, Species

from qdraft.gguf import kind
from qdraft.gguf.facts import read_facts
from qdraft.gguf.header import read_header
from qdraft.gguf.state import recurrent_state
from qdraft.llama import model as model_module
from qdraft.llama.context import LlamaContext
from qdraft.llama.imatrix import collect
from qdraft.llama.model import LlamaModel
from qdraft.llama.native import lib
from qdraft.llama.params import EngineParams
from qdraft.llama.placed import states_of
from qdraft.placement.needs import measure_needs

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
    assert model.has_state
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


def test_the_state_is_as_large_as_llama_cpp_makes_it(species: Species, model: LlamaModel) -> None:
    """The header says which layers have a state, and how large that is; llama.cpp logs it."""
    facts = read_facts(model.path)
    context = LlamaContext(model, PARAMS)
    states = states_of(context.lines)
    skipped = sum(": skipped" in line for line in context.lines if "memory_recurrent" in line)
    context.close()
    if species.architecture == "deepseek4":  # hybrid by name: it compresses older KV cells
        assert (facts.n_recurrent_layers, facts.state_bytes, states.n_bytes) == (0, 0, 0)
        return
    assert facts.n_recurrent_layers == 3 - skipped
    n_states = states.n_texts * (1 + states.n_back)
    assert n_states * facts.state_bytes == pytest.approx(states.n_bytes, abs=0.005 * 2**20)
    needs = measure_needs(model.path, PARAMS)
    assert sum(needs.state) == pytest.approx(states.n_bytes, abs=2)
    state = recurrent_state([read_header(model.path)])
    assert state is not None
    if states.n_bytes:  # llama.cpp logs hundredths of MiB
        assert {i for i, size in enumerate(needs.state) if size} == set(state.layers)
    with_cells = {i for i, size in enumerate(needs.kv) if size}
    assert with_cells == (
        {0, 1, 2} if species.architecture == "falcon-h1" else with_cells - set(state.layers)
    )
    longer = needs.at(2 * needs.n_ctx)
    assert (longer.state, sum(longer.kv)) == (needs.state, 2 * sum(needs.kv))


def test_importance_matrices_cover_every_matrix(species: Species, model: LlamaModel) -> None:
    text = [int(token) for token in np.random.default_rng(0).integers(2, 28, 200)]
    matrix = collect(model, [text], PARAMS)
    shapes = {tensor.name: tensor.shape for tensor in read_header(model.path).tensors}
    matrix.require_shapes(shapes)
    n_gaps, n_all = matrix.count_gaps(shapes)
    # Both choose cells only in texts that are longer than this one.
    assert n_gaps == {"glm5-next": 7, "deepseek4": 3}.get(species.architecture, 0)
    assert n_all > n_gaps


def test_who_grants_a_rollback_of_the_state(species: Species, model: LlamaModel) -> None:
    params = lib().llama_context_default_params()
    params.n_ctx, params.n_seq_max, params.n_rs_seq = 64, 2, 4
    context = lib().llama_init_from_model(model.native, params)
    granted = lib().llama_n_rs_seq(context)
    lib().llama_free(context)
    assert granted == (4 if species.rolls_back else 0)
