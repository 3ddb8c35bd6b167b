"""Targets that do not fit in memory: what stays, what streams, and what is said of it."""

from __future__ import annotations

import errno
import io
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tiny
from rich.console import Console

pytest.importorskip("llama_cpp", reason="needs llama-cpp-python")

from qdraft import DecodeParams, SamplingParams
from qdraft.cli.options.devices import DeviceOptions
from qdraft.errors import UsageError
from qdraft.gguf.header import read_header
from qdraft.llama import held_pages, slow_pass
from qdraft.llama.context import LlamaContext
from qdraft.llama.held_pages import HeldPages, Stretch
from qdraft.llama.model import LlamaModel
from qdraft.llama.params import LOAD_MODES, EngineParams
from qdraft.llama.spec import Both, ModelSpec, PairSpec
from qdraft.placement import residency as residency_module
from qdraft.placement.outlook import Outlook, describe, foresee
from qdraft.placement.plan import Plan, make_plan
from qdraft.placement.residency import Residency, stretches_to_hold, weights_on_cpu
from qdraft.render.console import THEME
from qdraft.render.plan import plan_report, plan_view
from qdraft.session import held_weights
from qdraft.session import pair as pair_module
from qdraft.session.held_weights import HeldWeights
from qdraft.session.pair import Pair
from qdraft.study.explain import Figures, Finding, Situation, explain

MIB, GIB = 2**20, 2**30


def locked() -> int:
    """The bytes that this process has locked."""
    match = re.search(r"VmLck:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match
    return 1024 * int(match[1])


class TestHeldPages:
    @pytest.fixture
    def file(self, tmp_path: Path) -> Path:
        path = tmp_path / "weights"
        path.write_bytes(bytes(6 * MIB))
        return path

    @pytest.fixture
    def locks(self, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Stretch]]:
        """What is asked of the system, which would refuse an ordinary user."""
        calls: list[tuple[str, Stretch]] = []
        monkeypatch.setattr(held_pages, "_BLOCK", MIB)
        for name in ("lock", "unlock"):
            monkeypatch.setattr(
                held_pages._Map, name, lambda self, block, name=name: calls.append((name, block))
            )
        return calls

    def test_it_holds_whole_pages_from_the_first_stretch_on(
        self, file: Path, locks: list[tuple[str, Stretch]]
    ) -> None:
        pages = HeldPages([Stretch(file, 4 * MIB + 1, 2 * MIB - 1), Stretch(file, 0, 3 * MIB)])
        pages.hold(3 * MIB)
        starts = [block.start for _, block in locks]
        assert starts[:2] == [4 * MIB + os.sysconf("SC_PAGESIZE"), 5 * MIB + 4096]
        assert starts[2:] == [0]
        assert pages.n_bytes == sum(block.n_bytes for _, block in locks) <= 3 * MIB

    def test_it_lets_go_of_the_last_first(
        self, file: Path, locks: list[tuple[str, Stretch]]
    ) -> None:
        pages = HeldPages([Stretch(file, 0, 6 * MIB)])
        pages.hold(4 * MIB)
        pages.hold(2 * MIB)
        assert [(name, block.start // MIB) for name, block in locks[4:]] == [
            ("unlock", 3),
            ("unlock", 2),
        ]
        pages.close()
        assert pages.n_bytes == 0
        assert len(locks) == 8

    def test_a_refusal_is_kept_and_nothing_more_is_asked(
        self, file: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked = []

        def refuse(self: object, block: Stretch) -> None:
            asked.append(block)
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

        monkeypatch.setattr(held_pages._Map, "lock", refuse)
        pages = HeldPages([Stretch(file, 0, 6 * MIB)])
        pages.hold(6 * MIB)
        pages.hold(6 * MIB)
        assert pages.refusal == os.strerror(errno.ENOMEM)
        assert pages.n_bytes == 0
        assert len(asked) == 1

    @pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux")
    def test_the_system_counts_the_pages(self, file: Path) -> None:
        before = locked()
        pages = HeldPages([Stretch(file, 0, 32768)])  # within what ordinary users may lock
        pages.hold(32768)
        if pages.refusal:
            pytest.skip(f"the system refuses to lock memory: {pages.refusal}")
        assert locked() == before + 32768 == before + pages.n_bytes
        pages.close()
        assert locked() == before


class TestResidency:
    def test_what_does_not_stay_is_read_by_each_pass(self) -> None:
        residency = Residency(free=10 * GIB, target=12 * GIB, draft=2 * GIB)
        assert not residency.fits
        assert residency.draft_fits
        margin = 10 * GIB * 8 // 100
        assert residency.n_streamed == 12 * GIB - (10 * GIB - margin - 2 * GIB)

    def test_what_fits_is_not_read_again(self) -> None:
        residency = Residency(free=10 * GIB, target=6 * GIB, draft=2 * GIB)
        assert residency.fits
        assert residency.n_streamed == 0

    def test_a_draft_as_large_as_the_memory_does_not_fit(self) -> None:
        assert not Residency(free=10 * GIB, target=40 * GIB, draft=10 * GIB).draft_fits

    def test_weights_of_all_tensors_are_counted(self, tmp_path: Path) -> None:
        path = tiny.windowed(tmp_path / "w.gguf")
        header = read_header(path)
        total = sum(tensor.n_bytes or 0 for tensor in header.tensors)
        assert weights_on_cpu(ModelSpec(path, EngineParams())) == total

    def test_the_matrix_of_embeddings_alone_is_not_worth_holding(self, tmp_path: Path) -> None:
        """A pass reads a few of its rows; every other tensor is read whole."""
        path = tiny.windowed(tmp_path / "w.gguf")
        header = read_header(path)
        sizes = {tensor.name: tensor.n_bytes or 0 for tensor in header.tensors}
        tied = "output.weight" not in sizes
        held = stretches_to_hold(ModelSpec(path, EngineParams()))
        n_bytes = sum(stretch.n_bytes for stretch in held)
        left_out = 0 if tied else sizes["token_embd.weight"]
        assert sum(sizes.values()) - left_out <= n_bytes < sum(sizes.values()) - left_out + 4096

    def test_experts_are_held_last(self, tmp_path: Path) -> None:
        path = tiny.mixture(tmp_path / "moe.gguf")
        header = read_header(path)
        held = stretches_to_hold(ModelSpec(path, EngineParams()))
        experts = {
            header.data_start + tensor.offset for tensor in header.tensors if "_exps" in tensor.name
        }
        first = min(
            i
            for i, stretch in enumerate(held)
            if any(stretch.start <= at < stretch.start + stretch.n_bytes for at in experts)
        )
        for stretch in held[first:]:
            assert any(stretch.start <= at < stretch.start + stretch.n_bytes for at in experts)


class Machine:
    """A target and a draft in ``room`` bytes, of which the target needs a window to stream in.

    The file is read in a circle: what is not held is read by each pass, and if less than the window
    is left, so is what is read ahead and pushed out again. A draft without room is read, too.
    """

    def __init__(self, size: int, room: int, window: int, draft: int = 0) -> None:
        self.size, self.room, self.window, self.draft = size, room, window, draft
        self.held = 0
        self.contexts = Both(
            SimpleNamespace(n_read=0, n_decodes=0), SimpleNamespace(n_read=0, n_decodes=0)
        )

    def run_round(self) -> None:
        target, draft = self.contexts.target, self.contexts.draft
        assert draft
        left = self.room - self.held
        lost = max(0, self.window - left)
        target.n_read += max(0, self.size - self.held) + 2 * lost
        target.n_decodes += 1
        if left < self.window // 2:
            draft.n_read += self.draft


class Pages:
    """Stands in for ``HeldPages``."""

    refusal = ""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.size = machine.size

    @property
    def n_bytes(self) -> int:
        return self.machine.held

    def hold(self, n_bytes: int) -> None:
        self.machine.held = min(n_bytes, self.machine.size)

    def close(self) -> None:
        self.hold(0)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine(size=3000, room=1000, window=100, draft=300)
    monkeypatch.setattr(held_weights, "_LEFT_BYTES", 50)
    monkeypatch.setattr(held_weights, "free_memory", lambda: machine.room)
    monkeypatch.setattr(held_weights, "stretches_to_hold", lambda target: [])
    monkeypatch.setattr(held_weights, "HeldPages", lambda stretches: Pages(machine))
    return machine


def hold(machine: Machine, draft: Pages | None = None) -> HeldWeights:
    target = ModelSpec(Path("t"), EngineParams())
    return HeldWeights(target, machine.contexts, machine.draft, draft)  # type: ignore[arg-type]


@pytest.mark.parametrize("window", [50, 100, 250, 400])
def test_the_part_that_is_held_is_found(window: int, machine: Machine) -> None:
    """As much as leaves room for what streams, within a step, and the draft is never lost."""
    machine.window = window
    weights = hold(machine)
    for _ in range(50):
        machine.run_round()
        weights.observe(wanted=True)
    assert machine.room - max(window, 100) - 100 <= machine.held <= 900
    before = machine.contexts.map(lambda context: context.n_read)
    for _ in range(20):
        machine.run_round()
        weights.observe(wanted=True)
    after = machine.contexts.map(lambda context: context.n_read)
    assert after.draft == before.draft
    assert after.target - before.target <= 20 * 1.15 * (machine.size - machine.held)
    weights.close()
    assert machine.held == 0


class DraftPages(Pages):
    """The draft's pages, which are not the target's."""

    def __init__(self, machine: Machine) -> None:
        super().__init__(machine)
        self.size = self.held = machine.draft

    @property
    def n_bytes(self) -> int:
        return self.held

    def hold(self, n_bytes: int) -> None:
        self.machine.room += self.held - n_bytes
        self.held = n_bytes


def test_a_draft_that_does_not_pay_off_lends_its_memory(machine: Machine) -> None:
    draft = DraftPages(machine)
    weights = hold(machine, draft)
    contexts = machine.contexts
    assert contexts.draft
    rent = 300 / (3000 - 800)
    assert weights.rent == pytest.approx(rent)

    def play(n: int, *, used: bool, wanted: bool) -> None:
        for _ in range(n):
            assert contexts.draft
            contexts.draft.n_decodes += used
            machine.run_round()
            weights.observe(wanted=wanted)

    play(3, used=True, wanted=False)  # as with a fixed length
    play(2, used=False, wanted=True)  # rounds that measure the target alone
    assert (draft.held, weights.lent) == (300, None)
    play(1, used=False, wanted=False)
    assert (draft.held, machine.held) == (0, 1100)
    assert weights.rent == pytest.approx(rent)  # of a draft that is to come back
    assert weights.lent == pytest.approx(300 / 1900 + rent)
    play(3, used=False, wanted=True)
    assert draft.held == 0
    play(1, used=True, wanted=True)
    assert (draft.held, machine.held, weights.lent) == (300, 800, None)
    weights.close()
    assert (draft.held, machine.held) == (0, 0)


@pytest.mark.parametrize("mode", LOAD_MODES)
def test_every_load_mode_gives_the_same_logits(mode: str, tmp_path: Path) -> None:
    path = tiny.windowed(tmp_path / "w.gguf")
    rows = []
    for each in ("auto", mode):
        model = LlamaModel(path, EngineParams(load_mode=each))
        context = LlamaContext(model, EngineParams(n_ctx=64))
        rows.append(context.sequence().eval([1, 2, 3], 1).copy())
        context.close()
        model.close()
    np.testing.assert_array_equal(*rows)


@pytest.mark.parametrize(
    ("given", "modes"),
    [
        ({}, ("auto", "auto")),
        ({"mlock": True}, ("mmap+mlock", "auto")),
        ({"no_mmap": True, "mmap_draft": True}, ("none", "mmap")),
        ({"mlock_draft": True, "no_mmap_draft": True}, ("auto", "mlock")),
    ],
)
def test_the_options_of_load_modes(given: dict[str, bool], modes: tuple[str, str]) -> None:
    assert tuple(params.load_mode for params in DeviceOptions(**given).engines()) == modes


@pytest.mark.parametrize("suffix", ["", "_draft"])
def test_load_modes_that_contradict_each_other(suffix: str) -> None:
    name = suffix.replace("_", "-")
    with pytest.raises(UsageError, match=f"--mmap{name} cannot be combined with --no-mmap{name}"):
        DeviceOptions(**{f"mmap{suffix}": True, f"no_mmap{suffix}": True}).engines()


def test_an_unknown_load_mode_is_an_error() -> None:
    with pytest.raises(UsageError, match="load_mode"):
        EngineParams(load_mode="fast")


class TestPair:
    @pytest.fixture
    def files(self, tmp_path: Path) -> tuple[Path, Path]:
        return (
            tiny.windowed(tmp_path / "t.gguf"),
            tiny.windowed(tmp_path / "d.gguf", seed=2),
        )

    @pytest.fixture
    def small_machine(self, files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
        free = files[0].stat().st_size
        monkeypatch.setattr(residency_module, "free_memory", lambda: free)

    @pytest.mark.parametrize("may_lock", [True, False])
    def test_the_draft_stays_in_memory_and_the_target_is_held(
        self,
        files: tuple[Path, Path],
        small_machine: None,
        may_lock: bool,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        """Its file is locked, or it is read into memory of its own where that is refused."""

        def lock(self: object, block: Stretch) -> None:
            if not may_lock:
                raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

        monkeypatch.setattr(held_pages._Map, "lock", lock)
        monkeypatch.setattr(held_pages._Map, "unlock", lambda self, block: None)
        monkeypatch.setattr(held_weights, "free_memory", lambda: 0)
        monkeypatch.setattr(pair_module, "_WIDE", 1e6)  # the model is tiny, its buffers are not
        with Pair(PairSpec.of(*files, EngineParams(n_ctx=256))) as pair:
            assert pair.spec.models.draft
            params = pair.spec.models.draft.params
            assert params.load_mode == ("auto" if may_lock else "none")
            assert pair.spec.models.target.params.load_mode == "auto"
            assert pair.held is not None
            rents = pair.learned.costs.rents
            assert bool(rents["model"]) == may_lock
            assert pair.contexts.target.step == 2048
        assert "are free: each pass over the target reads" in caplog.text

    def test_what_fits_stays_as_it_was(self, files: tuple[Path, Path]) -> None:
        with Pair(PairSpec.of(*files, EngineParams(n_ctx=256))) as pair:
            assert pair.spec.models.draft
            assert pair.spec.models.draft.params.load_mode == "auto"
            assert pair.held is None
            assert pair.contexts.target.step == 512

    def test_the_text_is_the_same(
        self, files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        texts = []
        for free in (None, files[0].stat().st_size):
            if free:
                monkeypatch.setattr(residency_module, "free_memory", lambda free=free: free)
            # Not "auto", for which the time of a copy decides.
            spec = PairSpec.of(*files, EngineParams(n_ctx=256), share_kv="on")
            with Pair(spec) as pair:
                generation = pair.generate(
                    "a",
                    SamplingParams(temperature=1),
                    DecodeParams(n_predict=24, seed=7, n_draft=3, draft_policy="fixed"),
                    raw=True,
                )
                texts.append(generation.read())
        assert texts[0] == texts[1]

    def test_params_of_the_user_win(self, files: tuple[Path, Path], small_machine: None) -> None:
        params = EngineParams(n_ctx=256, n_ubatch=128, load_mode="none")
        draft = EngineParams(n_ctx=256, load_mode="mmap")
        with Pair(PairSpec.of(*files, params, draft)) as pair:
            assert pair.spec.models.draft
            assert pair.spec.models.draft.params.load_mode == "mmap"
            assert pair.contexts.target.step == 128
            assert pair.held is None  # nothing of the file is mapped


class TestSlowPass:
    @pytest.fixture
    def context(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LlamaContext]:
        monkeypatch.setattr(slow_pass, "_SLOW_S", -1.0)  # every pass is slow
        model = LlamaModel(tiny.windowed(tmp_path / "w.gguf"), EngineParams())
        context = LlamaContext(model, EngineParams(n_ctx=512, n_ubatch=64))
        context.sequence().eval([1, 2], 1)  # from now on passes are watched
        yield context
        context.close()
        model.close()

    def test_it_shows_the_tokens_that_are_done(self, context: LlamaContext) -> None:
        seen: list[tuple[str, float, float]] = []
        context.slow_pass.progress = lambda *step: seen.append(step)
        context.sequence().eval([1] * 200, 1)
        assert {what for what, _, _ in seen} == {"decoding 200 tokens"}
        done = [done for _, done, _ in seen]
        assert done == sorted(done)
        assert {64.0, 128.0, 200.0} <= set(done)
        assert len(done) > 6  # also within a pass

    def test_fast_passes_of_a_long_prompt_count_together(self) -> None:
        passes = slow_pass.SlowPass()
        seen: list[tuple[float, float]] = []
        passes.progress = lambda what, done, of: seen.append((done, of))
        for n, start in ((512, 0), (512, 512), (512, 1024), (100, 1536)):
            passes.expect(start, n, 1636)
            passes.end(0.1)
        passes.expect(0, 5, 5)
        passes.end(0.2)
        assert seen == [(1536, 1636), (1636, 1636)]  # from 0.3 seconds on

    def test_ctrl_c_ends_it_and_leaves_the_cells_as_they_were(self, context: LlamaContext) -> None:
        sequence = context.sequence()
        sequence.eval([1, 2, 3], 1)
        n_nodes = 0

        def interrupt(*step: Any) -> None:
            nonlocal n_nodes
            n_nodes += 1
            if n_nodes == 1:
                os.kill(os.getpid(), signal.SIGINT)

        context.slow_pass.progress = interrupt
        with pytest.raises(KeyboardInterrupt):
            sequence.eval([4] * 60, 1)
        assert n_nodes <= 2  # it did not go on to the end of the pass
        assert list(sequence.tokens) == [1, 2, 3]
        context.slow_pass.progress = lambda *step: None
        after = sequence.eval([4], 1).copy()
        fresh = context.sequence()
        np.testing.assert_allclose(after, fresh.eval([1, 2, 3, 4], 1), atol=1e-4)


class TestOutlook:
    def test_speeds_follow_from_the_disk(self) -> None:
        residency = Residency(free=24 * GIB, target=40 * GIB, draft=4 * GIB)
        outlook = Outlook(residency, disk_speed=1.0 * GIB, alpha=0.8)
        assert outlook.pass_s == pytest.approx(
            residency.n_streamed / GIB + (40 * GIB - residency.n_streamed) / 10e9
        )
        assert outlook.alone == pytest.approx(1 / outlook.pass_s)
        assert outlook.drafted
        assert 3 < outlook.drafted / outlook.alone < 5
        assert outlook.n_draft > 8
        assert describe(outlook).startswith("needs 44.0 GiB of memory, but 24.0 GiB are free: each")

    def test_without_a_measured_disk_no_speed_is_claimed(self) -> None:
        outlook = Outlook(Residency(24 * GIB, 40 * GIB, 4 * GIB), None, 0.8)
        assert outlook.alone is None
        assert outlook.drafted is None
        assert "t/s" not in describe(outlook)

    def test_a_draft_that_does_not_fit_promises_nothing(self) -> None:
        outlook = Outlook(Residency(10 * GIB, 40 * GIB, 10 * GIB), 1e9, 0.8)
        assert outlook.alone
        assert outlook.drafted is None

    def test_what_fits_needs_no_outlook(self, tmp_path: Path) -> None:
        path = tiny.windowed(tmp_path / "t.gguf")
        assert foresee(Both(ModelSpec(path, EngineParams())), 0.8) is None

    def test_the_largest_type_that_fits_is_named(self, tmp_path: Path) -> None:
        path = tiny.windowed(tmp_path / "t.gguf")
        size = weights_on_cpu(ModelSpec(path, EngineParams()))
        tight = Residency(free=size // 2, target=size, draft=0)
        outlook = foresee(Both(ModelSpec(path, EngineParams())), 0.8, tight)
        assert outlook
        assert outlook.smaller_target
        assert outlook.smaller_target[1] <= size // 2


def printed(plan: Plan) -> str:
    out = io.StringIO()
    Console(file=out, width=80, theme=THEME).print(plan_view(plan))
    return out.getvalue()


class TestPlan:
    @pytest.fixture
    def plan(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plan:
        path = tiny.windowed(tmp_path / "t.gguf")
        size = path.stat().st_size
        monkeypatch.setattr(residency_module, "free_memory", lambda: size // 2)
        return make_plan(Both(ModelSpec(path, EngineParams(n_ctx=256))))

    def test_it_says_what_each_pass_reads(self, plan: Plan) -> None:
        assert plan.outlook
        text = " ".join(printed(plan).split())
        assert "each pass over the target reads" in text
        assert "a target of type" in text

    def test_json_has_the_figures(self, plan: Plan) -> None:
        assert plan.outlook
        report = plan_report(plan, None)["outlook"]
        assert report["read_per_pass"] == plan.outlook.residency.n_streamed > 0
        assert report["tokens_per_second"] is None  # there is no draft

    def test_what_fits_has_no_outlook(self, tmp_path: Path) -> None:
        path = tiny.windowed(tmp_path / "t.gguf")
        plan = make_plan(Both(ModelSpec(path, EngineParams(n_ctx=256))))
        assert plan.outlook is None
        assert plan_report(plan, None)["outlook"] is None


class TestExplain:
    FIGURES = Figures(
        c=0.3, v={2: 1.1}, alpha={0.0: 0.8}, target_bytes=40 * GIB, draft_bytes=4 * GIB
    )

    def finding(self, memory: int) -> Finding:
        findings = explain(self.FIGURES, Situation(0.0, memory=memory))
        return next(each for each in findings if each.topic == "memory")

    def test_a_target_that_streams_is_worth_several_times(self) -> None:
        finding = self.finding(24 * GIB)
        assert finding.speedup
        assert finding.speedup > 3
        assert finding.n_draft
        assert finding.n_draft > 8
        assert "reads" in finding.words

    def test_a_draft_that_does_not_stay_promises_nothing(self) -> None:
        finding = self.finding(4 * GIB)
        assert finding.speedup is None
        assert "make a smaller one" in finding.words
