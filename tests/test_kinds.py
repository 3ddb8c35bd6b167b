"""What a file is, from what it holds: kinds, split models, and files on which llama.cpp aborts."""

from __future__ import annotations

import json
import logging
import os
import sys
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path

import gguf
import jsonschema
import numpy as np
import pytest
import tiny
from invoke import qdraft, schema

from qdraft.errors import EngineError, ModelFileError
from qdraft.gguf.facts import read_facts, require_model
from qdraft.gguf.header import read_header
from qdraft.gguf.pairing import relate
from qdraft.gguf.parts import read_parts
from qdraft.llama import trial
from qdraft.llama.model import LlamaModel
from qdraft.llama.params import EngineParams
from qdraft.llama.vocab import require_same_vocab

LLAMA = tiny.LLAMA_TENSORS
NO_EMBEDDINGS = ("output_norm.weight", "blk.0.attn_q.weight")


@pytest.mark.parametrize(
    ("kind", "architecture", "keys", "tensors"),
    [
        ("model", "llama", {}, LLAMA),
        ("model", "llama", {"llama.pooling_type": 0, "llama.attention.causal": True}, LLAMA),
        ("model", "pangu-embedded", {}, LLAMA),  # for embedded devices: a language model
        ("model", "deepseek2", {}, (*LLAMA, "blk.1.nextn.eh_proj.weight")),
        ("model", "gemma3", {"gemma3.vision.block_count": 2}, (*LLAMA, "v.blk.0.attn_q.weight")),
        ("embedding", "bert", {}, LLAMA),
        ("embedding", "llama-embed", {}, LLAMA),
        ("embedding", "llama", {"llama.pooling_type": 1}, LLAMA),
        ("embedding", "qwen3", {"qwen3.pooling_type": 3}, LLAMA),
        ("embedding", "llama", {"llama.attention.causal": False}, LLAMA),
        ("embedding", "t5encoder", {}, ("token_embd.weight", "enc.blk.0.attn_q.weight")),
        ("embedding", "unknown", {}, ("token_embd.weight", "enc.blk.0.attn_q.weight")),
        ("reranker", "llama", {"llama.pooling_type": 4}, LLAMA),
        ("reranker", "qwen3", {}, (*LLAMA, "cls.output.weight")),
        ("reranker", "qwen3", {"qwen3.classifier.output_labels": ["yes", "no"]}, LLAMA),
        ("encoder-decoder", "t5", {}, LLAMA),
        ("encoder-decoder", "unknown", {}, ("token_embd.weight", "dec.blk.0.attn_q.weight")),
        ("diffusion", "dream", {}, LLAMA),
        ("diffusion", "llada-moe", {}, LLAMA),
        ("diffusion", "llama", {"diffusion.shift_logits": True}, LLAMA),
        ("head", "eagle3", {}, LLAMA),
        ("head", "dflash", {}, LLAMA),
        ("head", "gemma4-assistant", {}, LLAMA),
        ("head", "llama", {}, ("token_embd.weight", "fc.weight", "d2t")),
        ("head", "qwen3", {}, ("blk.28.nextn.eh_proj.weight", "blk.28.attn_q.weight")),
        ("head", "glm4moe", {}, ("token_embd.weight", "blk.46.nextn.enorm.weight")),
        ("speech", "wavtokenizer-dec", {}, LLAMA),
        ("speech", "pockettts", {}, LLAMA),
        ("speech", "unknown", {}, ("token_embd.weight", "posnet.0.conv1.weight")),
        ("projector", "clip", {}, ("mm.0.weight",)),
        ("projector", "", {"general.type": "mmproj"}, ("v.blk.0.attn_q.weight",)),
        ("adapter", "llama", {}, ("blk.0.attn_q.weight.lora_a",)),
        ("adapter", "llama", {"general.type": "adapter"}, ()),
        ("control-vector", "controlvector", {}, ("direction.1",)),
        ("control-vector", "llama", {}, ("direction.1", "direction.2")),
        ("imatrix", "", {}, ("blk.0.attn_q.weight.in_sum2",)),
        ("imatrix", "", {"general.type": "imatrix"}, ()),
        ("pictures", "flux", {}, ("double_blocks.0.img_attn.qkv.weight",)),
        ("pictures", "sd3", {}, ("joint_blocks.0.x_block.attn.qkv.weight",)),
        ("pictures", "wan", {}, ("blocks.0.self_attn.q.weight",)),
        ("pictures", "unknown", {}, ("model.diffusion_model.input_blocks.0.weight",)),
        ("vocabulary", "llama", {}, ()),
        ("other", "llama", {}, NO_EMBEDDINGS),
    ],
)
def test_kinds_by_content(
    kind: str, architecture: str, keys: dict[str, object], tensors: Sequence[str], tmp_path: Path
) -> None:
    facts = read_facts(tiny.header(tmp_path / "x.gguf", architecture, keys, tensors))
    assert facts.kind == kind
    assert bool(facts.refusal) == (kind != "model")


@pytest.mark.parametrize(
    "keys", [{}, {"tokenizer.ggml.model": "no_vocab"}, {"tokenizer.ggml.model": "none"}]
)
def test_a_model_without_a_tokenizer(keys: dict[str, object], tmp_path: Path) -> None:
    path = tiny.header(tmp_path / "x.gguf", keys=keys, tokens=None)
    with pytest.raises(ModelFileError, match=r"x\.gguf has no tokenizer"):
        require_model(path)


def test_an_unknown_tokenizer_is_a_sentence_of_llama_cpp(tmp_path: Path) -> None:
    keys = {"tokenizer.ggml.model": "weird", "tokenizer.ggml.tokens": ["a", "b"]}
    path = tiny.header(tmp_path / "x.gguf", keys=keys, tokens=None)
    assert read_facts(path).kind == "model"


@pytest.mark.parametrize(
    ("architecture", "keys", "tensor"),
    [
        *((name, {}, "") for name in ("deepseek4", "minimax-01", "kimi-k3", "qwen4exp", "lfm2")),
        ("new", {"new.ssm.state_size": 16}, ""),
        ("new", {"new.shortconv.l_cache": 3}, ""),
        ("new", {"new.kda.head_dim": 64}, ""),
        ("new", {"new.attention.recurrent_layers": [True, False]}, ""),
        ("new", {}, "blk.0.ssm_conv1d.weight"),
        ("new", {}, "blk.3.time_mix_key.weight"),
        ("new", {}, "blk.3.shortconv.conv.weight"),
    ],
)
def test_recurrent_by_name_and_by_content(
    architecture: str, keys: dict[str, object], tensor: str, tmp_path: Path
) -> None:
    tensors = (*LLAMA, *([tensor] if tensor else []))
    path = tiny.header(tmp_path / "x.gguf", architecture, keys, tensors)
    facts = read_facts(path)
    assert (facts.kind, facts.refusal, facts.recurrent) == ("model", "", True)


class TestSplit:
    """The header says what is a part, as it does for llama.cpp; the name alone says nothing.

    https://github.com/ggml-org/llama.cpp/issues/9613
    https://github.com/ggml-org/llama.cpp/issues/15164
    https://github.com/ollama/ollama/issues/5245
    """

    def test_all_parts_from_any(self, tmp_path: Path) -> None:
        paths = [tmp_path / f"big-{i:05}-of-00003.gguf" for i in (1, 2, 3)]
        tiny.part(paths[0], 0, 3)
        tiny.part(paths[2], 2, 3)
        with pytest.raises(ModelFileError, match=r"one of 3 parts, of which big-00002-of-00003"):
            read_parts(paths[2])
        tiny.part(paths[1], 1, 3)
        for path in paths:
            assert [header.path for header in read_parts(path)] == paths
        facts = read_facts(paths[1])
        assert (facts.path, facts.parts, facts.refusal) == (paths[0], tuple(paths), "")

    @pytest.mark.parametrize("keys", [{}, {"split.count": 1}, {"split.count": 0}, {"split.no": 1}])
    @pytest.mark.parametrize("name", ["m-00001-of-00003.gguf", "m-00001-of-00001.gguf", "m.gguf"])
    def test_a_merged_file_is_whole_whatever_it_is_called(
        self, name: str, keys: dict[str, object], tmp_path: Path
    ) -> None:
        path = tiny.header(tmp_path / name, keys=keys)
        assert read_facts(path).parts == (path,)

    @pytest.mark.parametrize(
        ("name", "no", "error"),
        [
            ("lone.gguf", 0, "part 1 of 3 by its header, but its name does not say so"),
            ("sha256-0a1b", 1, "part 2 of 3 by its header, but its name does not say so"),
            ("m-00001-of-00003.gguf", 1, "part 2 of 3 by its header, but its name"),
            ("m-00002-of-00004.gguf", 1, "part 2 of 3 by its header, but its name"),
            ("m-00004-of-00003.gguf", 3, "claims to be part 3 of 3"),
        ],
    )
    def test_a_lone_part_is_never_a_model(
        self, name: str, no: int, error: str, tmp_path: Path
    ) -> None:
        path = tiny.part(tmp_path / name, no, 3)
        with pytest.raises(ModelFileError, match=error):
            read_facts(path)

    def test_parts_of_different_models(self, tmp_path: Path) -> None:
        paths = [tmp_path / f"big-{i:05}-of-00002.gguf" for i in (1, 2)]
        tiny.part(paths[0], 0, 2, n_tensors=7)
        tiny.part(paths[1], 1, 2)
        with pytest.raises(ModelFileError, match=r"have 2 tensors together, but .* has 7"):
            read_facts(paths[0])
        tiny.part(paths[1], 0, 2)
        with pytest.raises(ModelFileError, match="is not part 2 of 2 by its header"):
            read_facts(paths[0])


def test_in_name_only_counts_weights_too(tmp_path: Path) -> None:
    """A mixture of types is what it is called if most of its weights are, or most matrices.

    https://github.com/unslothai/unsloth/issues/2344
    """
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_file_type(int(gguf.LlamaFileType.MOSTLY_Q2_K))
    types = gguf.GGMLQuantizationType
    for i in range(2):
        big = np.zeros((100, 84), dtype=np.uint8)  # rows of one block, 256 weights
        writer.add_tensor(f"blk.{i}.ffn_up_exps.weight", big, raw_dtype=types.Q2_K)
    for i in range(9):
        small = np.zeros((1, 210), dtype=np.uint8)
        writer.add_tensor(f"blk.{i}.attn_q.weight", small, raw_dtype=types.Q6_K)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert read_facts(tmp_path / "x.gguf").in_name_only == ""


@pytest.mark.parametrize(
    ("tokens", "pair"),
    [
        (["a", "b", "c", "b"], (1, 3)),
        (["a", "b\0x", "b"], (1, 2)),  # llama.cpp reads texts up to a zero byte
        (["[EMPTY_1]", ""], (0, 1)),  # its name for a token without a text
        (["", "a", ""], None),
        ([*map(str, range(100)), "7"], (7, 100)),
    ],
)
def test_tokens_with_the_same_text(
    tokens: list[str], pair: tuple[int, int] | None, tmp_path: Path
) -> None:
    """llama.cpp aborts on them.

    https://github.com/ggml-org/llama.cpp/issues/25739
    """
    facts = read_facts(tiny.header(tmp_path / "x.gguf", tokens=tokens))
    assert facts.kind == "model"
    if pair is None:
        assert facts.refusal == ""
    else:
        assert f"tokens {pair[0]} and {pair[1]} have the same text" in facts.refusal


@pytest.mark.parametrize(
    ("key", "n"), [("block_count", 4_000_000_000), ("block_count", 0), ("expert_count", 1025)]
)
def test_counts_that_llama_cpp_does_not_take(key: str, n: int, tmp_path: Path) -> None:
    path = tiny.header(tmp_path / "x.gguf", keys={f"llama.{key}": n})
    with pytest.raises(ModelFileError, match=f"it claims {n}"):
        require_model(path)


@pytest.mark.real
def test_every_command_says_the_same(source_file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "files"
    folder.mkdir()
    path = str(tiny.header(folder / "x.gguf", keys={"llama.pooling_type": 3}))
    with open(path, "ab") as file:
        file.truncate(2 << 20)  # scan leaves smaller files out
    commands = (
        ("run", "-m", path, "--no-draft", "-p", "hi"),
        ("run", "-m", str(source_file), "-d", path, "-p", "hi"),
        ("plan", "-m", path, "--no-draft"),
        ("make", path, "--type", "Q8_0"),
        ("models", "add", "x", "-m", path),
        ("compare", path, "Q8_0"),
    )
    for command in commands:
        done = qdraft(*command)
        assert done.returncode == 3, done
        assert "x.gguf is an embedding model, not a language model" in " ".join(done.stderr.split())
    inspected = qdraft("inspect", path, "--json")
    jsonschema.validate(json.loads(inspected.stdout), schema("inspect"))
    assert json.loads(inspected.stdout)["files"][0]["kind"] == "embedding"
    assert "it is an embedding model" in qdraft("inspect", path).stdout
    scanned = json.loads(qdraft("models", "scan", str(folder), "--json").stdout)
    assert path not in json.dumps(scanned)


def test_figures_that_are_not_finite_are_null(tmp_path: Path) -> None:
    keys = {"llama.rope.freq_base": float("inf"), "llama.rope.scaling.factors": [1.0, float("nan")]}
    done = qdraft("inspect", str(tiny.header(tmp_path / "x.gguf", keys=keys)), "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout, parse_constant=pytest.fail)
    jsonschema.validate(report, schema("inspect"))
    rope = report["files"][0]["rope"]
    assert rope == {"rope.freq_base": None, "rope.scaling.factors": [1.0, None]}


class TestTrial:
    """A file that is new is loaded by a child first, once."""

    @pytest.fixture
    def path(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.setenv("QDRAFT_CACHE_DIR", str(tmp_path / "cache"))
        return tiny.header(tmp_path / "x.gguf")

    @pytest.fixture
    def run(self, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[Path]]:
        """Let a child run this code; return the files of the trials."""

        def use(code: str) -> list[Path]:
            tried: list[Path] = []

            def command(_module: str, path: str, *_rest: str) -> list[str]:
                tried.append(Path(path))
                return [sys.executable, "-c", code]

            monkeypatch.setattr(trial, "command", command)
            return tried

        return use

    def test_an_abort_is_a_sentence_and_kept(
        self, path: Path, run: Callable[[str], list[Path]]
    ) -> None:
        tried = run(
            "import os, sys\n"
            "print('/build/src/llama-vocab.cpp:25: GGML_ASSERT(a) failed', file=sys.stderr)\n"
            "print('other', file=sys.stderr, flush=True)\n"
            "os.abort()"
        )
        for _ in range(2):
            with pytest.raises(ModelFileError, match=r"crashes: llama-vocab.cpp:25: GGML_ASSERT"):
                trial.require_loadable(path)
        assert tried == [path]

    def test_what_loads_is_kept_by_content(
        self, path: Path, tmp_path: Path, run: Callable[[str], list[Path]]
    ) -> None:
        tried = run("print('done')")
        copy = tmp_path / "copy.gguf"
        copy.write_bytes(path.read_bytes())
        for each in (path, path, copy):
            trial.require_loadable(each)
        assert tried == [path]
        trial.require_loadable(tiny.header(path, keys={"llama.block_count": 1}))
        assert tried == [path, path]

    def test_an_answer_that_cannot_be_kept(
        self, path: Path, tmp_path: Path, run: Callable[[str], list[Path]]
    ) -> None:
        (tmp_path / "cache").write_text("a file where the directory should be")
        tried = run("print('done')")
        trial.require_loadable(path)
        trial.require_loadable(path)
        assert tried == [path, path]

    @pytest.mark.parametrize(
        ("code", "message"),
        [
            ("import os; os.kill(os.getpid(), 9)", "ended by signal 9"),
            (
                "import os, sys\nprint('failed to allocate CPU buffer', file=sys.stderr, flush=True)"
                "\nos.abort()",
                "ended by signal 6",
            ),
            ("raise ValueError('no')", "fails: ValueError: no"),
        ],
    )
    def test_what_says_nothing_of_the_file_is_not_kept(
        self,
        path: Path,
        run: Callable[[str], list[Path]],
        code: str,
        message: str,
    ) -> None:
        tried = run(code)
        for _ in range(2):
            with pytest.raises(EngineError, match=message):
                trial.require_loadable(path)
        assert len(tried) == 2

    def test_last_words(self) -> None:
        thrown = "terminate called after throwing\n  what():  map::at\nAborted\n"
        assert trial.last_words(thrown) == "map::at"
        assert trial.last_words("a\n/x/y.cpp:7: GGML_ABORT\n\n") == "y.cpp:7: GGML_ABORT"
        assert trial.last_words("") == ""

    @pytest.mark.real
    def test_a_real_abort_of_a_decode(self, path: Path) -> None:
        """More rotated dimensions than a head has: the file loads, and its first decode aborts."""
        tiny.windowed(path, rotated=1000)
        with pytest.raises(ModelFileError, match=r"crashes: \w+\.\w+:\d+: GGML_ASSERT"):
            LlamaModel(path, EngineParams())

    @pytest.mark.real
    def test_a_real_abort(self, path: Path) -> None:
        """A mixture without used experts: llama.cpp asserts that there are some."""
        keys = {
            "llama.context_length": 8,
            "llama.embedding_length": 32,
            "llama.block_count": 1,
            "llama.expert_count": 4,
        }
        tiny.header(path, keys=keys)
        with pytest.raises(ModelFileError, match=r"crashes: llama-\w+\.cpp:\d+: GGML_ASSERT"):
            LlamaModel(path, EngineParams())


class TestSameModelOfTwoPublishers:
    """Other control tokens, EOS or flags are a warning: the target's vocabulary makes the text.

    https://github.com/unslothai/unsloth/issues/416
    """

    tokens = ("<s>", "</s>", "<|a|>", "a", "b", "ab")

    def model(self, path: Path, tokens: Sequence[str], eos: int = 1) -> LlamaModel:
        return LlamaModel(tiny.zeros(path, tokens, (), eos, control=(2,)), EngineParams())

    def test_a_warning(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        first = self.model(tmp_path / "1.gguf", self.tokens)
        renamed = ("<s>", "</s>", "<|b|>", "a", "b", "ab")
        with caplog.at_level(logging.WARNING):
            require_same_vocab(first.vocab, self.model(tmp_path / "2.gguf", renamed, 0).vocab)
        assert [record.getMessage() for record in caplog.records] == [
            "token 2 is '<|a|>' in the target, '<|b|>' in the draft and 1 more difference: qdraft "
            "uses the target's vocabulary"
        ]
        pairing = relate(read_facts(tmp_path / "1.gguf"), read_facts(tmp_path / "2.gguf"))
        assert pairing.relation == "same-model"
        assert {"control token 2", "special tokens"} <= {d.what for d in pairing.differences}

    def test_normal_tokens_are_refused(self, tmp_path: Path) -> None:
        first = tiny.zeros(tmp_path / "1.gguf", self.tokens, control=(2,))
        for name, tokens in (
            ("2", ("<s>", "</s>", "<|a|>", "a", "X", "ab")),
            ("3", (*self.tokens, "new")),
        ):
            other = tiny.zeros(tmp_path / f"{name}.gguf", tokens, control=(2,))
            pairing = relate(read_facts(first), read_facts(other))
            assert pairing.relation == "incompatible"
            assert pairing.differences[0].what in ("token 4", "token 6")
        padded = tiny.zeros(tmp_path / "4.gguf", (*self.tokens, "x"), (6,), control=(2,))
        assert relate(read_facts(first), read_facts(padded)).relation == "same-vocabulary"


class TestHostileHeaders:
    @pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
    def test_a_pipe_is_not_waited_for(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "x.gguf")
        with pytest.raises(ModelFileError, match="is a pipe or a device, not a file"):
            read_facts(tmp_path / "x.gguf")

    @pytest.mark.parametrize(("kind", "size"), [(0, 1), (5, 4), (8, 8)])
    def test_memory_does_not_follow_claims(self, kind: int, size: int, tmp_path: Path) -> None:
        """A sparse file of 130 MB that is nearly all one array, of bytes, numbers or texts."""
        path = tmp_path / "sparse.gguf"
        n = (1 << 27) // size
        head = b"GGUF" + np.array([3], "<u4").tobytes() + np.array([0, 1, 1], "<u8").tobytes()
        head += b"k" + np.array([9, kind], "<u4").tobytes() + np.array([n], "<u8").tobytes()
        path.write_bytes(head)
        with path.open("rb+") as file:
            file.truncate(len(head) + n * size)
        tracemalloc.start()
        try:
            if kind == 8:
                with pytest.raises(ModelFileError, match=f"it has {n} texts, but qdraft reads at"):
                    read_header(path)
            else:
                assert read_header(path).metadata["k"].n == n  # type: ignore[union-attr]
            assert tracemalloc.get_traced_memory()[1] < 20e6
        finally:
            tracemalloc.stop()

    def test_cut_and_mutated_headers(self, tmp_path: Path) -> None:
        """Each is a header or an error, whatever the bytes are."""
        path = tiny.header(
            tmp_path / "x.gguf",
            keys={
                "llama.block_count": 2,
                "llama.rope.dimension_sections": [1, 2, 3],
                "split.count": 1,
                "general.file_type": 7,
                "tokenizer.ggml.token_type": [1] * len(tiny.TOKENS),
                "general.alignment": 32,
            },
        )
        data = path.read_bytes()
        n_header = read_header(path).data_start
        rng = np.random.default_rng(5)
        refused = 0
        for i in range(300):
            mutant = bytearray(data)
            if i % 6 == 0:
                mutant = mutant[: int(rng.integers(5, n_header))]
            else:
                place = int(rng.integers(4, n_header))
                width = (1, 2, 4, 8)[i % 4]
                mutant[place : place + width] = rng.bytes(width) if i % 2 else b"\xff" * width
            path.write_bytes(mutant)
            try:
                read_facts(path)
            except ModelFileError:
                refused += 1
        assert 100 < refused < 300
