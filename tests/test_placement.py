"""Which layers go where: against every other way to lay them out, and within what there is."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from qdraft.decoding.policy.model import speedup
from qdraft.placement.choose import (
    Needs,
    Room,
    choose,
    largest_context,
    lay_out,
    read_times,
    shares_of,
)


def needs(n: int, size: int, *, kv: int = 2, compute: int = 5, tied: bool = False) -> Needs:
    """``n`` equal layers and an output of half their size."""
    return Needs(1024, (*[size] * n, size // 2), (*[kv] * n, 0), size, compute, 0.001, tied)


class TestLayOut:
    def test_the_last_layers_go_first_and_the_last_room_is_filled_first(self) -> None:
        of = needs(4, 10)
        assert lay_out(of, 3, [100, 5 + 5 + 12]) == (1, 2)  # the output and one layer, then one
        assert lay_out(of, 1, [0, 10]) == (0, 1)  # the output alone: 5 and 5 of work
        assert lay_out(of, 0, [0, 0]) == (0, 0)
        assert lay_out(of, 5, [0, 57]) is None
        assert lay_out(of, 5, [0, 58]) == (0, 5)

    def test_nothing_is_ever_laid_beyond_what_there_is(self) -> None:
        rng = np.random.default_rng(1)
        for _ in range(300):
            n = int(rng.integers(1, 8))
            sizes = tuple(int(x) for x in rng.integers(1, 30, n + 1))
            kv = tuple(int(x) for x in rng.integers(0, 9, n + 1))
            of = Needs(512, sizes, kv, 7, int(rng.integers(0, 9)), tied=bool(rng.integers(2)))
            rooms = [int(x) for x in rng.integers(0, 120, int(rng.integers(1, 4)))]
            for wanted in range(n + 2):
                counts = lay_out(of, wanted, rooms)
                if counts is None:
                    continue
                assert sum(counts) == wanted
                shares = shares_of(of, counts)
                assert all(
                    share.total <= room or not share.n_layers
                    for share, room in zip(shares, rooms, strict=False)
                )
                copied = of.weights[-1] if of.tied and not wanted else 0
                assert sum(s.weights for s in shares) == of.input + sum(of.weights) - copied
                assert sum(s.kv for s in shares) == sum(of.kv)
                assert sum(s.n_layers for s in shares) == n + 1


class TestChoose:
    def test_it_is_the_best_of_all_ways_on_one_device(self) -> None:
        rng = np.random.default_rng(2)
        for _ in range(20):
            target = needs(int(rng.integers(2, 9)), int(rng.integers(20, 60)))
            draft = needs(target.n_layers - 1, int(rng.integers(4, 20)))
            room = Room(int(rng.integers(0, 500)), float(rng.uniform(2, 20)))
            alpha = float(rng.uniform(0.3, 0.99))
            choice = choose(target, draft, [room], alpha)[0]
            best = 0.0
            for n, m in itertools.product(range(target.n_layers + 1), range(draft.n_layers + 1)):
                taken = shares_of(target, (n,))[0].total + shares_of(draft, (m,))[0].total
                if taken > room.n_bytes:
                    continue
                on_cpu, on_device = read_times(target, (n,), [room])
                token = on_cpu + on_device
                c = sum(read_times(draft, (m,), [room])) / token
                row = (0.1 * on_cpu + 0.02 * on_device) / token
                gain = max(speedup(alpha, k, c, 1 + row * k) for k in range(64))
                best = max(best, gain * sum(target.weights) / token)
            assert choice.speed == pytest.approx(best)

    def test_the_draft_goes_on_the_device_first_where_the_target_does_not_fit(self) -> None:
        choices = choose(needs(10, 100), needs(10, 20), [Room(300, 10.0)], 0.8)
        assert choices[0].draft == (11,)
        assert sum(choices[0].target) < 11

    def test_a_draft_is_left_out_where_its_place_is_worth_more(self) -> None:
        """Both hardly accepted and large: all of the target fits without it."""
        target, draft = needs(10, 100), needs(10, 80)
        choices = choose(target, draft, [Room(1100, 10.0)], 0.1)
        assert choices[0].draft is None
        assert choices[0].target == (11,)
        assert choices[1].draft is not None

    def test_a_draft_that_only_does_not_pay_is_kept(self) -> None:
        """Leaving it out makes no room: the loop itself sees that it does not pay."""
        choices = choose(needs(10, 100), needs(10, 90), [Room(5000, 10.0)], 0.05)
        assert choices[0].draft == (11,)
        assert choices[0].n_draft == 0

    def test_a_room_of_another_machine_takes_no_layer_of_the_draft(self) -> None:
        rooms = [Room(5000, 8.0, for_draft=False), Room(0, 8.0)]
        assert choose(needs(10, 100), needs(10, 20), rooms, 0.8)[0].draft == (0, 0)

    def test_numbers_of_layers_that_are_asked_for(self) -> None:
        target, draft, rooms = needs(10, 100), needs(10, 20), [Room(700, 8.0)]
        choices = choose(target, draft, rooms, 0.8, n_target=3, n_draft=2)
        assert choices[0].target == (3,)
        assert {choice.draft for choice in choices} == {(2,), None}

    def test_they_are_laid_out_whether_they_fit_or_not(self) -> None:
        """Only llama.cpp knows for sure: what is asked for is tried."""
        target, draft = needs(10, 100), needs(10, 20)
        choices = choose(target, draft, [Room(300, 8.0)], 0.8, n_target=11, n_draft=11)
        assert (choices[0].target, choices[0].draft) == ((11,), (11,))
        rooms = [Room(300, 8.0, for_draft=False), Room(450, 8.0)]
        choices = choose(target, draft, rooms, 0.8, n_target=11)
        assert choices[0].draft is not None
        assert sum(choices[0].target) == 11
        assert choices[0].draft[0] == 0

    def test_what_fits_comes_before_what_does_not(self) -> None:
        """One number is given: the other model takes what is left, not more."""
        target, draft, room = needs(10, 100), needs(10, 20), Room(700, 8.0)
        for asked in ({"n_target": 6}, {"n_draft": 11}):
            choice = choose(target, draft, [room], 0.8, **asked)[0]
            assert choice.draft is not None
            assert choice.fits
            taken = [shares_of(target, choice.target)[0], shares_of(draft, choice.draft)[0]]
            assert sum(share.total for share in taken) <= 700
        assert sum(choose(target, draft, [room], 0.8, n_target=6)[0].draft or ()) > 0
        assert sum(choose(target, draft, [room], 0.8, n_draft=11)[0].target) > 0
        assert not choose(target, draft, [room], 0.8, n_target=11)[0].fits

    def test_a_draft_that_may_go_to_one_room_only_is_not_crowded_out_of_it(self) -> None:
        """The target could go elsewhere as well."""
        target, draft = needs(20, 100), needs(20, 20)
        rooms = [Room(2400, 8.0, for_draft=False), Room(800, 8.0)]
        choice = choose(target, draft, rooms, 0.8)[0]
        assert choice.draft == (0, 21)
        assert sum(choice.target) == 21

    def test_a_cache_kept_on_the_cpu_grows_there(self) -> None:
        of = replace(needs(4, 100, kv=0), kv_on_cpu=64)
        assert shares_of(of, (5,))[1].kv == 64
        assert shares_of(of.at(2048), (5,))[1].kv == 128


class TestContext:
    def test_the_largest_that_fits_and_not_a_step_more(self) -> None:
        of, counts = needs(4, 100, kv=64), (3,)
        room = 2 * shares_of(of, counts)[0].total
        n_ctx = largest_context([(of, counts)], [room, 10**9], 10**6)
        assert n_ctx % 256 == 0
        assert shares_of(of.at(n_ctx), counts)[0].total <= room
        assert shares_of(of.at(n_ctx + 256), counts)[0].total > room

    def test_no_more_than_is_asked_for(self) -> None:
        assert largest_context([(needs(4, 100), (3,))], [10**9, 10**9], 2048) == 2048
        assert largest_context([(needs(4, 100), (3,))], [1, 10**9], 2048) == 0
