"""Replays against the formulas, and against the loop that they stand for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from fakes import GREEDY, PLAIN, engine, run

from qdraft.decoding.drafters.model import ModelDrafter
from qdraft.decoding.policy.model import Costs, expected_tokens, speedup
from qdraft.decoding.records import DecodeParams, SamplingParams
from qdraft.errors import UsageError
from qdraft.study import recording as records
from qdraft.study.recording import RecordedTokens, Recording, record
from qdraft.study.replay import (
    Replayed,
    ReplayOptions,
    can_share,
    choose_sampling,
    make_synthetic,
    replay,
    with_rest,
)
from qdraft.study.tune import choose_ways, list_ways
from qdraft.testing import FakeKvCopy

COSTS = Costs({"model": 0.3}, {2: 1.1, 3: 1.2, 5: 1.5, 9: 2.0})

OWN_CELLS = ReplayOptions(share_kv=False)


def fixed(n: int, verify: str = "token") -> DecodeParams:
    return DecodeParams(draft_policy="fixed", n_draft=n, verification=verify)


class TestSynthetic:
    @pytest.mark.parametrize("alpha", [0.5, 0.8, 0.95])
    @pytest.mark.parametrize("n_draft", [1, 2, 4])
    def test_alpha_tau_and_speed_are_the_cost_models(self, alpha: float, n_draft: int) -> None:
        result = replay(make_synthetic(alpha), COSTS, PLAIN, fixed(n_draft))
        assert result.alpha == pytest.approx(alpha, abs=0.025)
        assert result.tau == pytest.approx(expected_tokens(alpha, n_draft), rel=0.05)
        assert result.alpha_at[0] == pytest.approx(alpha, abs=0.04)
        # A round in 24 has no draft.
        ideal = speedup(alpha, n_draft, COSTS.c["model"], COSTS.v[n_draft + 1])
        assert result.speedup == pytest.approx(ideal, rel=0.05)

    def test_the_measured_policy_is_close_to_the_best_length(self) -> None:
        recording = make_synthetic(0.8)
        best = max(replay(recording, COSTS, PLAIN, fixed(n)).speedup for n in range(1, 9))
        assert replay(recording, COSTS, PLAIN, DecodeParams()).speedup > 0.94 * best

    def test_a_draft_that_cannot_pay_is_left_alone(self) -> None:
        dear = Costs({"model": 0.9}, {2: 1.6, 9: 4.0})
        assert replay(make_synthetic(0.6), dear, PLAIN, DecodeParams()).speedup > 0.97
        assert replay(make_synthetic(0.6), dear, PLAIN, fixed(4)).speedup < 0.6

    def test_alpha_has_to_be_one(self) -> None:
        with pytest.raises(UsageError, match="alpha is 0"):
            make_synthetic(0)


class TestWhatIsReplayed:
    def test_one_way_or_every_way(self) -> None:
        assert choose_ways(None, None, None, "block") == list_ways(0.0)
        assert choose_ways(None, 3, None, "token") == [fixed(3)]
        assert choose_ways(None, None, 0.5, "block") == [DecodeParams(p_min=0.5)]
        assert {way.verification for way in choose_ways(None, None, None, "token")} == {"token"}

    def test_the_rows_of_a_synthetic_recording_stay_as_they_are(self) -> None:
        synthetic = make_synthetic(0.8, 20)
        assert choose_sampling(synthetic, GREEDY) == PLAIN
        assert choose_sampling(Recording({}, synthetic.texts), GREEDY) == GREEDY

    def test_cells_are_shared_if_the_recorded_pair_shares_them(self) -> None:
        own = recorded(4, 1.0, 0.5, shared=False)
        assert [can_share(make_synthetic(0.8, 20), how) for how in ("auto", "on", "off")] == [
            True,
            True,
            False,
        ]
        assert not can_share(own, "auto")
        with pytest.raises(UsageError, match="share_kv is on but the recorded pair"):
            can_share(own, "on")


def test_the_space_of_a_recording_is_known_before(tmp_path: Path) -> None:
    recording = recorded(60, 1.0, 0.3, shared=True)
    path = tmp_path / "record"
    records.save(recording, path)
    n_positions = sum(text.n for text in recording.texts)
    assert path.stat().st_size < records.most_bytes(n_positions)
    (text,) = [replace(recording.texts[0], target=np.zeros((60, records.KEPT + 1), np.float16))]
    assert records.most_bytes(60) >= 6 * text.target.nbytes


def recorded(n: int, temperature: float, blend: float, *, shared: bool) -> Recording:
    """Texts of a fake pair, recorded as `qdraft tune` does."""
    params = SamplingParams(temperature, top_k=0, top_p=1, min_p=0)
    texts = []
    for seed in range(6):
        target = engine(8)
        from qdraft.decoding.drafters.protocol import NoDrafter
        from qdraft.decoding.rng import SeededRng

        prompt = (1, 0, 2 + seed)
        rounds = run(
            target, NoDrafter(), params=params, n_predict=n, prompt=prompt, rng=SeededRng(seed)
        )
        tokens = [*prompt, *(token for r in rounds for token in r.tokens)]
        draft = engine(8, blend)
        copy = FakeKvCopy(target, draft).copy if shared else None
        text = RecordedTokens(tokens, len(prompt), "text", temperature)
        texts.append(record(target, draft, text, copy))
        assert target.n_past == draft.n_past == 0
    return Recording({}, tuple(texts))


def live(n: int, params: SamplingParams, blend: float, n_draft: int) -> float:
    """alpha of the loop itself with these models."""
    from qdraft.decoding.rng import SeededRng

    tested = accepted = 0
    for seed in range(6):
        target, draft = engine(8), engine(8, blend)
        drafter = ModelDrafter(draft, 8, FakeKvCopy(target, draft))
        for r in run(
            target,
            drafter,
            params=params,
            n_predict=n,
            n_draft=n_draft,
            plain_every=24,
            prompt=(1, 0, 2 + seed),
            rng=SeededRng(100 + seed),
        ):
            tested += r.n_tested
            accepted += r.n_accepted
    return accepted / tested


class TestRecorded:
    @pytest.mark.parametrize("params", [GREEDY, PLAIN], ids=["greedy", "sampled"])
    def test_alpha_is_that_of_the_loop(self, params: SamplingParams) -> None:
        recording = recorded(300, params.temperature, 0.25, shared=True)
        result = replay(recording, COSTS, params, fixed(3), ReplayOptions(repeats=3))
        assert result.alpha == pytest.approx(live(300, params, 0.25, 3), abs=0.03)

    def test_each_place_is_its_own(self) -> None:
        """Greedy with the record of the greedy text: the replay is that loop, token for token."""
        recording = recorded(200, 0.0, 0.3, shared=True)
        assert replay(recording, COSTS, GREEDY, fixed(2)).alpha == live(200, GREEDY, 0.3, 2)

    def test_own_cells(self) -> None:
        recording = recorded(60, 1.0, 0.0, shared=False)
        assert replay(recording, COSTS, PLAIN, fixed(2), OWN_CELLS).alpha == pytest.approx(1)
        with pytest.raises(UsageError, match="does not share"):
            replay(recording, COSTS, PLAIN, fixed(2))

    def test_a_record_outlives_its_models(self, tmp_path: Path) -> None:
        recording = recorded(40, 1.0, 0.2, shared=True)
        path = tmp_path / "pair.npz"
        records.save(recording, path)
        again = records.load(path)
        twice = ReplayOptions(repeats=2)
        result = [replay(t, COSTS, PLAIN, fixed(3, "block"), twice) for t in (recording, again)]
        assert result[0] == result[1]
        assert isinstance(result[0], Replayed)

    def test_what_is_no_record(self, tmp_path: Path) -> None:
        path = tmp_path / "pair.npz"
        with pytest.raises(UsageError, match="cannot be read"):
            records.load(path)
        path.write_bytes(b"not an archive")
        with pytest.raises(UsageError, match="not a recording of a pair"):
            records.load(path)
        records.save(make_synthetic(0.5, 50), path)
        path.write_bytes(path.read_bytes()[:-40])
        with pytest.raises(UsageError, match="not a recording of a pair"):
            records.load(path)
        np.savez(path, other=np.zeros(3))
        with pytest.raises(UsageError, match="not a recording of a pair"):
            records.load(path)

    def test_a_damaged_record_is_never_read_as_another(self, tmp_path: Path) -> None:
        """One flipped bit anywhere: the same record, or one line."""
        recording = make_synthetic(0.5, 5)
        path = tmp_path / "pair.npz"
        records.save(recording, path)
        data = path.read_bytes()
        refused = 0
        for place in range(0, len(data), 6):
            flipped = bytes([data[place] ^ 1 << place % 8])
            path.write_bytes(data[:place] + flipped + data[place + 1 :])
            try:
                (text,) = records.load(path).texts
            except UsageError:
                refused += 1
                continue
            for name in ("target", "own", "shared", "depth"):
                assert np.array_equal(getattr(text, name), getattr(recording.texts[0], name)), place
        assert refused > len(data) / 18

    def test_rows_that_do_not_fit_together_are_refused(self, tmp_path: Path) -> None:
        (text,) = make_synthetic(0.5, 5).texts
        path = tmp_path / "pair.npz"
        for change in ({"own": text.own[1:]}, {"depth": text.target}, {"shared": text.own}):
            records.save(Recording({}, (replace(text, **change),)), path)
            with pytest.raises(UsageError, match="not a recording of a pair"):
                records.load(path)

    def test_what_cannot_be_replayed_is_refused(self) -> None:
        recording = make_synthetic(0.8, 20)
        with pytest.raises(UsageError, match="repeat_penalty"):
            replay(recording, COSTS, SamplingParams(repeat_penalty=1.1), fixed(1))
        with pytest.raises(UsageError, match=r"at most 1\.5"):
            replay(recording, COSTS, SamplingParams(temperature=2), fixed(1))
        with pytest.raises(UsageError, match="use --drafter model"):
            replay(recording, COSTS, PLAIN, DecodeParams(drafter="ngram"))


def test_the_rest_weighs_what_its_tokens_would() -> None:
    """Ten tokens of one hundredth each beside one of .9, at temperature .5."""
    row = np.log(np.array([[0.9, 0.1]], np.float32))
    cold = np.exp(with_rest(row, 10, 0.5) / 0.5)[0]
    assert cold[1] / cold[0] == pytest.approx(10 * (0.01 / 0.9) ** 2, rel=1e-4)
    assert with_rest(row, 0, 0.5)[0, 1] == -np.inf
