"""Headers that cannot be trusted, facts, and whether two files are one model."""

from __future__ import annotations

import io
import json
import struct
import time
import tracemalloc
from pathlib import Path

import gguf
import jsonschema
import numpy as np
import pytest
import tiny
from invoke import qdraft, schema
from rich.console import Console
from zoo import ZOO

from qdraft.errors import ModelFileError
from qdraft.gguf.facts import read_facts
from qdraft.gguf.header import LongArray, read_header
from qdraft.gguf.pairing import relate
from qdraft.llama.quantize import Recipe, quantize
from qdraft.render.inspect import facts_view


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.windowed(tmp_path_factory.mktemp("models") / "tiny-F32.gguf")


def test_the_header_is_what_the_gguf_package_reads(source_file: Path) -> None:
    header = read_header(source_file)
    reader = gguf.GGUFReader(source_file)
    assert [t.name for t in header.tensors] == [t.name for t in reader.tensors]
    for ours, theirs in zip(header.tensors, reader.tensors, strict=True):
        assert ours.shape == tuple(theirs.shape.tolist())
        assert (ours.type, ours.n_bytes) == (theirs.tensor_type.name, theirs.n_bytes)
        assert header.data_start + ours.offset == theirs.data_offset
    for key, value in header.metadata.items():
        content = reader.fields[key].contents()
        if isinstance(value, LongArray):
            assert value.n == len(content)
        elif isinstance(value, tuple):
            assert list(value) == list(content)
        else:
            assert value == content


def test_facts(model: Path) -> None:
    facts = read_facts(model)
    assert (facts.kind, facts.architecture, facts.n_layers, facts.n_embd) == (
        "model",
        "gemma3",
        2,
        64,
    )
    assert (facts.n_head, facts.n_head_kv, facts.sliding_window) == (4, 2, 32)
    assert (facts.n_vocab, facts.special) == (28, {"bos": 0, "eos": 1})
    assert facts.n_parameters == sum(t.n_elements for t in read_header(model).tensors)
    assert facts.bits_per_weight == 32
    assert not facts.recurrent


def test_experts(tmp_path: Path) -> None:
    moe = read_facts(tiny.mixture(tmp_path / "moe.gguf"))
    assert (moe.n_experts, moe.n_experts_used) == (4, 2)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("mamba", "recurrent: a state in 3 of 3 layers, 28.5 KiB for each text"),
        ("nemotron-h", "KV heads 2, trained on 4096, hybrid: a state in 1 of 3 layers, 10.2 KiB"),
    ],
)
def test_a_state(name: str, shape: str, tmp_path: Path) -> None:
    console = Console(width=200, file=io.StringIO())
    console.print(facts_view(read_facts(ZOO[name].write(tmp_path / "m.gguf")), None))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert shape in " ".join(text.split())


def test_q2_k_in_name_only(smollm2: tuple[Path, Path]) -> None:
    """A file called Q2_K may hold no Q2_K tensor.

    https://github.com/ggml-org/llama.cpp/issues/6614
    """
    facts = read_facts(smollm2[1])
    assert facts.file_type == "Q2_K"
    assert facts.in_name_only.startswith("Q2_K in name only: 0 of 211 matrices are Q2")
    assert read_facts(smollm2[0]).in_name_only == ""


class TestDamage:
    def test_cut_off(self, model: Path, tmp_path: Path) -> None:
        """A truncated download is refused before it is loaded, whatever its length.

        https://github.com/ggml-org/llama.cpp/pull/6885
        """
        data = model.read_bytes()
        for n in (*range(4, 2000, 97), len(data) // 2, len(data) - 1):
            path = tmp_path / "cut.gguf"
            path.write_bytes(data[:n])
            with pytest.raises(ModelFileError, match=r"cut off|damaged"):
                read_header(path)

    def test_claims_are_held_against_the_size(self, tmp_path: Path) -> None:
        path = tmp_path / "liar.gguf"
        for head in (
            struct.pack("<IQQ", 3, 2**62, 0),
            struct.pack("<IQQ", 3, 0, 2**62),
            struct.pack("<IQQQ", 3, 0, 1, 2**63) + b"k",
            struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 8, 2**40),
            struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 9, 1),
            struct.pack("<IQQQ1sI", 3, 0, 1, 1, b"k", 77),
            struct.pack("<IQQQ1sIQQ", 3, 1, 0, 1, b"t", 2, 2**40, 2**40) + bytes(12),
        ):
            path.write_bytes(b"GGUF" + head + bytes(64))
            started = time.perf_counter()
            with pytest.raises(ModelFileError):
                read_header(path)
            assert time.perf_counter() - started < 1
        path.write_bytes(b"GGUF" + struct.pack("<IQQ", 9, 0, 0))
        with pytest.raises(ModelFileError, match="version 9"):
            read_header(path)

    def test_mutations(self, model: Path, tmp_path: Path) -> None:
        """Bytes at random and at boundaries: an error or a header, in no time and little memory."""
        data = model.read_bytes()
        header = read_header(model)
        rng = np.random.default_rng(1)
        path = tmp_path / "mutant.gguf"
        refused = 0
        tracemalloc.start()
        for i in range(400):
            mutant = bytearray(data)
            for _ in range(int(rng.integers(1, 4))):
                place = int(rng.integers(4, header.data_start))
                value = (0, 0xFF, 0x7F, 0x80, int(rng.integers(256)))[i % 5]
                width = (1, 4, 8)[i % 3]
                mutant[place : place + width] = bytes([value]) * width
            path.write_bytes(mutant)
            try:
                read_facts(path)
            except ModelFileError:
                refused += 1
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert refused > 100
        assert peak < 64e6


@pytest.mark.real
class TestPairing:
    @pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "F16"])
    def test_quantizations_of_one_model(self, model: Path, tmp_path: Path, kind: str) -> None:
        other = quantize(model, tmp_path / "other.gguf", Recipe(kind), threads=1).path
        pairing = relate(read_facts(model), read_facts(other))
        assert (pairing.relation, pairing.differences) == ("same-model", ())
        assert pairing.weights_error is not None
        assert 0 < pairing.weights_error < 0.4

    def test_real_quantizations(self, smollm2: tuple[Path, Path], source_file: Path) -> None:
        facts = [read_facts(path) for path in (*smollm2, source_file)]
        for other in facts[1:]:
            pairing = relate(facts[0], other)
            assert pairing.relation == "same-model", pairing

    def test_another_training_of_the_same_shape(self, model: Path, tmp_path: Path) -> None:
        """Two fine-tunes of one base: the metadata are equal, the weights are not."""
        other = tiny.windowed(tmp_path / "other.gguf", seed=2)
        pairing = relate(read_facts(model), read_facts(other))
        assert pairing.relation == "same-vocabulary"
        assert "weights of" in pairing.differences[0].what
        tuned = tmp_path / "tuned.gguf"
        data = bytearray(model.read_bytes())
        header = read_header(model)
        for tensor in header.tensors:  # a few per cent, as tuning does
            start = header.data_start + tensor.offset
            values = np.frombuffer(data, dtype=np.float32, count=tensor.n_elements, offset=start)
            noise = np.random.default_rng(3).normal(size=values.shape).astype(np.float32)
            moved = values * (1 + 0.05 * noise)
            data[start : start + 4 * tensor.n_elements] = moved.astype(np.float32).tobytes()
        tuned.write_bytes(data)
        assert relate(read_facts(model), read_facts(tuned)).relation == "same-vocabulary"
        small = quantize(tuned, tmp_path / "small.gguf", Recipe("Q8_0"), threads=1).path
        assert relate(read_facts(model), read_facts(small)).relation == "same-vocabulary"

    def test_other_shapes_and_vocabularies(
        self, model: Path, tmp_path: Path, source_file: Path
    ) -> None:
        mixture = read_facts(tiny.mixture(tmp_path / "moe.gguf"))
        pairing = relate(read_facts(model), mixture)
        assert pairing.relation == "same-vocabulary"
        assert {"architecture", "experts"} <= {d.what for d in pairing.differences}
        pairing = relate(read_facts(model), read_facts(source_file))
        assert pairing.relation == "incompatible"
        assert any(d.what.startswith("token ") for d in pairing.differences)

    def test_the_command(self, smollm2: tuple[Path, Path], tmp_path: Path) -> None:
        done = qdraft("inspect", *map(str, smollm2), "--json")
        assert done.returncode == 0, done.stderr
        report = json.loads(done.stdout)
        jsonschema.validate(report, schema("inspect"))
        assert report["verdict"] == "same-model"
        assert report["differences"] == []
        assert [f["n_layers"] for f in report["files"]] == [30, 30]
        assert report["files"][0]["chat_template_renders"] is True
        shown = qdraft("inspect", *map(str, smollm2), NO_COLOR="1")
        assert "Q2_K in name only" in " ".join(shown.stdout.split())
        assert "same model, other quantization" in shown.stdout
        assert max(map(len, shown.stdout.splitlines())) <= 80
        broken = tmp_path / "broken.gguf"
        broken.write_bytes(smollm2[1].read_bytes()[:500_000])
        failed = qdraft("inspect", str(broken))
        assert failed.returncode == 3
        assert failed.stderr.startswith("error: ")
        assert qdraft("inspect", "a", "b", "c").returncode == 2
