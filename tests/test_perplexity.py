"""Perplexity, KL divergence and their store, against formulas written out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from fakes import engine, vocab

from qdraft.errors import LogitsError, UsageError
from qdraft.study.logit_store import (
    LogitsWriter,
    log_softmax,
    pack,
    read_about,
    read_blocks,
    unpack,
)
from qdraft.study.perplexity import Scores, chunks_of, evaluate, rows_at_once
from qdraft.testing import FakeSequence


def rows(n: int, n_vocab: int, seed: int = 0, scale: float = 3.0) -> np.ndarray:
    return (scale * np.random.default_rng(seed).normal(size=(n, n_vocab))).astype(np.float32)


class TestStore:
    def test_two_bytes_keep_a_log_probability_to_a_thousandth(self) -> None:
        logits = rows(50, 300, scale=1.5)
        result = unpack(*pack(logits))
        assert np.abs(result - log_softmax(logits)).max() < 2e-4
        assert np.exp(result).sum(axis=1) == pytest.approx(1, abs=1e-3)

    def test_what_is_far_below_the_best_is_cut(self) -> None:
        logits = np.array([[0.0, -5.0, -40.0]], np.float32)
        assert unpack(*pack(logits))[0, 2] == pytest.approx(-16, abs=0.01)

    def test_rows_of_one_value(self) -> None:
        assert unpack(*pack(np.zeros((2, 4), np.float32))) == pytest.approx(np.log(0.25))

    def write(self, path: Path) -> list[np.ndarray]:
        blocks = [rows(5, 40, seed=i, scale=1.5) for i in range(3)]
        with path.open("wb") as out:
            writer = LogitsWriter(out, {"n_vocab": 40})
            for block in blocks:
                writer.write(block)
            writer.close()
        return blocks

    def test_blocks_come_back(self, tmp_path: Path) -> None:
        path = tmp_path / "logits.bin"
        blocks = self.write(path)
        assert read_about(path) == {"n_vocab": 40}
        for result, block in zip(read_blocks(path, 40), blocks, strict=True):
            assert result == pytest.approx(log_softmax(block), abs=2e-4)

    def test_damage_is_noticed(self, tmp_path: Path) -> None:
        path = tmp_path / "logits.bin"
        self.write(path)
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
        with pytest.raises(UsageError, match="damaged"):
            list(read_blocks(path, 40))
        path.write_bytes(data[:-20])
        with pytest.raises(UsageError, match="holds no logits"):
            list(read_blocks(path, 40))
        with pytest.raises(UsageError, match="holds no logits"):
            read_about(tmp_path / "none.bin")


class TestScores:
    def test_the_formulas_written_out(self) -> None:
        own, other = rows(60, 30, seed=1), rows(60, 30, seed=1) + rows(60, 30, seed=2, scale=0.4)
        following = list(np.random.default_rng(3).integers(30, size=60))
        scores = Scores()
        scores.add(following[:25], other[:25], log_softmax(own[:25]))
        scores.add(following[25:], other[25:], log_softmax(own[25:]))
        result = scores.divergence()
        p = np.exp(own.astype(float))
        p /= p.sum(axis=1, keepdims=True)
        q = np.exp(other.astype(float))
        q /= q.sum(axis=1, keepdims=True)
        at = (np.arange(60), following)
        kld = (p * np.log(p / q)).sum(axis=1)
        dp = q[at] - p[at]
        same = p.argmax(axis=1) == q.argmax(axis=1)
        assert result.n == 60
        assert result.kld.value == pytest.approx(kld.mean(), rel=1e-4)
        assert result.kld.error == pytest.approx(kld.std(ddof=1) / np.sqrt(60), rel=1e-4)
        assert result.kld_median == pytest.approx(np.median(kld), rel=1e-4)
        assert result.kld_99 == pytest.approx(np.quantile(kld, 0.99), rel=1e-4)
        assert result.kld_max == pytest.approx(kld.max(), rel=1e-4)
        assert result.ppl.value == pytest.approx(np.exp(-np.log(q[at]).mean()), rel=1e-5)
        assert result.ppl_base.value == pytest.approx(np.exp(-np.log(p[at]).mean()), rel=1e-5)
        assert result.ppl_ratio.value == pytest.approx(result.ppl.value / result.ppl_base.value)
        assert result.dp.value == pytest.approx(dp.mean(), abs=1e-6)
        assert result.rms_dp.value == pytest.approx(np.sqrt((dp**2).mean()), rel=1e-4)
        assert result.same_top.value == pytest.approx(same.mean())
        assert result.correlation == pytest.approx(
            np.corrcoef(-np.log(q[at]), -np.log(p[at]))[0, 1]
        )
        assert scores.perplexity().ppl == result.ppl

    def test_a_file_against_itself(self) -> None:
        logits = rows(20, 50)
        scores = Scores()
        scores.add([1] * 20, logits, log_softmax(logits))
        result = scores.divergence()
        assert result.kld.value == pytest.approx(0, abs=1e-6)
        assert (result.same_top.value, result.ppl_ratio.value) == (1, pytest.approx(1))


class TestChunks:
    def test_the_rest_is_left_out_and_each_chunk_begins_a_text(self) -> None:
        assert chunks_of(range(10, 33), 10, None, 1) == [
            [1, *range(11, 20)],
            [1, *range(21, 30)],
        ]
        assert chunks_of(range(40), 10, 1, -1) == [list(range(10))]
        with pytest.raises(UsageError, match="9 tokens, but a chunk needs 10"):
            chunks_of(range(9), 10, None, -1)

    def test_the_second_half_is_scored_and_the_context_is_seen(self) -> None:
        """Against the engine's own rows, one by one."""
        chunk = list(np.random.default_rng(0).integers(8, size=40))
        target = engine(8)
        kept: list[np.ndarray] = []
        scores = evaluate(target, [chunk], keep=lambda block: kept.append(block.copy()))
        alone = engine(8)
        nll = []
        for i in range(39):
            row = log_softmax(alone.eval(chunk[i : i + 1], 1))[0]
            if i >= 20:
                nll.append(-row[chunk[i + 1]])
        result = scores.perplexity()
        assert result.n == 19
        assert result.ppl.value == pytest.approx(np.exp(np.mean(nll)), rel=1e-5)
        assert sum(map(len, kept)) == 19
        assert target.n_past == 0

    def test_a_row_that_is_not_finite_is_an_error(self) -> None:
        broken = FakeSequence(lambda tokens: [np.nan] * 8, vocab(8))
        with pytest.raises(LogitsError, match="not finite"):
            evaluate(broken, [[1] * 16])

    def test_a_big_vocabulary_is_looked_at_in_small_blocks(self) -> None:
        assert rows_at_once(262_144) * 262_144 * 4 <= 1 << 25
        assert rows_at_once(1000) == 128
