"""Plans for devices that are not here, and what a plan is beside the pair once it is loaded."""

from __future__ import annotations

import io
import json
from pathlib import Path

import jsonschema
import pytest
import tiny
from invoke import one_error, qdraft, schema
from rich.console import Console
from zoo import ZOO

pytest.importorskip("llama_cpp", reason="needs llama-cpp-python")

from qdraft.cli.options.devices import parse_size
from qdraft.errors import UsageError
from qdraft.gguf.header import read_header
from qdraft.llama.params import EngineParams
from qdraft.llama.spec import PairSpec
from qdraft.placement.needs import measure_needs, weights_by_layer
from qdraft.placement.plan import Given, make_plan
from qdraft.render.console import THEME
from qdraft.render.plan import plan_report, plan_view
from qdraft.session.compare_loaded import MemoryRow, compare_loaded
from qdraft.session.opening import open_spec


def test_sizes() -> None:
    assert [parse_size(t, "x") for t in ("12G", "1.5g", "300MiB", "7", "2 kb")] == [
        12 * 2**30,
        3 * 2**29,
        300 * 2**20,
        7,
        2048,
    ]
    for wrong in ("", "G", "12X", "-1G", "1G2"):
        with pytest.raises(UsageError, match="must be a size"):
            parse_size(wrong, "--vram")


def test_weights_by_layer_are_all_of_the_file(tmp_path: Path) -> None:
    """An output that is the embedding is counted again: a device gets a copy of it."""
    for path in (tiny.mixture(tmp_path / "m.gguf"), tiny.windowed(tmp_path / "w.gguf")):
        header = read_header(path)
        weights, rest = weights_by_layer([header])
        sizes = {t.name: t.n_bytes or 0 for t in header.tensors}
        copied = 0 if "output.weight" in sizes else sizes["token_embd.weight"]
        assert len(weights) == 3
        assert sum(weights) + rest == sum(sizes.values()) + copied
        assert rest == sizes["token_embd.weight"]


def test_a_cache_grows_with_the_context_and_with_its_type(tmp_path: Path) -> None:
    """Windows count in full: a rollback needs their cells."""
    path = tiny.windowed(tmp_path / "w.gguf", window=32, n_ctx=4096)
    sizes = {
        (n_ctx, kind): sum(measure_needs(path, EngineParams(n_ctx=n_ctx, cache_type_k=kind)).kv)
        for n_ctx in (1024, 2048)
        for kind in ("f16", "f32")
    }
    per_cell = 2 * 2 * 2 * tiny.N_HEAD_KV * tiny.HEAD  # layers, K and V, bytes
    assert sizes[1024, "f16"] == pytest.approx(1024 * per_cell, rel=0.05)
    assert sizes[2048, "f16"] == pytest.approx(2 * sizes[1024, "f16"], rel=0.02)
    assert sizes[1024, "f32"] == pytest.approx(1.5 * sizes[1024, "f16"], rel=0.02)


def test_states_are_planned_for(tmp_path: Path) -> None:
    """The context does not change them, and the JSON and the table have them."""
    path = ZOO["rwkv7"].write(tmp_path / "m.gguf")
    short, long = (
        make_plan(PairSpec.of(path, None, EngineParams(n_ctx=n)).models) for n in (256, 512)
    )
    report = plan_report(short, None)
    jsonschema.validate(json.loads(json.dumps(report)), schema("plan"))
    (states,) = short.states
    assert states == long.states.target
    assert report["states"][0]["n_bytes"] == states.n_bytes
    assert short.uses[-1].target.state == pytest.approx(states.n_bytes, abs=2)
    assert short.uses[-1].target.kv == 0
    console = Console(width=100, file=io.StringIO(), theme=THEME)
    console.print(plan_view(short))
    text = " ".join(console.file.getvalue().split())  # type: ignore[attr-defined]
    assert "weights KV state compute sum" in text
    assert f"the target keeps {states.n_texts} recurrent states of 0.0975 MiB" in text


@pytest.mark.real
class TestOnTheCpu:
    def test_the_plan_is_what_is_loaded(self, smollm2: tuple[Path, Path]) -> None:
        """The memory of the draft is counted too, here without any device.

        https://github.com/ollama/ollama/issues/17951
        """
        params = EngineParams(n_ctx=512)
        plan = make_plan(PairSpec.of(*smollm2, params).models)
        rows = compare_loaded(plan)
        jsonschema.validate(json.loads(json.dumps(plan_report(plan, rows))), schema("plan"))
        assert {(row.model, row.kind) for row in rows} >= {
            (model, kind) for model in ("target", "draft") for kind in ("weights", "kv", "compute")
        }
        assert all(row.agrees for row in rows), rows

    def test_a_device_that_is_not_here(self, smollm2: tuple[Path, Path]) -> None:
        params = EngineParams(n_ctx=512)
        plans = [
            make_plan(PairSpec.of(*smollm2, params).models, Given(sizes=(size,)))
            for size in (0, 260_000_000, 2**30)
        ]
        layers = [(p.uses[0].target.n_layers, p.uses[0].draft.n_layers) for p in plans]
        assert layers[0] == (0, 0)
        assert 0 < layers[1][0] < 31
        assert layers[2] == (31, 31)
        assert all(plan.estimated and plan.fits for plan in plans)
        assert plans[0].choices[0].speed < plans[1].choices[0].speed < plans[2].choices[0].speed
        assert plans[2].n_ctx_most == 8192
        assert plans[2].smaller_draft is None

    def test_devices_that_are_not_here_are_planned_for_as_asked(
        self, smollm2: tuple[Path, Path]
    ) -> None:
        files = ("plan", "-m", str(smollm2[0]), "-d", str(smollm2[1]), "-c", "512", "--json")
        planned = json.loads(qdraft(*files, "--vram", "1G", "-devd", "none", "-nkvo").stdout)
        use = planned["devices"][0]
        assert (use["target"]["n_layers"], use["draft"]["n_layers"]) == (31, 0)
        assert use["target"]["kv"] == 0
        assert planned["devices"][1]["target"]["kv"] > 0
        planned = json.loads(qdraft(*files, "--vram", "1G", "-ngl", "4", "-ngld", "7").stdout)
        use = planned["devices"][0]
        assert (use["target"]["n_layers"], use["draft"]["n_layers"]) == (4, 7)
        assert "has no device for them" in one_error(qdraft(*files, "-ngld", "7"), 2)

    def test_a_smaller_draft_is_named_where_it_would_fit(self, smollm2: tuple[Path, Path]) -> None:
        """The target as its own draft is too large; a type of some bits would fit beside it."""
        target = smollm2[0]
        params = EngineParams(n_ctx=512)
        plan = make_plan(PairSpec.of(target, target, params).models, Given(sizes=(480_000_000,)))
        assert plan.smaller_draft is not None
        assert plan.smaller_draft[1] < 150_000_000

    def test_the_command(self, smollm2: tuple[Path, Path]) -> None:
        files = ("-m", str(smollm2[0]), "-d", str(smollm2[1]), "-c", "512")
        result = qdraft("plan", *files, "--vram", "150M")
        assert result.returncode == 0, result.stderr
        assert max(map(len, result.stdout.splitlines())) <= 80
        assert "this machine has no such device" in result.stdout
        assert "assumed: memory of devices 8 times as fast" in " ".join(result.stdout.split())
        planned = json.loads(qdraft("plan", *files, "--vram", "150M", "--json").stdout)
        jsonschema.validate(planned, schema("plan"))
        assert planned["estimated"]
        assert [use["device"] for use in planned["devices"]] == ["device 1", "CPU"]
        result = qdraft("plan", *files, "--vram", "150M", "--compare-loaded")
        refused = "cannot be combined with --vram for devices that this machine does not have"
        assert refused in one_error(result, 2)
        verified = qdraft("plan", *files, "--compare-loaded")
        assert verified.returncode == 0, verified.stdout
        assert "0.0 %" in verified.stdout

    def test_without_devices_a_pair_is_opened_as_ever(self, smollm2: tuple[Path, Path]) -> None:
        with open_spec(PairSpec.of(*smollm2, EngineParams(n_ctx=256))) as pair:
            assert [placed.n_offloaded for placed in pair.placed] == [0, 0]
            assert pair.kv.shared


def test_how_far_a_plan_is_off() -> None:
    assert MemoryRow("d", "target", "kv", 100, 100).off == 0
    assert MemoryRow("d", "target", "kv", 94, 100).off == pytest.approx(0.06)
    assert not MemoryRow("d", "target", "kv", 94, 100).agrees
    # Of a mapping the stretch of the file is compared, not what is read of it.
    assert MemoryRow("CPU", "target", "weights", 60, 100, span=100).agrees
    assert not MemoryRow("CPU", "target", "weights", 100, 100, span=60).agrees
    # Repacked weights are copies: at least those, at most everything that was reported.
    assert MemoryRow("CPU", "draft", "weights", 60, 100, span=60, repacked=40).agrees
    assert not MemoryRow("CPU", "draft", "weights", 30, 100, span=60, repacked=40).agrees
    assert not MemoryRow("CPU", "draft", "weights", 120, 100, span=60, repacked=40).agrees
    assert not MemoryRow("d", "target", "kv", 5, 0).agrees
