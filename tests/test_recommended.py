"""Sampling settings inside a file replace the defaults, as in llama.cpp, and a given option wins.

https://github.com/ggml-org/llama.cpp/pull/17120
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import jsonschema
import pytest
import tiny
from invoke import qdraft, schema

from qdraft import EngineParams, Pair, PairSpec
from qdraft.cli.options.sampling import SamplingOptions
from qdraft.cli.recommendation import PENALTIES, follow
from qdraft.decoding.records import SamplingParams
from qdraft.gguf.header import Value
from qdraft.gguf.recommended import describe, read_recommended
from qdraft.study.recording import Recording
from qdraft.study.replay import read_recommended as of_recording


def recommending(path: Path, values: dict[str, Any]) -> Path:
    """A tiny model whose header has these keys under general.sampling."""
    source = gguf.GGUFReader(tiny.windowed(path.with_suffix(".part")))
    architecture = source.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(path, architecture)
    for field in source.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            of_array = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=of_array)
    for name, value in values.items():
        add = {int: writer.add_int32, float: writer.add_float32, str: writer.add_string}
        add[type(value)](f"general.sampling.{name}", value)
    for tensor in source.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


ALL: dict[str, Value] = {
    "general.sampling.temp": 0.6000000238418579,  # as a float of 32 bits holds it
    "general.sampling.top_k": 20.0,
    "general.sampling.top_p": "0.9 or so",
    "general.sampling.min_p": 0,
    "general.sampling.penalty_last_n": -1,
    "general.sampling.penalty_repeat": 1.1,
}


def test_every_key_that_llama_cpp_reads() -> None:
    assert read_recommended(ALL).values == {
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.9,
        "min_p": 0,
        "repeat_last_n": -1,
        "repeat_penalty": 1.1,
    }
    assert read_recommended(ALL).ignored == ()
    assert read_recommended({"general.name": "x"}).params() == SamplingParams()


@pytest.mark.parametrize(
    ("key", "value", "values", "ignored"),
    [
        ("temp", -1.0, {"temperature": 0}, ()),
        ("top_k", -5, {"top_k": 0}, ()),
        ("top_p", 1.5, {"top_p": 1}, ()),
        ("top_p", 0.0, {}, ("top-p 0",)),
        ("temp", float("nan"), {}, ()),
        ("temp", "warm", {}, ()),
        ("temp", True, {}, ()),
        ("temp", (1.0, 2.0), {}, ()),
        ("penalty_last_n", -2, {}, ("penalty-last-n -2",)),
        ("top_k", 10**12, {"top_k": 2**31 - 1}, ()),
        ("mirostat", 2, {}, ("mirostat 2",)),
        ("mirostat", 0, {}, ()),
        ("mirostat_tau", 5.0, {}, ()),
        ("xtc_probability", 0.5, {"xtc_probability": 0.5}, ()),
        ("xtc_probability", -1.0, {"xtc_probability": 0}, ()),
        ("xtc_threshold", 0.1, {"xtc_threshold": 0.1}, ()),
        ("xtc_threshold", 2.0, {"xtc_threshold": 1}, ()),
        (
            "sequence",
            "top_k;temperature",
            {"repeat_penalty": 1, "typical_p": 1, "top_p": 1, "min_p": 0, "xtc_probability": 0},
            (),
        ),
        ("sequence", "penalties;dry;top_n_sigma;top-k;typ;nucleus;minp;xtc;temp", {}, ()),
        ("sequence", "temperature;top_p", {}, ("the order temperature;top_p",)),
        ("sequence", "adaptive_p", {}, ("the order adaptive_p",)),
    ],
)
def test_odd_values(
    key: str, value: Value, values: dict[str, float], ignored: tuple[str, ...]
) -> None:
    recommended = read_recommended({f"general.sampling.{key}": value})
    assert recommended.values == values
    assert recommended.ignored == ignored


def test_a_sequence_switches_off_what_it_leaves_out() -> None:
    metadata: dict[str, Value] = {**ALL, "general.sampling.sequence": "temperature"}
    values = read_recommended(metadata).values
    assert values["temperature"] == 0.6
    assert (values["top_k"], values["top_p"], values["repeat_penalty"]) == (0, 1, 1)


def test_a_given_option_wins() -> None:
    values = read_recommended(ALL).values
    options = SamplingOptions(given=frozenset({"top_k"}), top_k=40, seed=3)
    params, used = follow(values, options, without=PENALTIES)
    assert params == SamplingParams(temperature=0.6, top_k=40, top_p=0.9, min_p=0)
    assert used == {"temperature": 0.6, "top_p": 0.9, "min_p": 0}
    assert describe(used) == "temp 0.6, top-p 0.9, min-p 0"


def test_a_recording_keeps_them() -> None:
    assert of_recording(Recording({"recommended": {"temperature": 0.5, "x": 1}}, ())) == {
        "temperature": 0.5
    }
    assert of_recording(Recording({}, ())) == {}


def test_run_follows_and_says_so(tmp_path: Path) -> None:
    """At temperature 0 of the file, texts of any seed are alike; ``--temp`` makes them differ."""
    model = recommending(tmp_path / "m.gguf", {"temp": 0.0, "top_k": 5, "mirostat": 2})
    args = ("run", "-m", str(model), "--no-draft", "--raw", "-p", "abc", "-n", "12")
    args = (*args, "-c", "64", "-t", "1", "--ignore-eos", "--top-p", "0.5")
    first, second = (qdraft(*args, "-s", seed) for seed in "12")
    assert first.returncode == 0, first.stderr
    assert first.stdout == second.stdout
    assert "sampling temp 0, top-k 5, as the file recommends" in first.stderr
    assert "m.gguf recommends to sample with mirostat 2, which qdraft does not have" in first.stderr
    hot = [json.loads(qdraft(*args, "--temp", "9", "-s", seed, "--json").stdout) for seed in "12"]
    assert hot[0]["text"] != hot[1]["text"]
    jsonschema.validate(hot[0], schema("run"))
    assert hot[0]["recommended"] == {"top_k": 5}
    assert (hot[0]["sampling"]["temperature"], hot[0]["sampling"]["top_p"]) == (9, 0.5)
    shown = qdraft("inspect", str(model), "--json").stdout
    jsonschema.validate(json.loads(shown), schema("inspect"))
    page = qdraft("inspect", str(model)).stdout
    assert "recommends temp 0, top-k 5; not in qdraft: mirostat 2" in page


def test_a_pair_follows_by_default(tmp_path: Path) -> None:
    model = recommending(tmp_path / "m.gguf", {"top_k": 1})
    with Pair(PairSpec.of(model, None, EngineParams(n_ctx=64, n_threads=1))) as pair:
        assert pair.generate("abc", raw=True).sampling == SamplingParams(top_k=1)
        assert pair.generate("abc", SamplingParams(), raw=True).sampling == SamplingParams()
