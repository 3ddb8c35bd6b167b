"""Bench, comparison and explanation: from what was measured to rows, charts and words."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from invoke import schema
from ladder import REFERENCE, rung

from qdraft.decoding.intervals import Ratio
from qdraft.decoding.policy.cost_table import CostTable
from qdraft.decoding.policy.learned import Learned
from qdraft.decoding.policy.model import Costs, expected_tokens, interpolate_v
from qdraft.decoding.rates import Counts
from qdraft.decoding.records import DecodeParams, SamplingParams
from qdraft.errors import UsageError
from qdraft.llama.params import EngineParams
from qdraft.pairs.registry import TUNED
from qdraft.render import bench as bench_view
from qdraft.render import compare as compare_view
from qdraft.render.charts import draw_svg, draw_text
from qdraft.render.tables import as_markdown
from qdraft.study import bench_spec
from qdraft.study import compare as study_compare
from qdraft.study.bench import Sample, Written
from qdraft.study.bench_rows import fold
from qdraft.study.compare import ComparisonSpec
from qdraft.study.explain import Figures, Situation, alpha_at, best_length, explain
from qdraft.study.prompts import TASK_KINDS, Task, built_in, read_tasks
from qdraft.study.ranking import FailedRung, Reference, Rung, conclude
from qdraft.study.replay import Replayed
from qdraft.study.settings import Setting, choose_setting
from qdraft.study.tune import (
    Tried,
    choose_winner,
    compare_with_auto,
    conclude_tuning,
    tuned_settings,
)
from qdraft.testing import FakeVocab

COUNTS = Counts(n_rounds=20, n_drafted=40, n_tested=38, n_accepted=36, n_emitted=56)


def sample(
    kind: str = "code", temperature: float = 0.0, ours: float = 1.0, alone: float = 1.3, **kw: Any
) -> Sample:
    """60 tokens in these seconds; 20 rounds of 2 of which 36 of 38 tested tokens stood."""
    base = Sample(
        kind,
        0,
        temperature,
        0,
        Written(60, alone, 0.5),
        Written(60, ours, 0.51),
        COUNTS,
        (20, 18),
        (19, 17),
        (1, 2, 17),
        {"model": {"n_drafted": 40, "n_tested": 38, "n_accepted": 36}},
        1.25,
        1.1,
        0.0,
        30,
    )
    return replace(base, **kw)


COSTS = Costs({"model": 0.4}, {2: 1.1, 3: 1.3}, 0.1)


class TestBench:
    def test_rows_are_totals(self) -> None:
        result = fold(
            [
                sample(),
                sample(temperature=1.0, ours=2.0),
                sample("story"),
                sample("story", 1.0, alone=1.5),
            ],
            COSTS,
        )
        assert [(r.kind, r.temperature) for r in result.rows] == [
            ("code", 0),
            ("code", 1),
            ("story", 0),
            ("story", 1),
        ]
        total = result.total
        assert total.per_second == pytest.approx(240 / 5)
        assert total.alone_per_second == pytest.approx(240 / 5.4)
        assert total.speedup is not None
        assert total.speedup.value == pytest.approx(5.4 / 5)
        assert (total.alpha, total.draft_yield) == (pytest.approx(36 / 38), pytest.approx(36 / 40))
        assert total.tau == pytest.approx((36 + 20) / 20)
        assert total.alpha_at == (pytest.approx(19 / 20), pytest.approx(17 / 18))
        assert total.rounds_by_accepted == (4, 8, 68)
        assert total.predicted == pytest.approx(1.25)
        by_t = {r.temperature: r for r in result.by_temperature}
        assert by_t[1.0].speedup is not None
        assert by_t[1.0].speedup.value == pytest.approx(2.8 / 3)
        assert {r.kind for r in result.by_kind} == {"code", "story"}

    def test_verdicts(self) -> None:
        def verdict(*samples: Sample) -> str:
            return fold(samples, COSTS).conclusion

        assert verdict(sample()).startswith("too few prompts")
        fast = [sample(ours=1 + i / 100, prompt=i) for i in range(8)]
        assert verdict(*fast).startswith("drafting pays off: 1.2")
        slow = [sample(ours=1.6 + i / 100, prompt=i) for i in range(8)]
        assert verdict(*slow).startswith("drafting does not pay off: 0.8")
        even = [sample(ours=1.3, alone=1.3 + (i % 2) / 200, prompt=i) for i in range(8)]
        assert verdict(*even).startswith("drafting makes no difference: 1.00")
        wild = [sample(ours=0.7 + i / 5, prompt=i) for i in range(8)]
        assert "not decided" in verdict(*wild)
        noisy = [replace(s, spread=2.0) for s in fast]
        assert verdict(*noisy).endswith("too noisy to conclude")

    def test_repeats_and_temperatures_are_no_new_work(self) -> None:
        """Ten repeats of two prompts stand for two prompts; the totals are of all texts."""
        many = [
            sample(ours=1 + i / 100, prompt=p, temperature=float(t), repeat=i)
            for i in range(10)
            for p in (0, 1)
            for t in (0, 1)
        ]
        result = fold(many, COSTS)
        assert result.total.n_texts == 40
        assert result.total.speedup is not None
        assert result.total.speedup.low is None
        assert result.conclusion.startswith("too few prompts")
        four = [replace(s, prompt=s.repeat % 4) for s in many]
        assert fold(four, COSTS).total.speedup.low is not None  # type: ignore[union-attr]

    def test_doubts(self) -> None:
        """Texts that repeat themselves make any draft look good.

        https://github.com/kekzl/imp/pull/1521
        """
        result = fold([sample(repetition=0.6), sample(), sample(spread=3.0), sample()], COSTS)
        assert result.doubts == ("1 of 4 texts repeat themselves, which favours any draft",)
        result = fold([sample(spread=3.0)] * 3, COSTS)
        assert result.doubts[0].startswith("the machine was noisy: the slowest tenth")

    def test_tau_is_what_was_emitted(self) -> None:
        """A text that ends on an accepted draft token has no token after that one."""
        ended = replace(COUNTS, n_emitted=COUNTS.n_emitted - 1)
        assert fold([sample()], COSTS).total.tau == pytest.approx(56 / 20)
        assert fold([sample(), sample(counts=ended)], COSTS).total.tau == pytest.approx(111 / 40)

    def test_everything_is_shown(self) -> None:
        result = fold([sample(), sample("story", 1.0)] * 4, COSTS)
        text = as_markdown(bench_view.sheets(result))
        for word in ("speed-up", "T 0", "T 1", "story", "place", "accepted", "costs"):
            assert word in text
        report = bench_view.report(result, {"library": "x"})
        assert json.loads(json.dumps(report))["v"] == {"2": 1.1, "3": 1.3}
        titles = [chart.title for chart in bench_view.charts(result)]
        assert titles == [
            "Speed-up",
            "Acceptance",
            "Acceptance by place in the draft",
            "Cost of a target decode",
        ]


class TestWork:
    def test_our_own(self) -> None:
        assert [task.kind for task in built_in()] == list(TASK_KINDS)
        assert len(built_in(["code"], 2)) == 2
        with pytest.raises(UsageError, match="unknown kind of task dance"):
            built_in(["dance"])

    def test_jsonl_and_spec_bench(self, tmp_path: Path) -> None:
        path = tmp_path / "prompts.jsonl"
        path.write_text(
            '{"question_id": 81, "category": "writing", "turns": ["Compose.", "Rewrite."]}\n\n'
            '{"kind": "code", "prompt": "Sort."}\n{"prompt": "Plain."}\n'
        )
        assert read_tasks(path) == [
            Task("writing", "Compose."),
            Task("code", "Sort."),
            Task("prompts", "Plain."),
        ]
        assert read_tasks(path, ["code"]) == [Task("code", "Sort.")]
        with pytest.raises(UsageError, match="no prompt of kind dance"):
            read_tasks(path, ["dance"])

    @pytest.mark.parametrize(
        ("line", "error"),
        [
            ("{", "line 2: not a JSON object"),
            ("[1]", "line 2: not a JSON object"),
            ('{"kind": "code"}', "line 2: no prompt"),
            ('{"prompt": 3}', "line 2: no prompt"),
            ('{"turns": []}', "line 2: no prompt"),
            ('{"prompt": "x", "kind": 3}', "line 2: the kind must be text"),
            ('{"prompt": "\\ud800"}', "line 2: the prompt is not Unicode text"),
            ('{"prompt": "x", "kind": "\\ud800"}', "line 2: the kind is not Unicode text"),
            ("[" * 100_000, "line 2: not a JSON object"),
        ],
    )
    def test_a_bad_line_is_named(self, tmp_path: Path, line: str, error: str) -> None:
        path = tmp_path / "prompts.jsonl"
        path.write_text(f'{{"prompt": "x"}}\n{line}\n')
        with pytest.raises(UsageError, match=re.escape(error)):
            read_tasks(path)

    def test_any_encoding_with_a_mark_and_any_separator_inside_a_text(self, tmp_path: Path) -> None:
        path = tmp_path / "prompts.jsonl"
        text = '{"prompt": "é\u2028b"}\r\n{"prompt": "c"}\r\n'
        for data in (text.encode(), b"\xff\xfe" + text.encode("utf-16-le")):
            path.write_bytes(data)
            assert [task.prompt for task in read_tasks(path)] == ["é\u2028b", "c"]

    def test_files_that_are_none(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="cannot be read"):
            read_tasks(tmp_path / "none")
        (tmp_path / "empty").write_text("\n")
        with pytest.raises(UsageError, match="no prompts"):
            read_tasks(tmp_path / "empty")
        (tmp_path / "latin").write_bytes(b"\xe9")
        with pytest.raises(UsageError, match="UTF-8"):
            read_tasks(tmp_path / "latin")


class TestComparison:
    def test_which_pair_and_which_file(self) -> None:
        rows = [
            rung("Q2_K", 100, 0.5, 2.5, Ratio(1.1)),
            rung("Q8_0", 500, 0.001, 1.7, Ratio(0.9)),
            rung("Q4_K_M", 300, 0.015, 2.2, Ratio(1.4)),
        ]
        result = conclude(REFERENCE, rows)
        assert [row.file.file_type for row in result.rungs] == ["Q8_0", "Q4_K_M", "Q2_K"]
        assert result.recommendation.pair == "m-Q4_K_M.gguf"
        assert result.recommendation.single == "m-Q4_K_M.gguf"  # Q2_K is faster, and too far off
        reported = " ".join(result.recommendation.words)
        assert "1.40 times as fast" in reported
        assert "2.20 times as fast" in reported
        assert "the single file is faster, the pair is exact" in reported

    def test_a_pair_that_may_as_well_lose_is_not_named(self) -> None:
        result = conclude(REFERENCE, [rung("Q6_K", 400, 0.01, 0.9, Ratio(1.02, 0.94, 1.11))])
        assert result.recommendation.pair is None
        assert (
            "its interval begins at 0.94: no draft is shown to pay off"
            in result.recommendation.words[0]
        )

    def test_nothing_pays(self) -> None:
        result = conclude(REFERENCE, [rung("Q2_K", 100, 0.5, 0.9, Ratio(0.8))])
        assert (result.recommendation.pair, result.recommendation.single) == (None, None)
        assert "none of these drafts pays off" in result.recommendation.words[0]
        assert "single file: no file is both" in result.recommendation.words[1]

    def test_a_rung_that_failed_is_a_row(self) -> None:
        failed = FailedRung("Q2_K", "a child process died: SIGILL")
        result = conclude(REFERENCE, [failed, rung("Q8_0", 500, 0.001, 1.7, Ratio(1.1))])
        text = as_markdown(compare_view.sheets(result))
        assert "SIGILL" in text
        assert "Q8_0" in text
        rows = json.loads(json.dumps(compare_view.report(result, {})["rows"], default=str))
        assert len(rows) == 2
        jsonschema.validate(rows[1], schema("compare", "failed"))
        alone = conclude(REFERENCE, [failed])
        assert alone.recommendation.words == ("nothing was measured",)
        assert compare_view.charts(alone) == []

    def test_the_json_object(self) -> None:
        result = conclude(REFERENCE, [rung("Q8_0", 500, 0.001, 1.7, Ratio(1.1))])
        report = json.loads(json.dumps(compare_view.report(result, {"n_ctx": 512}), default=str))
        assert {"reference", "rows", "verdict", "n_ctx", "complete"} <= report.keys()
        assert report["rows"][0]["quality"]["kld"] == {"value": 0.001, "error": 0.001}
        assert report["verdict"]["pair"] == "m-Q8_0.gguf"

    def test_results_come_back_from_json(self) -> None:
        """As from a child job, and from the cache."""
        for result in (
            rung("Q8_0", 500, 0.001, 1.7, Ratio(1.1, 1.0, 1.2)).result,
            rung("Q2_K", 100, 0.5, 2.5, None).result,
            REFERENCE.result,
        ):
            data = json.loads(json.dumps(result.as_json()))
            assert type(result).of_json(data) == result

    def test_charts_of_rungs_without_a_figure(self) -> None:
        result = conclude(
            REFERENCE, [rung("Q8_0", 5, 0.1, 1.7, None), rung("Q2_K", 1, 0.5, 2, Ratio(1))]
        )
        for chart in compare_view.charts(result):
            assert draw_text(chart)
            assert draw_svg(chart).startswith("<svg")


class TestInterrupts:
    """What is done by then is folded and shown, and said to be a part."""

    def test_a_bench(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class Opened:
            vocab = FakeVocab([b"a", b"b"])
            learned = Learned(CostTable(Costs({"model": 0.4}, {2: 1.1}, 0.1)))

        def interrupted(*args: object, **kwargs: object) -> Iterator[Sample]:
            yield sample()
            yield sample("story")
            raise KeyboardInterrupt

        monkeypatch.setattr(bench_spec, "measure", interrupted)
        work = bench_spec.BenchSpec(
            [], (0.0,), 1, False, SamplingParams(), DecodeParams(n_predict=8)
        )
        result = work.run(Opened())  # type: ignore[arg-type]
        assert (result.total.n_texts, result.complete) == (2, False)
        monkeypatch.setattr(bench_spec, "measure", lambda *a, **k: stop_at_once())
        with pytest.raises(KeyboardInterrupt):  # nothing is done yet
            work.run(Opened())  # type: ignore[arg-type]

    def test_a_comparison(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class Interrupted:
            def __init__(self, *args: object) -> None: ...

            def require_space(self) -> None: ...

            def measure_reference(self) -> Reference:
                return REFERENCE

            def measure_rungs(self) -> Iterator[Rung]:
                yield rung("Q8_0", 500, 0.001, 1.7, Ratio(1.1))
                raise KeyboardInterrupt

        monkeypatch.setattr(study_compare, "Ladder", Interrupted)
        result = study_compare.compare_rungs(ComparisonSpec(Path("t"), (), ""))
        assert ([row.file.file_type for row in result.rungs], result.complete) == (["Q8_0"], False)


def stop_at_once() -> Iterator[Sample]:
    raise KeyboardInterrupt
    yield


FIGURES = Figures(0.3, {2: 1.1, 3: 1.2, 5: 1.4, 9: 2.0}, {0.0: 0.95, 1.0: 0.75})


class TestExplain:
    def test_the_pair_as_it_is(self) -> None:
        result = explain(FIGURES, Situation(temperature=0.0))[0]
        k = result.n_draft
        assert k is not None
        assert result.speedup == pytest.approx(
            expected_tokens(0.95, k) / (k * 0.3 + interpolate_v(FIGURES.v, k + 1))
        )
        assert f"{expected_tokens(0.95, k):.2f} tokens / ({k} x 0.30 + " in result.words

    def test_alpha_between_temperatures(self) -> None:
        assert alpha_at(FIGURES.alpha, 0.5) == pytest.approx(0.85)
        assert alpha_at(FIGURES.alpha, 2.0) == 0.75
        assert alpha_at(FIGURES.alpha, None) == pytest.approx(0.85)

    def test_v_between_and_beyond(self) -> None:
        assert interpolate_v({2: 1.1, 5: 1.4}, 3) == pytest.approx(1.2)
        assert interpolate_v({2: 1.1, 5: 1.4}, 8) == pytest.approx(1.7)
        assert interpolate_v({}, 4) == 4
        assert interpolate_v({}, 1) == 1

    def test_no_acceptance_rate_would_do(self) -> None:
        """If drafting does not pay off, the finding says what would have to change.

        https://github.com/ggml-org/llama.cpp/issues/10594
        https://github.com/ggml-org/llama.cpp/issues/10664
        """
        result = explain(Figures(1.0, {2: 1.5}, {0.0: 0.9}), Situation())[0]
        assert (result.speedup, result.n_draft) == (1.0, 0)
        assert "even if every token were accepted" in result.words
        low = explain(Figures(0.5, {2: 1.2}, {0.0: 0.4}), Situation())[0]
        assert "alpha is 0.40, but n_draft 1 needs 0.70" in low.words

    def test_a_long_prompt_hides_the_gain(self) -> None:
        known = replace(FIGURES, prompt_cost=0.1)
        short, long = (
            explain(known, Situation(0.0, n_prompt=n, n_predict=100)) for n in (10, 20_000)
        )
        gains = [next(f.speedup for f in of if "prompt" in f.topic) for of in (short, long)]
        assert gains[0] is not None
        assert gains[1] is not None
        assert gains[0] > 1.4 > 1.05 > gains[1]
        own = replace(known, shares_kv=False)
        result = explain(own, Situation(0.0, n_prompt=20_000, n_predict=100))
        assert next(f for f in result if "prompt" in f.topic).speedup < 1

    def test_users_experts_precision_memory(self) -> None:
        """A verify batch of a mixture of experts reads the union of its experts.

        https://github.com/JustVugg/colibri/issues/8
        """
        known = replace(
            FIGURES, target_bits=16.0, target_bytes=8 << 30, draft_bytes=2 << 30, experts=(8, 64)
        )
        result = {f.topic: f for f in explain(known, Situation(0.0, n_users=8, memory=9 << 30))}
        assert result["8 users"].speedup < result["pair"].speedup
        assert result["mixture of experts"].speedup < result["pair"].speedup
        assert "about 31 of them" in result["mixture of experts"].words
        assert result["target in Q4_K_M"].speedup < result["target in Q8_0"].speedup
        assert "the target fits alone" in result["memory"].words

    def test_lengths(self) -> None:
        assert best_length(0.9, 0.9, {2: 1.9}) == (0, 1.0)
        assert best_length(0.95, 0.05, {2: 1.0, 17: 1.1})[0] > 8


class TestTuned:
    def way(self, policy: str, speedup: float, over_auto: Ratio | None = None) -> Tried:
        n_draft = 3 if policy == "fixed" else None
        live = None if over_auto is None else Ratio(speedup, speedup - 0.1, speedup + 0.1)
        return Tried(
            DecodeParams(draft_policy=policy, n_draft=n_draft),
            Replayed(100, 0.9, 0.8, 3.0, speedup),
            live,
            over_auto=over_auto,
        )

    def test_only_what_is_certainly_faster_than_auto_replaces_it(self) -> None:
        """Only auto stops drafting if drafts do not pay off, and the best of four has luck."""
        auto = self.way("auto", 1.01, Ratio(1.0, 1.0, 1.0))
        lucky = self.way("fixed", 1.5, Ratio(1.3, 0.97, 1.7))
        faster = self.way("confidence", 1.2, Ratio(1.1, 1.02, 1.2))
        assert choose_winner([lucky, auto]).name == "auto"
        assert choose_winner([lucky, faster, auto]).name == "confidence"
        assert choose_winner([self.way("fixed", 1.5, Ratio(1.3)), auto]).name == "auto"

    def test_a_replay_alone_decides_for_nothing_but_auto(self) -> None:
        assert choose_winner([self.way("fixed", 9.9), self.way("auto", 1.2)]).name == "auto"

    def test_the_machine_of_the_minute_is_taken_out(self) -> None:
        """Auto ran while the machine was half as fast: the target alone beside it counts."""
        quick = [sample(kind, ours=1.0, alone=1.3) for kind in "abcd"]
        slow = [sample(kind, ours=2.0, alone=2.6) for kind in "abcd"]
        compared = compare_with_auto(quick, slow)
        assert compared is not None
        assert (compared.value, compared.low) == (pytest.approx(1.0), pytest.approx(1.0))

    def test_settings_as_models_yaml_has_them(self) -> None:
        best = self.way("fixed", 1.1, Ratio(1.05))
        words = conclude_tuning(best, None, Path("d.gguf"))
        assert words == ["fixed 3 with d.gguf: 1.10 times the target alone (1.00 to 1.20) live"]
        reported = tuned_settings(best, None, words[0], "2026-11-30")
        assert {k: x for k, x in reported.items() if x is not None} == {
            "draft-policy": "fixed",
            "n-draft": 3,
            "evidence": f"{words[0]}, 2026-11-30",
        }
        assert set(reported) - {"evidence"} <= set(TUNED)

    def test_threads_are_chosen_among_equals(self) -> None:
        """Fewer threads where it makes no difference; never what computes something else."""
        result = [
            Setting("1 thread", EngineParams(n_threads=1), per_second=98),
            Setting("2 threads", EngineParams(n_threads=2), per_second=100),
            Setting("cache", EngineParams(n_threads=2), per_second=200, same_output=False),
            Setting("broken", EngineParams(n_threads=4), per_second=300, error="no"),
        ]
        for setting in result:
            tuned = replace(setting, params=replace(setting.params, n_ctx=2048))
            data = json.loads(json.dumps(asdict(tuned)))
            jsonschema.validate(data, schema("tune", "setting"))
        chosen = choose_setting(result)
        assert chosen
        assert chosen.name == "1 thread"
        result[0] = replace(result[0], per_second=50)
        chosen = choose_setting(result)
        assert chosen
        assert chosen.name == "2 threads"

    def test_no_setting_is_chosen_if_the_pair_loads_with_none(self) -> None:
        assert choose_setting([]) is None
        assert choose_setting([Setting("1 thread", EngineParams(), error="no")]) is None
