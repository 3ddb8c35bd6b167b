"""Cost-aware drafting, on the real loop with fake engines and a simulated clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from fakes import GREEDY, PLAIN, Clock, engine, make_round, normal, run, tokens_of, vocab

from qdraft.decoding.drafters.model import ModelDrafter
from qdraft.decoding.drafters.protocol import NoDrafter
from qdraft.decoding.loop import Decoding
from qdraft.decoding.policy.acceptance_table import AcceptanceTable
from qdraft.decoding.policy.cost_table import CostTable
from qdraft.decoding.policy.gate import CostGate, would_draft
from qdraft.decoding.policy.learned import Learned
from qdraft.decoding.policy.model import Costs
from qdraft.decoding.policy.schedule import CostAwareSchedule, FixedSchedule, Schedule
from qdraft.decoding.records import Draft, Origin, Round, SamplingParams, Verdict
from qdraft.decoding.rng import SeededRng
from qdraft.decoding.sampling import Sampler
from qdraft.decoding.summary import summarize
from qdraft.session import store
from qdraft.testing import FakeKvCopy, FakeSequence, LogitsFn


def text_logits(seed: int) -> LogitsFn:
    """Logits by place and last token, so that the text does not repeat itself."""

    def logits(tokens: tuple[int, ...]) -> np.ndarray:
        return 3 * normal(8, seed, len(tokens), tokens[-1])

    return logits


class Timed(FakeSequence):
    """A fake sequence whose evals take simulated time, by the number of rows."""

    clock: Clock
    cost: Callable[[int], float]

    def eval(self, tokens: Sequence[int], logits: int) -> np.ndarray:
        self.clock.now += self.cost(len(tokens))
        return super().eval(tokens, logits)


@dataclass
class Machine:
    """What a target decode of each width and a draft row cost, in target tokens, with noise."""

    v: Callable[[int], float]
    c: float
    noise: float = 0.03
    read: float = 0.0  # of a token of the prompt; with it the draft keeps its own cells
    setup: float = 1.0  # times that the first decode of each width takes
    cold: float = 0.0  # of a draft row after more than 20 tokens without one

    def loaded(self, kept: Costs | None = None) -> Learned:
        """What loading measures: a decode of one row, one of 8 rows, and rows of the draft."""
        learned = Learned(CostTable(kept))
        beyond = max(0.0, self.cold - self.c)
        learned.costs.start(Costs({"model": self.c}, {8: self.v(8)}, 1.0, {"model": beyond}))
        return learned

    def generate(
        self,
        schedule: Schedule,
        blend: Callable[[int], float],
        params: SamplingParams,
        n: int = 600,
        prompt: Sequence[int] = (1, 0, 2),
        seed: int = 0,
    ) -> list[Round]:
        """Write ``n`` tokens; ``blend`` is how far the draft is off at a place, from 0 to 1."""
        clock, rng = Clock(), np.random.default_rng(5 + seed)
        fair, off = text_logits(7 + seed), text_logits(70 + seed)

        def draft_logits(tokens: tuple[int, ...]) -> np.ndarray:
            b = blend(len(tokens))
            return (1 - b) * np.asarray(fair(tokens)) + b * np.asarray(off(tokens))

        target, draft = Timed(fair, vocab(8)), Timed(draft_logits, vocab(8))
        for model in (target, draft):
            model.clock = clock

        def cost(plain_s: float, width: int) -> float:
            time = self.read * width if self.read and width > 20 else plain_s
            return time * rng.lognormal(0, self.noise)

        seen: set[int] = set()

        def decode_cost(width: int) -> float:
            first = width not in seen
            seen.add(width)
            return cost(self.v(width) * (self.setup if first else 1.0), width)

        target.cost = decode_cost
        last_drafted = -20

        def row_cost(width: int) -> float:
            nonlocal last_drafted
            is_cold = self.cold and target.n_past - last_drafted > 20
            last_drafted = target.n_past
            return (self.cold if is_cold else self.c) * cost(1.0, width)

        draft.cost = row_cost
        drafter = ModelDrafter(draft, 8, None if self.read else FakeKvCopy(target, draft))
        decoding = Decoding(
            target,
            drafter,
            prompt,
            Sampler(params, 8),
            schedule,
            SeededRng(3),
            clock,
            n_predict=n,
            verification="token",
        )
        return list(decoding)


def spent(rounds: Sequence[Round]) -> float:
    return sum(r.times.total_s for r in rounds if not r.n_prompt)


def speed(rounds: Sequence[Round]) -> float:
    later = [r for r in rounds if not r.n_prompt]
    return sum(r.n_emitted for r in later) / spent(later)


def worst_window(rounds: Sequence[Round], n_tokens: int = 200) -> float:
    """The most time that any stretch of about ``n_tokens`` took, over that many target tokens."""
    later = [r for r in rounds if not r.n_prompt]
    worst = 0.0
    for start in range(len(later)):
        n, time = 0, 0.0
        for r in later[start:]:
            n += r.n_emitted
            time += r.times.draft_s + r.times.verify_s
            if n >= n_tokens:
                worst = max(worst, time / n)
                break
    return worst


def flat(width: int) -> float:
    """A big model, bound by memory."""
    return 1 + 0.02 * (width - 1)


def jagged(width: int) -> float:
    """The second row is expensive, the next few are cheap."""
    return (
        [1, 1.69, 1.8, 2.0, 2.17, 2.4, 2.6, 2.7][width - 1]
        if width < 9
        else 2.7 + 0.3 * (width - 8)
    )


def steep(width: int) -> float:
    """A small model, bound by arithmetic."""
    return 0.5 + 0.5 * width


CASES = {
    "flat, good draft": (Machine(flat, 0.1), 0.1),
    "flat, poor draft": (Machine(flat, 0.2), 0.6),
    "jagged, good draft": (Machine(jagged, 0.3), 0.1),
    "jagged, dear draft": (Machine(jagged, 0.6), 0.2),
    "steep": (Machine(steep, 0.5), 0.2),
    "hopeless": (Machine(steep, 0.9), 0.9),
}


@pytest.mark.parametrize("params", [GREEDY, PLAIN], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", CASES)
def test_never_slower_and_close_to_the_best_fixed_length(name: str, params: SamplingParams) -> None:
    """With the costs of loading. The best fixed length is known only afterwards."""
    machine, blend = CASES[name]

    def time(schedule: Callable[[], Schedule]) -> float:
        texts = [
            machine.generate(schedule(), lambda n: blend, params, 300, seed=s) for s in range(2)
        ]
        assert not isinstance(schedule(), CostAwareSchedule) or max(map(worst_window, texts)) < 1.05
        return sum(map(spent, texts))

    fixed = [time(lambda k=k: FixedSchedule(k, plain_every=0)) for k in (0, 1, 2, 3, 5, 7)]  # type: ignore[misc]
    auto = time(lambda: CostAwareSchedule(8, machine.loaded()))
    assert min(fixed) > 0.85 * auto, (auto, fixed)


def test_the_text_does_not_depend_on_the_schedule() -> None:
    machine, blend = CASES["jagged, good draft"]
    rounds = machine.generate(CostAwareSchedule(8), lambda n: blend, GREEDY, n=200)
    alone = list(machine.generate(FixedSchedule(0), lambda n: blend, GREEDY, n=200))
    assert tokens_of(rounds) == tokens_of(alone)


def test_a_draft_that_turns_bad_is_dropped_and_one_that_turns_good_is_taken_up() -> None:
    machine = Machine(flat, 0.3)
    turns_bad = machine.generate(
        CostAwareSchedule(8), lambda n: 0.05 if n < 400 else 1.0, GREEDY, n=900
    )
    assert worst_window(turns_bad) < 1.08  # it takes some of the gains to notice
    assert sum(r.n_draft for r in turns_bad if r.n_context > 700) < 40
    turns_good = machine.generate(
        CostAwareSchedule(8), lambda n: 1.0 if n < 300 else 0.05, GREEDY, n=1200
    )
    late = [r for r in turns_good if r.n_context > 900]
    assert speed(late) > 1.5


def test_what_is_known_of_the_costs_is_used_from_the_first_round() -> None:
    """With the table of an earlier run, qdraft does not even try a pair that cannot pay off."""
    machine, blend = CASES["hopeless"]
    costs = CostTable(Costs({"model": 0.9}, {n: steep(n) for n in (2, 3)}, 1.0))
    rounds = machine.generate(CostAwareSchedule(8, Learned(costs)), lambda n: blend, GREEDY, n=200)
    assert sum(r.n_draft for r in rounds) <= 3


def test_v_is_measured_or_between_neighbours() -> None:
    costs = CostTable()
    costs.start(Costs({"model": 0.2}, {3: 1.4, 5: 3.0}, 0.1))
    # No batch costs more than its rows one by one.
    assert CostTable(Costs({}, {3: 8.0}, 0.1)).v(3) == 3
    assert [costs.v(n) for n in (1, 3, 5)] == pytest.approx([1, 1.4, 3])
    assert costs.v(2) == pytest.approx(1.2)
    assert costs.v(4) == pytest.approx(2.2)
    assert costs.v(7) == pytest.approx(3.4)  # a low guess, so that it gets tried
    assert costs.v(7, full=True) == pytest.approx(4.6)  # but what it may lose is not
    assert costs.longest_draft("model") == 9  # twice the widest width, less the row of the text
    assert costs.c("model") == pytest.approx(0.2)
    assert CostTable(costs.medians()).medians() == costs.medians()


def test_costs_of_an_earlier_run_give_way_to_this_one() -> None:
    """They keep the shape of v, scaled to what this run has measured, and allow one token at most."""
    costs = CostTable(Costs({"model": 0.05}, {2: 1.1, 3: 1.3, 5: 1.5, 9: 2.0}, 2.5))
    assert (costs.target_s, costs.longest_draft("model")) == (None, 1)
    assert (costs.c("model"), costs.v(3)) == (0.05, 1.3)
    costs.start(Costs({"model": 0.5}, {5: 3.0}, 1.0))
    assert (costs.target_s, costs.c("model")) == (1.0, 0.5)
    assert [costs.v(n) for n in (2, 3, 5, 9)] == pytest.approx([1.4, 2.2, 3.0, 5.0])


def test_what_is_old_is_believed_to_be_cheaper() -> None:
    """So one disturbed time does not end a draft for ever; what may be lost stays as it was."""
    costs = CostTable()
    costs.start(Costs({"model": 0.8}, {2: 1.8}, 1.0))
    for _ in range(costs.constants.n_fresh):
        costs.add(make_round(0, 0))
    assert (costs.c("model"), costs.v(2)) == (pytest.approx(0.4), pytest.approx(1.4))
    assert costs.risk("model", 1) > 1.55


def test_a_restart_costs_what_the_last_one_did() -> None:
    """After a pause a row may have to come from the disk: it is not a row among others."""
    costs = CostTable()
    costs.start(Costs({"model": 0.5}, {2: 1.5}, 1.0, {"model": 3.0}))
    assert costs.restart("model") == 3.0
    costs.add(make_round(1, 0, draft_s=20.5, verify_s=1.5))
    assert costs.restart("model") == 0  # it drafts
    assert costs.c("model", full=True) == pytest.approx(0.5, rel=0.01)
    for _ in range(costs.constants.n_pause + 1):
        costs.add(make_round(0, 0))
    assert costs.restart("model") == pytest.approx(20, rel=0.01)
    assert costs.risk("model", 1) > 20


def test_a_draft_among_others_is_the_measure() -> None:
    """A draft after a plain round costs more: it counts until others are known or if they are old."""
    plain, drafted = make_round(0, 0), make_round(2, 2, draft_s=0.6, verify_s=1.3)
    isolated = make_round(2, 2, draft_s=1.0, verify_s=1.6)
    table = CostTable()
    for r in (plain, isolated, plain, isolated):
        table.add(r)
    assert (table.c("model"), table.v(3)) == (0.5, 1.6)
    for r in (drafted, drafted, drafted, drafted):  # each after a drafted one
        table.add(r)
    among = (table.c("model"), table.v(3))
    assert among == (pytest.approx(0.3), pytest.approx(1.3))
    for _ in range(20):
        table.add(plain)
        table.add(isolated)
    full = (table.c("model", full=True), table.v(3, full=True))
    assert full == pytest.approx(among, rel=0.01)
    for _ in range(200):
        table.add(plain)
    assert 1 < table.v(3) < among[1]  # old, so that it is believed to be cheaper
    for _ in range(12):
        table.add(plain)
        table.add(isolated)
    assert table.v(3) == pytest.approx(1.6, rel=0.01)


def test_a_dear_source_does_not_limit_a_cheap_one() -> None:
    """A hybrid asks the dear source first, which declines; the cheap one drafts as far as ever."""
    learned = Learned()
    known = Costs({"model": 0.1, "dear": 5.0}, {n: flat(n) for n in range(2, 10)}, 1.0)
    learned.costs.start(known)
    gates = [CostGate(learned, 8, n_to_come=99) for _ in range(2)]
    assert not gates[1].more("dear")
    alone, after = (count_offers(gate) for gate in gates)
    assert alone == after > 1


def count_offers(gate: CostGate) -> int:
    """How many confident tokens of the model a gate admits."""
    n = 0
    while gate.more("model") and gate.take("model", 0.999):
        n += 1
    return n


def test_medians_outlive_a_disturbance() -> None:
    costs = CostTable()
    for r in run(engine(), NoDrafter(), n_predict=12):
        costs.add(r)
    before = costs.target_s
    slow = list(run(engine(), NoDrafter(), n_predict=2))[1]
    costs.add(replace(slow, times=replace(slow.times, verify_s=1000.0)))
    assert costs.target_s == before


def test_acceptance_is_learned_by_confidence() -> None:
    table = AcceptanceTable()
    assert table.at("model", 0.9) == pytest.approx(0.8)
    rounds = list(run(engine(), NoDrafter(), n_predict=2))
    for _ in range(100):
        for confidence, accepted in ((0.95, 1), (0.3, 0)):
            table.add(_with(rounds[1], confidence, accepted))
    assert table.at("model", 0.95) > 0.96
    assert table.at("model", 0.3) < 0.06
    assert table.overall("model") == pytest.approx(0.5, abs=0.05)
    assert table.overall("other") == pytest.approx(0.8)


def _with(r: Round, confidence: float, n_accepted: int) -> Round:
    draft = Draft((5,), None, "model", (confidence,), 1)
    tokens = (5,) * n_accepted + (1,)
    return replace(r, draft=draft, verdict=Verdict(tokens, 1, Origin.RESIDUAL), tokens=tokens)


def test_costs_are_kept_for_the_next_run(tmp_path: Path) -> None:
    path = tmp_path / "costs" / "x.json"
    assert not store.load_costs(path).complete
    costs = CostTable(Costs({"model": 0.2}, {3: 1.4, 5: 3.0}, 0.1))
    store.save_costs(path, costs)
    assert store.load_costs(path).medians() == costs.medians()
    whole = '{"target_s": %s, "c": {"model": %s}, "v": {"%s": %s}}'
    damages = ["{", "[]", "[" * 100_000, '{"target_s": 1, "c": 1}']
    damages += [whole % x for x in (("1e400", 1, 2, 1), (1, "NaN", 2, 1), (1, 1, 2, "Infinity"))]
    damages += [whole % x for x in ((-1, 1, 2, 1), (1, 1, 1, 1), (1, 1, 2, "1" + "0" * 400))]
    for damage in damages:
        path.write_text(damage)
        table = store.load_costs(path)
        assert (table.complete, table.target_s) == (False, None), damage
    blocked = tmp_path / "file" / "x.json"
    blocked.parent.write_text("")
    store.save_costs(blocked, costs)  # no error: the next run measures again
    assert not blocked.exists()


def test_an_earlier_text_is_a_weak_belief() -> None:
    table = AcceptanceTable()
    rounds = list(run(engine(), NoDrafter(), n_predict=2))
    for _ in range(60):
        table.add(_with(rounds[1], 0.9, 1))
    before = table.overall("model")
    table.start_text()
    for _ in range(10):
        table.add(_with(rounds[1], 0.9, 0))
    assert before > 0.95
    assert table.overall("model") < 0.72


class TestOwnCells:
    """A draft that has to read the text itself."""

    prompt = tuple(1 + n % 5 for n in range(400))

    def test_a_pair_that_is_known_not_to_pay_reads_nothing(self) -> None:
        machine = Machine(steep, 0.9, read=0.15)
        rounds = machine.generate(
            CostAwareSchedule(8, machine.loaded()), lambda n: 0.9, GREEDY, prompt=self.prompt
        )
        assert worst_window(rounds) < 1.05
        assert all(r.draft.n_caught_up < 50 for r in rounds)

    def test_a_pair_that_pays_wins_the_reading_back(self) -> None:
        machine = Machine(flat, 0.1, read=0.15)
        rounds = machine.generate(
            CostAwareSchedule(8, machine.loaded()), lambda n: 0.1, GREEDY, prompt=self.prompt
        )
        assert speed(rounds) > 1.5

    def test_few_tokens_to_come_do_not_win_a_reading_back(self) -> None:
        """What may still come is known: -n, or what is left of the context."""
        machine = Machine(flat, 0.1, read=0.15)
        n_read = {}
        for n in (8, 600):
            learned = machine.loaded()
            schedule = CostAwareSchedule(8, learned)
            rounds = machine.generate(schedule, lambda n: 0.1, GREEDY, n=n, prompt=self.prompt)
            n_read[n] = sum(r.draft.n_caught_up for r in rounds if r.draft.n_caught_up > 50)
        assert n_read[8] == 0
        assert n_read[600] >= len(self.prompt)

    @pytest.mark.parametrize(
        ("v_slope", "c", "blend"), [(0.25, 0.6, 0.3), (0.2, 0.5, 0.3), (0.15, 0.5, 0.45)]
    )
    @pytest.mark.parametrize(
        ("n_prompt", "n", "read"), [(150, 40, 0.1), (400, 60, 0.05), (1000, 100, 0.05)]
    )
    def test_short_texts_of_a_pair_at_break_even(
        self, v_slope: float, c: float, blend: float, n_prompt: int, n: int, read: float
    ) -> None:
        """What a text does not win back is remembered in the next one."""
        machine = Machine(lambda width: 1 + v_slope * (width - 1), c, read=read)
        learned = machine.loaded()
        rounds: list[Round] = []
        for seed in range(10):
            learned.start_text()
            prompt = [1 + i * (seed + 1) % 5 for i in range(n_prompt)]
            rounds += machine.generate(
                CostAwareSchedule(63, learned), lambda n: blend, GREEDY, n, prompt, seed
            )
        assert worst_window(rounds) < 1.05


class TestTenTexts:
    """Texts one after the other, tables kept: no 200 tokens take 5 % longer than the target."""

    @pytest.mark.parametrize("cold", [5, 20, 60, 200])
    def test_a_draft_that_memory_does_not_hold(self, cold: float) -> None:
        """Its first row after a pause is read from the disk: loading has measured what it costs."""
        machine = Machine(steep, 0.6, cold=cold)
        assert worst_window(self.write(machine, machine.loaded(), 0.4)) < 1.05

    def test_a_restart_that_nobody_could_foresee_is_not_repeated(self) -> None:
        machine = Machine(steep, 0.6, cold=60)
        rounds = self.write(machine, replace(machine, cold=0).loaded(), 0.4)
        assert sum(r.times.draft_s > 50 for r in rounds) == 1

    @pytest.mark.parametrize("target_s", [0.4, 1.0, 2.5])
    @pytest.mark.parametrize(("c", "blend"), [(0.5, 0.2), (0.9, 0.9)])
    def test_kept_costs_that_are_far_too_good(
        self, target_s: float, c: float, blend: float
    ) -> None:
        kept = Costs({"model": 0.05}, dict.fromkeys(range(2, 10), 1.02), target_s)
        for learned in (Learned(CostTable(kept)), Machine(steep, c).loaded(kept)):
            assert worst_window(self.write(Machine(steep, c), learned, blend)) < 1.05

    @pytest.mark.parametrize("name", ["steep", "hopeless", "jagged, dear draft"])
    def test_a_pair_that_does_not_pay_off(self, name: str) -> None:
        machine, blend = CASES[name]
        assert worst_window(self.write(machine, machine.loaded(), blend)) < 1.05

    def write(self, machine: Machine, learned: Learned, blend: float) -> list[Round]:
        rounds: list[Round] = []
        for seed in range(10):
            learned.start_text()
            schedule = CostAwareSchedule(63, learned)
            rounds += machine.generate(schedule, lambda n: blend, GREEDY, n=150, seed=seed)
        return rounds


def test_the_first_round_drafts_and_no_round_is_plain_without_a_reason() -> None:
    """Loading has measured the costs, and a plain round costs what a draft would have gained."""
    machine, blend = CASES["flat, good draft"]
    rounds = machine.generate(
        CostAwareSchedule(63, machine.loaded()), lambda n: blend, GREEDY, n=400
    )
    plain = [r.index for r in rounds if not r.n_draft]
    assert rounds[1].n_draft > 2
    assert 1 <= len(plain) - 1 <= 4  # the prompt's does not count
    assert machine.generate(CostAwareSchedule(63), lambda n: blend, GREEDY, n=9)[1].n_draft == 0


def test_the_longest_draft_follows_from_the_costs() -> None:
    """A target whose pass costs the same at any width, and a draft that costs almost nothing."""
    streamed = Machine(lambda width: 1 + 0.002 * width, 0.02)
    rounds = streamed.generate(CostAwareSchedule(63, streamed.loaded()), lambda n: 0.0, GREEDY)
    assert max(r.n_draft for r in rounds) == 63
    assert speed(rounds) > 15
    wrong = streamed.generate(CostAwareSchedule(63, streamed.loaded()), lambda n: 1.0, GREEDY)
    assert worst_window(wrong) < 1.05


@pytest.mark.parametrize("name", CASES)
def test_short_texts_lose_little(name: str) -> None:
    """Ten texts of 40 tokens, with nothing known: each of them and all together."""
    machine, blend = CASES[name]
    learned = Learned()
    total = 0.0
    for _ in range(10):
        learned.start_text()
        schedule = CostAwareSchedule(8, learned)
        rounds = machine.generate(schedule, lambda n: blend, GREEDY, n=40)
        total += spent(rounds)
        assert spent(rounds) < 1.1 * 39
    assert total < 1.03 * 390


def test_one_disturbed_measurement_is_not_forever() -> None:
    costs = CostTable(Costs({"model": 6.0}, {3: 1.04}, 1.0))
    rounds = Machine(flat, 0.1).generate(
        CostAwareSchedule(8, Learned(costs)), lambda n: 0.1, GREEDY, n=1500
    )
    assert speed([r for r in rounds if r.n_context > 700]) > 2


def test_what_the_first_decode_of_a_width_sets_up_over_a_link_is_not_its_cost() -> None:
    """Counted as cost, it makes widths look expensive and the target alone slower than it is."""
    machine = Machine(lambda n: 1.5 if n > 1 else 1.0, 0.15, setup=4.0)
    speeds, alone = [], []
    for over_a_link in (True, False):
        costs = CostTable(over_a_link=over_a_link)
        rounds = machine.generate(
            CostAwareSchedule(8, Learned(costs)), lambda n: 0.05, GREEDY, n=300
        )
        speeds.append(speed(rounds))
        alone.append(summarize(rounds, costs=costs).target_tokens_per_second)
    assert speeds[0] > 1.5
    assert alone[0] == pytest.approx(1.0, rel=0.05)
    assert alone[1] is not None
    assert alone[1] < 0.95


@pytest.mark.parametrize("p_min", [0.0, 1.0])
def test_a_draft_that_never_offers_anything_costs_little(p_min: float) -> None:
    """With p_min 1 no token is offered. With rows of NaN every draft is dropped."""
    machine = Machine(flat, 0.4)
    blend = 0.5 if p_min else float("nan")
    rounds = machine.generate(CostAwareSchedule(8, p_min=p_min), lambda n: blend, GREEDY)
    assert len(tokens_of(rounds)) == 600
    assert worst_window(rounds) < 1.04


class TestRent:
    """A draft in memory that a target which does not fit could use itself."""

    def learned(self, rent: float, alpha: float) -> Learned:
        learned = Learned()
        learned.costs.start(Costs({"model": 0.01}, {32: 1.05}, 1.0))
        learned.costs.rents["model"] = rent
        for i in range(100):  # one tested token in each, so that alpha is what is believed
            learned.acceptance.add(make_round(1, int(i * alpha % 1 + alpha >= 1)))
        return learned

    @pytest.mark.parametrize(
        ("rent", "alpha", "drafts"),
        [
            (0.0, 0.2, True),
            (0.4, 0.2, False),
            (0.4, 0.6, True),
            (0.9, 0.6, False),
            (0.9, 1.0, True),
        ],
    )
    def test_drafts_must_pay_it(self, rent: float, alpha: float, drafts: bool) -> None:
        """Drafts gain 1 / (1 - alpha) times at most, and the memory 1 / (1 - rent)."""
        assert would_draft(self.learned(rent, alpha), "model") == drafts

    def test_what_drafts_spend_counts_against_the_target_with_that_memory(self) -> None:
        learned = self.learned(0.5, 0.9)
        before = learned.account.balance
        learned.add(make_round(4, 0, draft_s=0.04, verify_s=1.0))
        income = learned.constants.income
        assert learned.account.balance == pytest.approx(before + 1 - 1.04 / 0.5, abs=income)

    def test_drafts_that_are_never_accepted_end_after_a_few_rounds(self) -> None:
        learned = self.learned(0.4, 0.9)
        n_rounds = 0
        while would_draft(learned, "model"):
            learned.add(make_round(10, 0, draft_s=0.1, verify_s=1.05))
            n_rounds += 1
        assert n_rounds <= 5

    def test_a_draft_whose_memory_is_lent_must_win_it_back(self) -> None:
        learned = self.learned(0.4, 0.5)
        assert would_draft(learned, "model")
        learned.costs.expect_restart("model", 200.0)
        assert learned.costs.restart("model") == pytest.approx(200.0)
        assert not would_draft(learned, "model")
