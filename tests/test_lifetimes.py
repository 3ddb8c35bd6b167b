"""Memory handed to llama.cpp lives as long as llama.cpp uses it, also in calls left alone."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny

pytest.importorskip("llama_cpp", reason="needs llama-cpp-python")

from qdraft.errors import EngineError
from qdraft.llama import model as model_module
from qdraft.llama.context import LlamaContext
from qdraft.llama.model import LlamaModel
from qdraft.llama.native import lib
from qdraft.llama.params import EngineParams


class Split(list[float]):
    """What ``place`` returns: memory that llama.cpp points to."""


@pytest.fixture
def placed(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Split | None]:
    """The memory that the next model is placed with; None once Python has freed it."""
    split = Split()
    alive = weakref.ref(split)
    parts = [split]
    monkeypatch.setattr(model_module, "place", lambda native, params: [parts.pop()])
    return alive


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tiny.windowed(tmp_path / "w.gguf")


def test_a_split_lives_as_long_as_its_model(file: Path, placed: Callable[[], object]) -> None:
    """Under split mode tensor llama.cpp reads it for each context, long after loading."""
    model = LlamaModel(file, EngineParams())
    gc.collect()
    assert placed() is not None
    model.close()
    del model
    gc.collect()
    assert placed() is None


def test_what_a_load_that_is_left_alone_uses_stays(
    file: Path, placed: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second Ctrl-C leaves a call to a server running, with its arguments."""
    running: list[Any] = []

    def load(path: bytes, params: Any) -> None:
        running.append(params)
        raise KeyboardInterrupt

    monkeypatch.setattr(lib(), "llama_model_load_from_file", load)
    with pytest.raises(KeyboardInterrupt):
        LlamaModel(file, EngineParams())
    gc.collect()
    assert placed() is not None
    running.clear()
    gc.collect()
    assert placed() is None


def test_what_a_decode_that_is_left_alone_uses_stays(file: Path) -> None:
    model = LlamaModel(file, EngineParams())
    context = LlamaContext(model, EngineParams(n_ctx=256))
    batch, arrays = context._batch, weakref.ref(context._tokens)
    context.close()
    del context
    gc.collect()
    assert arrays() is not None
    del batch
    gc.collect()
    assert arrays() is None
    model.close()


@pytest.mark.parametrize("error", [ValueError("no terminal"), KeyboardInterrupt()])
def test_what_a_progress_raises_ends_the_loading(file: Path, error: BaseException) -> None:
    """ctypes prints an exception in a callback and goes on."""

    def fail(what: str, done: float, of: float) -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        LlamaModel(file, EngineParams(), progress=fail)
    assert caught.value is error


class TestRows:
    """An eval may ask for more rows than a physical batch has tokens."""

    def test_more_rows_than_a_physical_batch(self, file: Path) -> None:
        model = LlamaModel(file, EngineParams())
        tokens = [2 + i % 25 for i in range(150)]
        rows = []
        for n_batch, n_ubatch in ((2048, 512), (128, 64), (64, 64)):
            params = EngineParams(n_ctx=256, n_batch=n_batch, n_ubatch=n_ubatch)
            context = LlamaContext(model, params, n_rows=128)
            rows.append(context.sequence().eval(tokens, 128).copy())
            context.close()
        model.close()
        assert rows[0].shape == (128, len(tiny.TOKENS))
        for others in rows[1:]:
            np.testing.assert_allclose(others, rows[0], atol=1e-2)  # other batches round otherwise

    def test_more_rows_than_a_context_has(self, file: Path) -> None:
        """llama.cpp itself would end the process."""
        model = LlamaModel(file, EngineParams())
        context = LlamaContext(model, EngineParams(n_ctx=256))
        sequence = context.sequence()
        for n, logits in ((100, 65), (3, 4), (3, -1)):
            with pytest.raises(EngineError, match=f"{logits} rows of {n} tokens"):
                sequence.eval([2] * n, logits)
        assert sequence.n_past == 0
        context.close()
        model.close()
