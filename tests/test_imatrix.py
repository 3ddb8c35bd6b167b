"""Importance matrices: collected as llama.cpp's own tool does, read and written in its formats."""

from __future__ import annotations

import math
import shutil
import struct
import subprocess
from pathlib import Path

import numpy as np
import pytest
import tiny

from qdraft import EngineParams
from qdraft.errors import ModelFileError, UsageError
from qdraft.gguf.facts import Facts, read_facts
from qdraft.gguf.header import read_header
from qdraft.gguf.imatrix import ImportanceMatrix, load
from qdraft.llama.imatrix import collect
from qdraft.llama.model import LlamaModel
from qdraft.llama.quantize import Recipe, quantize
from qdraft.making.calibration import built_in_text, to_chunks
from qdraft.making.matrix import check_matrix

# llama-imatrix -m SmolLM2-135M-Instruct.Q4_1.gguf -f qdraft/data/calibration.txt -c 512 --chunks 2
# of llama-cpp-python 0.3.36: sum of the means of a weight, and the means of columns 0, 100, 500.
RECORDED = {
    "blk.0.attn_q.weight": (1.29017, 0.000157079, 0.00444208, 0.000754134),
    "blk.7.attn_output.weight": (15.2078, 0.103953, 0.0369827, 0.00916408),
    "blk.15.ffn_gate.weight": (13.429, 0.00494799, 0.00442638, 0.00909992),
    "blk.29.ffn_down.weight": (19344.7, 0.522026, 0.455327, 2.00102),
}


def sample(n_columns: int = 3) -> ImportanceMatrix:
    rng = np.random.default_rng(1)
    matrix = ImportanceMatrix(n_chunks=2, datasets=("some text",))
    matrix.add("blk.0.attn_q.weight", 0, 1, rng.normal(size=(5, n_columns)).astype(np.float32))
    matrix.add("blk.0.ffn_up_exps.weight", 1, 3, rng.normal(size=(4, 2)).astype(np.float32))
    return matrix


def test_means_are_of_squares_and_one_where_nothing_was_met() -> None:
    matrix = ImportanceMatrix()
    matrix.add("w", 0, 2, np.array([[1, 2], [3, 4]], dtype=np.float32))
    matrix.add("w", 0, 2, np.array([[5, 6]], dtype=np.float32))
    assert matrix.counts["w"].tolist() == [3, 0]
    np.testing.assert_allclose(matrix.means("w"), [35 / 3, 56 / 3, 1, 1])


def test_the_file_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "a.imatrix.gguf"
    matrix = sample()
    matrix.save(path)
    back = load(path)
    assert (back.n_chunks, back.chunk_size, back.datasets) == (2, 512, ("some text",))
    for name in matrix.sums:
        np.testing.assert_allclose(back.means(name), matrix.means(name), rtol=1e-6)
        assert back.counts[name].tolist() == matrix.counts[name].tolist()


def legacy(entries: dict[str, tuple[int, list[float]]], tail: bytes = b"") -> bytes:
    data = struct.pack("<i", len(entries))
    for name, (n_calls, values) in entries.items():
        data += struct.pack("<i", len(name)) + name.encode()
        data += struct.pack(f"<ii{len(values)}f", n_calls, len(values), *values)
    return data + tail


def test_the_legacy_form_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.dat"
    tail = struct.pack("<ii4s", 7, 4, b"text")
    path.write_bytes(legacy({"blk.0.attn_q.weight": (4, [8.0, 2.0])}, tail))
    matrix = load(path)
    np.testing.assert_allclose(matrix.means("blk.0.attn_q.weight"), [2.0, 0.5])
    assert (matrix.n_chunks, matrix.datasets) == (7, ("text",))
    path.write_bytes(legacy({"w": (1, [3.0])}))  # the tail is optional
    assert load(path).means("w").tolist() == [3.0]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"GGUF",
        b"GGUF\x03\x00\x00\x00" + bytes(16),
        b"\x01\x00",
        struct.pack("<ii", 1, 2**31 - 1),
        struct.pack("<ii", 1, -5),
        legacy({"w": (1, [1.0, 2.0])})[:-3],
        legacy({"w": (1, [float("nan")])}),
        struct.pack("<i", 0),
    ],
)
def test_other_files_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.dat"
    path.write_bytes(content)
    with pytest.raises(ModelFileError, match="importance matrix"):
        load(path)


class TestOfAModel:
    """A matrix for a model: of its tensors, with data for all of them.

    https://github.com/ggml-org/llama.cpp/issues/9167
    """

    @pytest.fixture
    def target(self, tmp_path: Path) -> Facts:
        return read_facts(tiny.mixture(tmp_path / "moe.gguf"))

    def matrix_of(self, target: Facts) -> ImportanceMatrix:
        """A matrix with data for every tensor of the layers, as a collection gives it."""
        rng = np.random.default_rng(0)
        matrix = ImportanceMatrix(n_chunks=1)
        for tensor in read_header(target.path).tensors:
            if tensor.name.startswith("blk.") and len(tensor.shape) > 1:
                n_columns, n_matrices = tensor.shape[0], math.prod(tensor.shape[2:])
                for i in range(n_matrices):
                    rows = rng.normal(size=(3, n_columns)).astype(np.float32)
                    matrix.add(tensor.name, i, n_matrices, rows)
        return matrix

    def check(self, matrix: ImportanceMatrix, target: Facts, folder: Path) -> None:
        path = folder / "matrix.gguf"
        matrix.save(path)
        check_matrix(path, target)

    def test_its_own(self, target: Facts, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        matrix = self.matrix_of(target)
        self.check(matrix, target, tmp_path)
        # The router is read too, but llama.cpp does not quantize it.
        for by_name in (matrix.sums, matrix.counts):
            del by_name["blk.0.ffn_gate_inp.weight"]  # type: ignore[attr-defined]
        self.check(matrix, target, tmp_path)
        assert caplog.messages == []

    def test_gaps_are_counted(
        self, target: Facts, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        matrix = self.matrix_of(target)
        del matrix.sums["blk.0.attn_q.weight"]
        matrix.sums["blk.1.attn_k.weight"][:] = 0
        matrix.sums["blk.1.ffn_up_exps.weight"][1:3] = 0
        matrix.counts["blk.1.ffn_down_exps.weight"][0] = 0
        matrix.sums["blk.1.ffn_down_exps.weight"][0] = 0
        self.check(matrix, target, tmp_path)
        (message,) = caplog.messages
        # Of each layer: 4 matrices of attention, and 3 of each of 4 experts.
        assert "has no data for 5 of the 32 matrices of moe.gguf" in message
        assert (matrix.means("blk.1.attn_k.weight") == 1).all()
        up = matrix.means("blk.1.ffn_up_exps.weight").reshape(4, -1)
        assert [bool((row == 1).all()) for row in up] == [False, True, True, False]

    def test_another_models(self, target: Facts, tmp_path: Path) -> None:
        matrix = self.matrix_of(target)
        matrix.add("blk.2.attn_q.weight", 0, 1, np.ones((1, 64), dtype=np.float32))
        with pytest.raises(ModelFileError, match=r"of another model than moe.gguf: 1 of its 17"):
            self.check(matrix, target, tmp_path)
        matrix = self.matrix_of(target)
        del matrix.sums["blk.0.attn_q.weight"]
        matrix.add("blk.0.attn_q.weight", 0, 1, np.ones((1, 32), dtype=np.float32))
        with pytest.raises(ModelFileError, match=r"attn_q.weight has 32 values, the model's 64"):
            self.check(matrix, target, tmp_path)

    def test_values_that_no_collection_gives(self, target: Facts, tmp_path: Path) -> None:
        for factor, message in ((-1, "negative values"), (0, "all values are zero")):
            matrix = self.matrix_of(target)
            for sums in matrix.sums.values():
                sums *= factor
            with pytest.raises(ModelFileError, match=message):
                self.check(matrix, target, tmp_path)


def test_chunks() -> None:
    chunks = to_chunks([[5] * 700, [6] * 400], bos=1)
    assert [len(c) for c in chunks] == [512, 512]
    assert chunks[0][:2] == [1, 5]
    assert chunks[1][186:190] == [5, 5, 6, 6]
    assert to_chunks([[5] * 512], bos=-1)[0][0] == 5
    with pytest.raises(UsageError, match="511 tokens"):
        to_chunks([[5] * 511], bos=-1)


@pytest.mark.real
def test_a_mixture_of_experts_is_collected_by_expert(tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp")
    path = tiny.mixture(tmp_path / "moe.gguf")
    chunks = [list(np.random.default_rng(i).integers(2, 28, size=200)) for i in range(2)]
    model = LlamaModel(path, EngineParams())
    try:
        matrix = collect(model, chunks, EngineParams(n_threads=1))
    finally:
        model.close()
    assert matrix.n_chunks == 2
    up, gate = "blk.1.ffn_up_exps.weight", "blk.1.ffn_gate_inp.weight"
    assert matrix.counts[up].sum() == 2 * 400  # two experts a token
    assert (matrix.counts[up] > 0).all()
    # Each token goes to two experts with the same activations that the router sees.
    np.testing.assert_allclose(matrix.sums[up].sum(axis=0), 2 * matrix.sums[gate][0], rtol=1e-4)
    assert matrix.sums["blk.1.ffn_down_exps.weight"].shape == (4, tiny.N_FF)
    # The first attention's input can be computed by hand: the norm of the embeddings.
    values = tiny.random_values(
        {"token_embd.weight": (28, 64), "output_norm.weight": (64,), **tiny.attention(0)}
    )
    x = values["token_embd.weight"][np.concatenate(chunks)]
    x = x / np.sqrt((x**2).mean(axis=1, keepdims=True) + 1e-5) * values["blk.0.attn_norm.weight"]
    np.testing.assert_allclose(matrix.means("blk.0.attn_q.weight"), (x**2).mean(axis=0), rtol=1e-3)
    # and llama.cpp quantizes by it, one part an expert
    saved = tmp_path / "moe.imatrix.gguf"
    matrix.save(saved)
    plain = quantize(path, tmp_path / "a.gguf", Recipe("Q4_0"), threads=1)
    made = quantize(path, tmp_path / "b.gguf", Recipe("Q4_0", imatrix=saved), threads=1)
    assert made.n_bytes == plain.n_bytes
    assert (tmp_path / "a.gguf").read_bytes() != (tmp_path / "b.gguf").read_bytes()


@pytest.mark.real
def test_it_agrees_with_llama_imatrix(source_file: Path, tmp_path: Path) -> None:
    """With the tool where it is on the path, else with what it gave once."""
    model = LlamaModel(source_file, EngineParams())
    try:
        chunks = to_chunks([model.vocab.tokenize(built_in_text())], model.vocab.chunk_bos)[:2]
        matrix = collect(model, chunks, EngineParams())
    finally:
        model.close()
    assert len(matrix.sums) == 210
    for name, (total, *columns) in RECORDED.items():
        means = matrix.means(name)
        assert means.sum() == pytest.approx(total, rel=0.01), name
        assert means[[0, 100, 500]] == pytest.approx(columns, rel=0.05), name
    tool = shutil.which("llama-imatrix")
    if tool is None:
        return
    text, out = tmp_path / "text.txt", tmp_path / "theirs.gguf"
    text.write_text(built_in_text(), encoding="utf-8")
    subprocess.run(
        [
            tool,
            "-m",
            source_file,
            "-f",
            text,
            "-o",
            out,
            "-c",
            "512",
            "--chunks",
            "2",
            "--no-repack",
            "--no-ppl",
            "-ngl",
            "0",
        ],
        check=True,
        capture_output=True,
    )
    theirs = load(out)
    assert set(theirs.sums) == set(matrix.sums)
    for name in theirs.sums:
        ours, other = matrix.means(name), theirs.means(name)
        assert np.abs(ours - other).sum() <= 0.01 * other.sum(), name
