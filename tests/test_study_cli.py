"""The studies on the real pair, from the command line."""

from __future__ import annotations

import csv
import io
import json
import re
from dataclasses import replace
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import jsonschema
import pytest
import tiny
from invoke import qdraft, schema
from ladder import REFERENCE, rung

from qdraft import disk
from qdraft.decoding.intervals import Ratio
from qdraft.errors import DiskSpaceError, UsageError
from qdraft.making.calibration import evaluation_text
from qdraft.pairs import editing as models_file
from qdraft.pairs import registry
from qdraft.study import compare as compare_module
from qdraft.study.compare import ComparisonSpec, compare_rungs
from qdraft.study.logit_store import LogitsWriter

pytestmark = pytest.mark.real


def files(pair: tuple[Path, Path]) -> tuple[str, ...]:
    return ("-m", str(pair[0]), "-d", str(pair[1]))


class TestBench:
    def test_one_object(self, smollm2: tuple[Path, Path], tmp_path: Path) -> None:
        page = tmp_path / "bench.html"
        done = qdraft(
            "bench",
            *files(smollm2),
            "--kinds",
            "code,story",
            "-n",
            "12",
            "--temp",
            "0,1",
            "--json",
            "--report",
            str(page),
            "--plot",
            str(tmp_path / "bench.svg"),
        )
        assert done.returncode == 0, done.stderr
        outcome = json.loads(done.stdout)
        jsonschema.validate(outcome, schema("bench"))
        assert [(r["kind"], r["temperature"]) for r in outcome["rows"]] == [
            ("code", 0),
            ("code", 1),
            ("story", 0),
            ("story", 1),
        ]
        assert outcome["total"]["n_texts"] == 4
        assert outcome["total"]["speedup"]["value"] > 0.2
        assert outcome["total"]["speedup"]["low"] is None  # of two prompts
        assert "too few prompts" in outcome["verdict"]
        assert outcome["library"].startswith("llama-cpp-python")
        assert outcome["kv"]["shared"]
        assert page.read_text(encoding="utf-8").count("<svg") >= 2
        assert (tmp_path / "bench.svg").stat().st_size > 1000
        explained = qdraft("explain", "--from", "-", "--temp", "0", stdin=done.stdout)
        if outcome["by_temperature"][0]["alpha"] is not None:
            assert explained.returncode == 0, explained.stderr
            assert "x alone" in explained.stdout

    def test_csv_and_markdown(self, smollm2: tuple[Path, Path]) -> None:
        shared = ("bench", *files(smollm2), "--kinds", "code", "-n", "6", "--temp", "0", "--quiet")
        rows = list(csv.reader(io.StringIO(qdraft(*shared, "-o", "csv").stdout)))
        assert rows[0][:4] == ["table", "kind", "T", "alone"]
        done = qdraft(*shared, "-o", "md")
        assert "| kind |" in done.stdout
        assert "\x1b" not in done.stdout + done.stderr
        assert done.stderr == ""

    @pytest.mark.parametrize(
        ("args", "error"),
        [
            (("--temp", "cold"), "--temp is cold"),
            (("-o", "xml"), "--output is xml"),
            (("--kinds", "dance"), "unknown kind of task dance"),
            (("--json", "-o", "csv"), "--json cannot be combined with --output csv"),
            (("--plot", "x.png", "--no-plot"), "--plot cannot be combined with --no-plot"),
            (("--plot", "/nowhere/x.png"), "is not a folder"),
            (("--n-draft", "0"), "--n-draft is 0 but must be at least 1"),
            (("--prompts", "/nowhere/prompts"), "cannot be read"),
        ],
    )
    def test_wrong_options(
        self, smollm2: tuple[Path, Path], args: tuple[str, ...], error: str
    ) -> None:
        done = qdraft("bench", *files(smollm2), *args)
        assert done.returncode == 2
        assert error in done.stderr
        assert done.stdout == ""

    def test_a_target_alone_has_nothing_to_measure(self, smollm2: tuple[Path, Path]) -> None:
        done = qdraft("bench", "-m", str(smollm2[0]))
        assert done.returncode == 2
        assert "there is no draft to measure" in done.stderr


class TestCompare:
    def run(self, smollm2: tuple[Path, Path], *args: str) -> CompletedProcess[str]:
        return qdraft(
            "compare",
            str(smollm2[0]),
            "Q8_0",
            "--no-imatrix",
            "--chunks",
            "1",
            "-c",
            "128",
            "-n",
            "8",
            "--temp",
            "0",
            *args,
        )

    def test_a_ladder(self, smollm2: tuple[Path, Path]) -> None:
        done = self.run(smollm2, "--json")
        assert done.returncode == 0, done.stderr
        outcome = json.loads(done.stdout)
        jsonschema.validate(outcome, schema("compare"))
        (eight,) = outcome["rows"]
        assert eight["file_type"] == "Q8_0"
        assert 0 < eight["quality"]["kld"]["value"] < 0.02
        assert eight["quality"]["same_top"]["value"] > 0.9
        assert eight["quality"]["n"] == 63
        # The reference as the rungs saw it, out of the store, is the reference.
        base = outcome["reference"]["quality"]["ppl"]["value"]
        assert eight["quality"]["ppl_base"]["value"] == pytest.approx(base, rel=1e-4)
        draft = eight["as_draft"][0]
        assert draft["alpha_shared"]["value"] > draft["alpha_own"]["value"] - 0.1 > 0.7
        assert outcome["verdict"]["words"]
        again = self.run(smollm2, "--quiet", "-o", "md")  # out of the cache
        assert again.returncode == 0
        assert again.stderr == ""
        assert "Mean KLD" in again.stdout

    def test_an_interrupted_comparison_goes_on(
        self,
        smollm2: tuple[Path, Path],
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        """What a job found is kept; the one that was interrupted left nothing, and is run again."""
        monkeypatch.setenv("QDRAFT_CACHE_DIR", str(tmp_path))
        monkeypatch.setattr(compare_module, "write_held_out", lambda *args: [])
        ran: list[str] = []

        fake = rung("Q8_0", 500, 0.001, 1.7, Ratio(1.1))

        def run(module: str, request: dict[str, Any], progress: object) -> dict[str, Any]:
            ran.append(request["do"])
            if request["do"] == "reference":
                with Path(request["store"]).open("wb") as out:
                    LogitsWriter(out, {}).close()
                return REFERENCE.result.as_json()
            if len(ran) == 2:
                raise KeyboardInterrupt
            return fake.result.as_json()

        spec = ComparisonSpec(smollm2[0], (smollm2[1],), evaluation_text(), n_ctx=64, n_chunks=1)
        interrupted = compare_rungs(spec, run=run)
        assert (interrupted.rungs, interrupted.complete) == ((), False)
        assert ran == ["reference", "rung"]
        assert not list(tmp_path.rglob("*.part"))
        again = compare_rungs(spec, run=run)
        assert ran == ["reference", "rung", "rung"]
        assert again.reference.result == REFERENCE.result
        assert [each.result for each in again.rungs] == [fake.result]
        assert again.complete
        assert len(compare_rungs(spec, run=run).rungs) == 1
        assert len(ran) == 3  # all of it was kept
        self.damage(tmp_path, caplog)
        assert [each.result for each in compare_rungs(spec, run=run).rungs] == [fake.result]
        assert ran[3:] == ["reference", "rung"]
        damaged = [message for message in caplog.messages if "damaged" in message]
        assert len(damaged) == 2
        (store,) = (tmp_path / "logits").iterdir()
        store.write_bytes(store.read_bytes()[:-1])  # as after a crash of the machine
        compare_rungs(spec, run=run)
        assert ran[5:] == ["reference"]
        for module in (compare_module, disk):
            monkeypatch.setattr(module, "free_bytes", lambda folder: 5_000_000)
        with pytest.raises(DiskSpaceError) as raised:
            compare_rungs(replace(spec, n_chunks=4, rungs=()), run=run)
        assert str(raised.value) == (f"the comparison needs 12 MB in {tmp_path}, but 5 MB is free")
        assert str(raised.value.hint).endswith("or score less: --chunks 1 takes 3 MB")
        assert ran[6:] == []

    def damage(self, cache: Path, caplog: pytest.LogCaptureFixture) -> None:
        """Take one key away from each kept result, and one of its figures from the other."""
        caplog.clear()
        first, second = (cache / "compare").iterdir()
        kept = json.loads(first.read_text())
        del kept["result"]["quality"]
        first.write_text(json.dumps(kept))
        second.write_text("{}")

    def test_not_the_same_model(self, smollm2: tuple[Path, Path], tmp_path: Path) -> None:
        other = tmp_path / "other.gguf"
        tiny.zeros(other, ["a", "b", "c"])
        done = qdraft("compare", str(smollm2[0]), str(other))
        assert done.returncode == 4
        assert "is not another quantization of" in done.stderr

    @pytest.mark.parametrize(
        ("args", "status", "error"),
        [
            (("Q99",), 2, "Q99 is neither a file nor a type"),
            (("nowhere.gguf",), 3, "nowhere.gguf"),
            (("Q8_0", "--chunks", "1", "-c", "4096"), 2, "but a chunk needs 4096"),
            (("Q8_0", "--imatrix", "x", "--no-imatrix"), 2, "--imatrix cannot be combined with"),
        ],
    )
    def test_wrong_options(
        self, smollm2: tuple[Path, Path], args: tuple[str, ...], status: int, error: str
    ) -> None:
        done = qdraft("compare", str(smollm2[0]), *args)
        assert done.returncode == status, done.stderr
        assert error in done.stderr


class TestWithoutModels:
    def test_replay(self) -> None:
        done = qdraft(
            "replay", "--alpha", "0.9", "--c", "0.05", "--v", "2=1.06,8=1.1,16=1.22", "--json"
        )
        assert done.returncode == 0, done.stderr
        outcome = json.loads(done.stdout)
        jsonschema.validate(outcome, schema("replay"))
        ways = outcome["ways"]
        assert ways[0]["replayed"]["speedup"] > 3
        single = qdraft("replay", "--alpha", "0.9", "--c", "0.05", "--v", "2=1.1", "--n-draft", "1")
        assert "fixed 1" in single.stdout

    @pytest.mark.parametrize(
        ("args", "error"),
        [
            ((), "there is no record to replay"),
            (("--alpha", "0.9"), "--alpha needs --c and --v"),
            (("--alpha", "0.9", "--c", "0.1", "--v", "two"), "--v is two"),
            (("--alpha", "1.5", "--c", "0.1", "--v", "2=1"), "--alpha is 1.5"),
            (("nowhere.npz",), "cannot be read"),
        ],
    )
    def test_wrong_replays(self, args: tuple[str, ...], error: str) -> None:
        done = qdraft("replay", *args)
        assert (done.returncode, done.stdout) == (2, "")
        assert error in done.stderr

    def test_explain(self) -> None:
        given = ("explain", "--alpha", "0=0.9,1=0.8", "--c", "0.3", "--v", "2=1.1,5=1.4")
        done = qdraft(
            *given,
            "--prompt-tokens",
            "2000",
            "-n",
            "100",
            "--users",
            "4",
            "--experts",
            "8/64",
            "--json",
        )
        outcome = json.loads(done.stdout)
        jsonschema.validate(outcome, schema("explain"))
        topics = [each["topic"] for each in outcome["findings"]]
        assert topics == [
            "pair",
            "temperature 0",
            "temperature 1",
            "prompt and output length",
            "4 users",
            "mixture of experts",
        ]
        assert "verdict" in qdraft(*given, "--temp", "0.5").stdout

    @pytest.mark.parametrize(
        ("args", "error"),
        [
            ((), "qdraft explain needs --alpha and --c and --v"),
            (("--alpha", "2"), "--alpha is 2"),
            (
                ("--alpha", "0.9", "--c", "0.1", "--v", "2=1", "--experts", "9/8"),
                "--experts is 9/8",
            ),
            (
                ("--alpha", "0.9", "--c", "0.1", "--v", "2=1", "--memory", "much"),
                "--memory is much",
            ),
            (("--from", __file__), "is not the output of qdraft bench"),
        ],
    )
    def test_wrong_explanations(self, args: tuple[str, ...], error: str) -> None:
        done = qdraft("explain", *args)
        assert (done.returncode, done.stdout) == (2, "")
        assert error in done.stderr


class TestTune:
    def test_recorded_replayed_confirmed_written_and_used(
        self, shallow: tuple[Path, Path], tmp_path: Path
    ) -> None:
        models, record = tmp_path / "models.yaml", tmp_path / "pair.npz"
        target, draft = shallow
        models.write_text(
            f"# mine\npairs:\n  mine:  # a pair\n    target: {target}\n    draft: {draft}\n"
        )
        named = ("--pair", "mine", "--models-file", str(models))
        done = qdraft(
            "tune",
            *named,
            "-n",
            "8",
            "--temp",
            "0",
            "--no-settings",
            "--confirm",
            "1",
            "--record",
            str(record),
            "--json",
        )
        assert done.returncode == 0, done.stderr
        outcome = json.loads(done.stdout)
        jsonschema.validate(outcome, schema("tune"))
        live = [way for way in outcome["ways"] if way["live"]]
        assert "auto" in [way["name"] for way in live]
        assert len(live) <= 2  # the best of the replays, and auto
        assert live[0]["live"]["low"] < live[0]["live"]["high"]
        auto = next(way for way in live if way["name"] == "auto")
        assert auto["over_auto"]["value"] == 1
        certain = [way for way in live if way["over_auto"]["low"] > 1]
        best = max(certain, key=lambda way: way["over_auto"]["value"], default=auto)
        assert len(outcome["ways"]) == 13
        assert (
            outcome["ways"][0]["params"]["verify"]
            == outcome["drafts"][0]["best"]["params"]["verify"]
        )
        text = models.read_text()
        assert text.startswith("# mine\n")
        tuned = registry.read(models).find("mine").tuned
        assert tuned["draft-policy"] == best["params"]["draft_policy"]
        assert "times the target alone" in str(tuned["evidence"])
        replayed = qdraft("replay", str(record), "--temp", "0", "--n-draft", "2", "--json")
        assert replayed.returncode == 0, replayed.stderr
        outcome = json.loads(replayed.stdout)
        jsonschema.validate(outcome, schema("replay"))
        assert outcome["ways"][0]["replayed"]["alpha"] > 0.3
        cheap = qdraft("replay", str(record), "--temp", "0", "--c", "0.01", "--v", "2=1.01,9=1.05")
        assert "times the target alone" in cheap.stdout

    def test_what_else_an_entry_says_stays(self, tmp_path: Path) -> None:
        """Relative paths, settings of one's own, comments outside the entry."""
        path = tmp_path / "models.yaml"
        path.write_text(
            "# mine\npairs:\n  a:\n    target: t.gguf\n    draft: d.gguf\n    context: 512\n"
            "    tuned: {cache-type-k: q8_0, p-min: 0.5}\n  b: {target: u.gguf}\n"
        )
        entry = registry.read(path).find("a")
        models_file.set_tuned(entry, {"n-draft": 3, "p-min": None}, user_file=path)
        outcome = registry.read(path)
        assert outcome.find("a").tuned == {"cache-type-k": "q8_0", "n-draft": 3}
        assert outcome.find("a").context == 512
        assert outcome.find("a").target == entry.target
        assert "target: t.gguf" in path.read_text()
        assert path.read_text().startswith("# mine\n")
        assert outcome.find("b").target == str(tmp_path / "u.gguf")

    def test_a_shipped_pair_is_copied(self, tmp_path: Path) -> None:
        path = tmp_path / "models.yaml"
        models_file.set_tuned(registry.load().find("smollm2"), {"n-draft": 2}, user_file=path)
        outcome = registry.load(path).find("smollm2")
        assert outcome.tuned == {"n-draft": 2}
        assert outcome.packaged == registry.load().find("smollm2").packaged
        assert registry.load(path).default == "smollm2"

    def test_a_target_alone_has_nothing_to_tune(self, smollm2: tuple[Path, Path]) -> None:
        done = qdraft("tune", "-m", str(smollm2[0]))
        assert done.returncode == 2
        assert "there is no draft to tune" in done.stderr


class TestSettingsOfAPair:
    """What an entry says of options stands where nothing is given; the command line wins."""

    def run(self, models: Path, *args: str) -> dict[str, Any]:
        done = qdraft(
            "run",
            "--models-file",
            str(models),
            "-p",
            "Hi",
            "-n",
            "10",
            "--temp",
            "0",
            "--json",
            *args,
        )
        assert done.returncode == 0, done.stderr
        outcome: dict[str, Any] = json.loads(done.stdout)
        return outcome

    @pytest.fixture
    def models(self, smollm2: tuple[Path, Path], tmp_path: Path) -> Path:
        template = tmp_path / "plain.jinja"
        template.write_text("{{ bos_token }}Q: {{ messages[-1]['content'] }}\nA:")
        path = tmp_path / "models.yaml"
        path.write_text(
            f"default: mine\npairs:\n  mine:\n    target: {smollm2[0]}\n    draft: {smollm2[1]}\n"
            "    template: plain.jinja\n    context: 64\n"
            "    tuned: {draft-policy: fixed, n-draft: 2, evidence: tried}\n"
        )
        return path

    def test_they_stand(self, models: Path) -> None:
        outcome = self.run(models)
        assert max(r["n_draft"] for r in outcome["rounds"]) == 2
        assert outcome["summary"]["n_prompt"] < 12  # the template is that of the entry

    def test_the_command_line_wins(self, models: Path) -> None:
        given = self.run(models, "--draft-policy", "fixed", "--n-draft", "3")
        assert max(r["n_draft"] for r in given["rounds"]) == 3
        alone = self.run(models, "--no-draft")
        assert max(r["n_draft"] for r in alone["rounds"]) == 0

    def test_one_way_given_is_the_whole_way(self, models: Path) -> None:
        """fixed with the tuned confidence would be another way than either."""
        models.write_text(models.read_text().replace("n-draft: 2", "n-draft: 2, p-min: 0.99"))
        outcome = self.run(models, "--draft-policy", "fixed", "--n-draft", "3")
        assert {r["n_draft"] for r in outcome["rounds"]} - {0} >= {3}

    def test_the_context_too(self, models: Path) -> None:
        done = qdraft("run", "--models-file", str(models), "-p", "word " * 100, "-n", "2")
        assert done.returncode == 5
        assert "the context holds 64" in done.stderr

    def test_a_template_that_is_not_there(self, models: Path) -> None:
        models.write_text(models.read_text().replace("plain.jinja", "none.jinja"))
        done = qdraft("run", "--models-file", str(models), "-p", "Hi", "-n", "2")
        assert done.returncode == 2
        assert "none.jinja cannot be read" in done.stderr

    @pytest.mark.parametrize(
        ("line", "error"),
        [
            ("tuned: {n-draft: [2]}", "n-draft (line 1) must be text or a number"),
            ("tuned: {n_draft: 2}", "unknown key n_draft (line 1)"),
            ("devices: {gpu-layers: true}", "gpu-layers (line 1) must be text or a number"),
            ("context: many", "context (line 1) must be a number"),
            ("context: -1", "context (line 1) must be a number"),
            ("template: 3", "template (line 1) must be text"),
        ],
    )
    def test_mistakes_have_a_line(self, tmp_path: Path, line: str, error: str) -> None:
        path = tmp_path / "models.yaml"
        path.write_text(f"pairs: {{a: {{target: t, {line}}}}}\n")
        with pytest.raises(UsageError, match=re.escape(error)):
            registry.read(path)
