"""Other programs use the CPU: qdraft notices it, goes on with fewer threads, and takes them back."""

from __future__ import annotations

import logging
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny
from fakes import Clock
from fakes import make_round as make

from qdraft import DecodeParams, EngineParams, Pair, PairSpec, SamplingParams
from qdraft.llama.native import limit_spinning
from qdraft.session.contention import Contention
from qdraft.session.threads import Threads


def test_three_slow_decodes_in_a_row() -> None:
    contention = Contention()
    assert not any(
        contention.add(make(0, 0, verify_s=s)) for s in (0.02, 0.021, 0.2, 0.2, 0.02, 0.2, 0.2)
    )
    assert contention.add(make(0, 0, verify_s=0.3))
    assert contention.times_slower == pytest.approx(15)
    assert not contention.add(make(0, 0, verify_s=0.3))  # it starts counting again


def test_widths_are_not_compared_with_one_another() -> None:
    contention = Contention()
    contention.add(make(0, 0, verify_s=0.02))
    assert not any(contention.add(make(8, 0, verify_s=0.5)) for _ in range(6))


def test_what_earlier_runs_took_counts() -> None:
    contention = Contention(0.02)
    assert [contention.add(make(0, 0, verify_s=0.5)) for _ in range(3)] == [False, False, True]


class Context:
    """A context whose decodes take as long as the machine needs for its number of threads."""

    def __init__(self, n: int, n_batch: int) -> None:
        self.n_threads, self.n_threads_batch = n, n_batch

    def use_threads(self, n: int, n_batch: int) -> None:
        self.n_threads, self.n_threads_batch = n, n_batch

    @property
    def numbers(self) -> tuple[int, int]:
        return self.n_threads, self.n_threads_batch


class Machine:
    """Four cores; ``free`` are those that no other program uses."""

    def __init__(self, **kwargs: object) -> None:
        self.target, self.draft = Context(4, 3), Context(2, 2)
        self.threads = Threads([self.target, self.draft], **kwargs)  # type: ignore[arg-type]
        self.free = 4

    def decode(self, n_rounds: int) -> list[int]:
        """The numbers of the target's threads in these rounds."""
        used = []
        for _ in range(n_rounds):
            used.append(self.target.n_threads)
            is_shared = used[-1] > self.free
            self.threads.watch(make(0, 0, verify_s=10.0 if is_shared else 0.4 / used[-1]))
        return used

    @property
    def numbers(self) -> list[tuple[int, int]]:
        return [self.target.numbers, self.draft.numbers]


ALL = [(4, 3), (2, 2)]


def test_threads_are_halved_and_come_back() -> None:
    machine = Machine()
    machine.decode(10)
    assert (machine.numbers, machine.threads.settled) == (ALL, True)
    machine.free = 1
    assert machine.decode(6) == [4, 4, 4, 2, 2, 2]
    assert machine.numbers == [(1, 1), (1, 1)]
    assert not machine.threads.settled
    used = machine.decode(2000)
    assert used.count(4) == 3  # tries, each of one decode: after 256 rounds, 512 and 1024
    machine.free = 4
    machine.decode(2100)  # the next try is after 2048
    assert machine.numbers == ALL
    machine.decode(300)
    assert (machine.numbers, machine.threads.settled) == (ALL, True)


def test_costs_are_those_of_all_threads_again_only_after_a_while() -> None:
    machine = Machine()
    machine.decode(10)
    machine.free = 2
    machine.decode(3)
    machine.free = 4
    used = machine.decode(256 + 100)
    assert (used[:256], used[256:]) == ([2] * 256, [4] * 100)
    assert not machine.threads.settled  # the medians still hold times of two threads
    machine.decode(100)
    assert machine.threads.settled


def test_contention_that_comes_back_soon_is_tried_less_often() -> None:
    machine = Machine()
    machine.decode(10)
    waits = []
    for _ in range(3):
        machine.free = 2
        while machine.target.n_threads == 4:
            machine.decode(1)
        machine.free = 4
        waits.append(len(list(iter(lambda: machine.decode(1), [4]))))
        machine.decode(20)
    assert waits == [256, 512, 1024]


def test_who_holds_the_threads_has_all_of_them(caplog: pytest.LogCaptureFixture) -> None:
    machine = Machine()
    machine.decode(10)
    machine.free = 2
    machine.decode(3)
    assert machine.target.n_threads == 2
    with caplog.at_level(logging.WARNING, logger="qdraft"), machine.threads.held():
        assert machine.numbers == ALL
        caplog.clear()
        assert machine.decode(700) == [4] * 700
        assert caplog.text.count("an exact text keeps its 4 threads") == 1
        with machine.threads.held():  # another text, which ends first
            pass
        assert machine.decode(9) == [4] * 9
    assert machine.decode(6)[-1] == 2


def test_contention_with_one_thread_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    context = Context(1, 1)
    threads = Threads([context], 0.1)
    with caplog.at_level(logging.WARNING, logger="qdraft"):
        for _ in range(9):
            threads.watch(make(0, 0, verify_s=5.0))
    assert caplog.text.count("there is 1 thread already") == 1
    assert (context.numbers, threads.settled) == ((1, 1), True)


def test_decodes_that_other_programs_do_not_slow_are_not_watched() -> None:
    machine = Machine(watched=False)
    machine.free = 1
    assert machine.decode(9) == [4] * 9


@pytest.fixture
def stall(monkeypatch: pytest.MonkeyPatch) -> Callable[[Pair], None]:
    """Make the target's decodes of a pair stall, from its sixth to its ninth, on a clock of ours."""
    clock = Clock()
    monkeypatch.setattr("qdraft.session.generation.time", SimpleNamespace(perf_counter=clock))

    def stall(pair: Pair) -> None:
        decode, n = pair.contexts.target.decode, 0

        def slow(*args: object) -> None:
            nonlocal n
            n += 1
            clock.now += 1.0 if 6 <= n < 10 else 0.01
            decode(*args)  # type: ignore[arg-type]

        monkeypatch.setattr(pair.contexts.target, "decode", slow)
        pair.threads = Threads(tuple(pair.contexts))  # loading was timed on another clock

    return stall


@pytest.fixture
def tiny_pair(tmp_path: Path) -> Iterator[Pair]:
    path = tiny.windowed(tmp_path / "model.gguf")
    params = EngineParams(n_ctx=512, n_threads=2, n_threads_batch=3)
    with Pair(PairSpec.of(path, path, params)) as pair:
        yield pair


GREEDY = SamplingParams(temperature=0, logit_bias={1: -math.inf})


@pytest.mark.real
def test_the_threads_of_a_pair(
    tiny_pair: Pair,
    stall: Callable[[Pair], None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The target's decodes stall: both contexts go on with half the threads, and so does the text."""
    pair, params = tiny_pair, DecodeParams(n_predict=40, n_draft=0)
    n_saved = 0

    def save() -> None:
        nonlocal n_saved
        n_saved += 1

    monkeypatch.setattr(pair._learning, "save", save)
    stall(pair)
    with caplog.at_level(logging.WARNING, logger="qdraft"):
        assert len(pair.session().generate([2, 3, 4], GREEDY, params).read()) > 20
    assert [(c.n_threads, c.n_threads_batch) for c in pair.contexts] == [(1, 1), (1, 1)]
    assert "continuing with 1 thread" in caplog.text
    # What is stored as the number of bit-identical rows holds for all threads: they are back.
    pair.bit_identity(1)
    assert [(c.n_threads, c.n_threads_batch) for c in pair.contexts] == [(2, 3), (2, 3)]
    # Costs are stored again once they are those of all threads.
    for expected in (0, 1):
        pair.session().generate([2, 3, 4], GREEDY, replace(params, n_predict=150)).read()
        assert n_saved == expected


@pytest.mark.real
def test_an_exact_text_keeps_its_threads(
    tiny_pair: Pair, stall: Callable[[Pair], None], caplog: pytest.LogCaptureFixture
) -> None:
    pair = tiny_pair
    pair.bit_identity(8)  # stored, so that the decodes below are those of the text
    stall(pair)
    exact = DecodeParams(n_predict=40, draft_policy="fixed", n_draft=0, exact=True)
    text = pair.session().generate([2, 3, 4], GREEDY, replace(exact, n_draft=1))
    used = []
    with caplog.at_level(logging.WARNING, logger="qdraft"):
        while text.step():
            used.append([(c.n_threads, c.n_threads_batch) for c in pair.contexts])
    assert used == [[(2, 3), (2, 3)]] * len(used)
    assert "an exact text keeps its 2 threads" in caplog.text
    # The next text, which is not exact, may go on with fewer.
    stall(pair)
    with caplog.at_level(logging.WARNING, logger="qdraft"):
        pair.session().generate([2, 3], GREEDY, replace(exact, exact=False)).read()
    assert "continuing with 1 thread" in caplog.text


def test_llama_cpps_threads_sleep_soon_unless_the_user_says_how(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for given in ({}, {"GOMP_SPINCOUNT": "7"}, {"OMP_WAIT_POLICY": "active"}):
        for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
            monkeypatch.delenv(name, raising=False)
        for name, value in given.items():
            monkeypatch.setenv(name, value)
        limit_spinning()
        names = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
        seen = {name: os.environ[name] for name in names if name in os.environ}
        assert seen == (given or {"GOMP_SPINCOUNT": "10000"})


@pytest.mark.real
@pytest.mark.skipif(sys.platform != "linux", reason="libgomp is the OpenMP of Linux")
def test_the_limit_is_set_before_llama_cpp_is_loaded() -> None:
    """libgomp prints what it has read when it is loaded."""
    environment = {k: v for k, v in os.environ.items() if k not in ("GOMP_SPINCOUNT",)}
    result = subprocess.run(
        [sys.executable, "-c", "from qdraft.llama.native import lib; lib()"],
        env={**environment, "OMP_DISPLAY_ENV": "verbose"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "GOMP_SPINCOUNT = '10000'" in result.stderr
