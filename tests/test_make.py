"""`qdraft make`: a draft from a target, measured, registered, and nothing of the user's lost."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import jsonschema
import numpy as np
import pytest
import tiny
from fakes import Clock, engine, table_logits, vocab
from invoke import qdraft as invoke
from invoke import schema
from zoo import ZOO

from qdraft import EngineParams, Pair, PairSpec, SamplingParams, disk
from qdraft.cli.make import parse_layers, parse_tensor_types
from qdraft.decoding.policy.model import best_n_draft, speedup
from qdraft.errors import DiskSpaceError, ParameterError, UsageError
from qdraft.gguf.facts import read_facts
from qdraft.llama.progress import no_progress
from qdraft.llama.quantize import QuantizePreview, Recipe, preview, quantize
from qdraft.making import job as job_module
from qdraft.making.calibration import built_in_text, write_texts
from qdraft.making.costs import WIDTHS, measure_costs, measure_token_seconds
from qdraft.making.job import DraftJob, path_beside
from qdraft.making.overlap import Overlap, measure_overlap
from qdraft.making.try_recipes import TriedRecipe, list_recipes, prunable_layers, require_prunable
from qdraft.pairs import editing as models_file
from qdraft.pairs import registry
from qdraft.paths import new_file
from qdraft.testing import FakeKvCopy, FakeSequence


class TestOverlap:
    TEXTS = ((3, [1, 0, 2, 4, 5, 1, 2, 3]), (2, [2, 1, 3, 3, 0]))

    def test_a_model_with_itself(self) -> None:
        result = measure_overlap(engine(), engine(), self.TEXTS)
        assert (result.n, result.same_top) == (5 + 3, 1.0)
        assert result.sum_min == pytest.approx(1.0)

    def test_the_figures_are_those_of_the_distributions(self) -> None:
        result = measure_overlap(engine(), engine(blend=0.5), self.TEXTS)
        laws = [table_logits(8, 7), table_logits(8, 7, blend=0.5)]  # of the two
        same, shares = [], []
        for n_prompt, tokens in self.TEXTS:
            for n in range(n_prompt, len(tokens)):
                rows = [np.asarray(logits(tuple(tokens[:n]))) for logits in laws]
                p, q = (np.exp(r) / np.exp(r).sum() for r in rows)
                same.append(p.argmax() == q.argmax())
                shares.append(np.minimum(p, q).sum())
        assert result.same_top == np.mean(same)
        assert result.sum_min == pytest.approx(np.mean(shares), abs=1e-6)
        assert result.sum_min_error == pytest.approx(np.std(shares, ddof=1) / 8**0.5, abs=1e-6)
        assert 0.3 < result.sum_min < 0.99

    def test_shared_cells_are_copied_before_each_place(self) -> None:
        target, draft = engine(), engine(blend=0.5)
        kv_copy = FakeKvCopy(target, draft)
        result = measure_overlap(target, draft, self.TEXTS, kv_copy.copy)
        assert result.n == 8
        assert kv_copy.starts == [0, 2, 3, 4, 5, 0, 1, 2]
        assert (target.n_past, draft.n_past) == (0, 0)


class TestSearch:
    def test_costs_are_ratios_of_medians(self) -> None:
        target, draft, clock = timed(engine()), timed(engine(), c=0.4), CLOCK
        costs = measure_costs(target, draft, clock)
        assert costs.c["model"] == pytest.approx(0.4)
        assert costs.v == pytest.approx({n: 1 + 0.1 * (n - 1) for n in WIDTHS})
        kept = measure_costs(target, timed(engine(), c=0.2), clock, costs.v)
        assert (kept.c["model"], kept.v) == (pytest.approx(0.2), costs.v)

    def test_a_tiny_vocabulary_has_all_tokens_that_are_timed(self) -> None:
        asked: list[int] = []

        class Asked(FakeSequence):
            def eval(self, tokens: Sequence[int], logits: int) -> np.ndarray:
                asked.extend(tokens)
                return super().eval(tokens, logits)

        sequence = Asked(table_logits(8, 7), vocab(8))
        measure_token_seconds(sequence, CLOCK)
        assert set(asked) <= set(range(8))

    def test_the_best_length_is_the_cost_models(self) -> None:
        v = {n: 1 + 0.1 * (n - 1) for n in WIDTHS}
        n_draft, predicted = best_n_draft(0.8, 0.2, v)
        assert predicted == max(speedup(0.8, k, 0.2, v[k + 1]) for k in range(1, 9))
        assert predicted == speedup(0.8, n_draft, 0.2, v[n_draft + 1])
        assert best_n_draft(0.3, 0.9, v) == (0, 1.0)

    @pytest.mark.real
    def test_recipes_are_tried_and_the_fastest_is_made(
        self, tmp_path: Path, shallow: tuple[Path, Path]
    ) -> None:
        target = tmp_path / "smol-Q4_1.gguf"
        target.symlink_to(shallow[0])
        done = invoke(
            "make",
            str(target),
            "--search",
            "--type",
            "Q8_0",
            "--type",
            "Q2_K",
            "--no-imatrix",
            "--measure",
            "30",
        )
        assert done.returncode == 0, done.stderr
        assert "winner" in done.stderr
        made = [p.name for p in tmp_path.glob("*.gguf")]
        pays = "is predicted" in " ".join(done.stderr.split())  # hardly, for so small a model
        assert len(made) == 1 + pays
        assert set(made) < {"smol-Q4_1.gguf", "smol-Q8_0.gguf", "smol-Q2_K.gguf"}
        lines = [s for s in done.stderr.splitlines() if not s.startswith("warning:")]
        assert max(map(len, lines)) <= 80

    def test_what_is_tried(self) -> None:
        names = [r.label for r in list_recipes(Path("m"), 30)]
        assert len(set(names)) == len(names)
        assert "IQ2_S" in names
        assert "Q2_K attn_=q4_k" in names
        assert "Q2_K without 3 layers" in names
        assert not any(r.file_type.startswith("IQ") for r in list_recipes(None, 4))

    def test_layers_are_left_out_where_all_are_alike(self, tmp_path: Path) -> None:
        """llama.cpp keeps the lists and periods that say which layers of a hybrid are recurrent."""
        recipe = Recipe("Q4_0", prune_layers=(1,))
        for name, n in (("mamba", 3), ("falcon-h1", 3), ("lfm2", 0), ("qwen35", 0)):
            facts = read_facts(ZOO[name].write(tmp_path / f"{name}.gguf"))
            assert prunable_layers(facts) == n
            if n:
                require_prunable(facts, recipe)
                continue
            with pytest.raises(
                ParameterError, match=r"prune_layers does not work with .* a hybrid"
            ):
                require_prunable(facts, recipe)

    def test_what_was_tried_in_json(self) -> None:
        for recipe in list_recipes(Path("m"), 30):
            tried = TriedRecipe(recipe, 10**6, Overlap(30, 0.9, 0.8, 0.01), True, 0.5, 2, 1.1)
            data = json.loads(json.dumps(asdict(tried), default=str))
            jsonschema.validate(data, schema("make", "tried"))


CLOCK = Clock()


def timed(model: FakeSequence, c: float = 1.0) -> FakeSequence:
    """Takes c for one row and a tenth more for each further one, on CLOCK."""
    plain = model.eval

    def slow(tokens: Sequence[int], logits: int) -> np.ndarray:
        CLOCK.now += c * (1 + 0.1 * (len(tokens) - 1))
        return plain(tokens, logits)

    model.eval = slow  # type: ignore[method-assign]
    return model


def test_names_beside_the_target() -> None:
    assert path_beside(Path("/m/Llama-8B-F16.gguf"), "Q2_K") == Path("/m/Llama-8B-Q2_K.gguf")
    assert path_beside(Path("/m/model.q8_0.gguf"), "IQ2_S") == Path("/m/model-IQ2_S.gguf")
    assert path_beside(Path("/m/F16.gguf"), "Q2_K") == Path("/m/F16-Q2_K.gguf")
    assert path_beside(Path("/m/model-BF16.gguf"), "Q2_K") == Path("/m/model-Q2_K.gguf")
    assert path_beside(Path("/m/Llama-3.Q4_K_M.gguf"), "Q2_K") == Path("/m/Llama-3-Q2_K.gguf")
    assert path_beside(Path("/m/model-F16.gguf"), "imatrix") == Path("/m/model.imatrix.gguf")


def test_option_values() -> None:
    assert parse_tensor_types(["attn_v=q6_K", "blk.0.ffn=up=Q8_0"]) == (
        ("attn_v", "q6_k"),
        ("blk.0.ffn=up", "q8_0"),
    )
    assert parse_layers("3,4") == (3, 4)
    assert parse_layers(None) == ()
    for wrong in ("attn_v", "=q6_k", "attn_v="):
        with pytest.raises(UsageError, match="NAME=TYPE"):
            parse_tensor_types([wrong])
    with pytest.raises(UsageError, match="numbers"):
        parse_layers("3,x")
    for recipe in (
        {"tensor_types": (("attn_v", "q9_k"),)},
        {"output_tensor_type": "nothing"},
        {"prune_layers": (-1,)},
    ):
        with pytest.raises(UsageError):
            Recipe("Q2_K", **recipe)  # type: ignore[arg-type]


def test_a_pair_is_added_and_comments_stay(tmp_path: Path) -> None:
    path = tmp_path / "models.yaml"
    path.write_text(
        "# mine\npairs:\n  first:  # keep this\n    target: a.gguf\n    draft: b.gguf\n",
        encoding="utf-8",
    )
    models_file.add("second", tmp_path / "t.gguf", tmp_path / "d.gguf", user_file=path)
    text = path.read_text(encoding="utf-8")
    assert text.startswith("# mine\npairs:\n  first:  # keep this\n    target: a.gguf\n")
    known = registry.load(path)
    assert known.find("first").draft == str(tmp_path / "b.gguf")
    assert known.find("second").target == str(tmp_path / "t.gguf")
    models_file.add("second", tmp_path / "other.gguf", None, user_file=path, license="MIT")
    entry = registry.load(path).find("second")
    assert (entry.target, entry.draft, entry.license) == (str(tmp_path / "other.gguf"), None, "MIT")
    models_file.add("third", tmp_path / "t.gguf", None, user_file=tmp_path / "sub" / "new.yaml")
    assert registry.load(tmp_path / "sub" / "new.yaml").find("third")


def test_every_other_line_stays(tmp_path: Path) -> None:
    """Comments belong to what follows them; links stay links; names may be numbers."""
    real, path = tmp_path / "real.yaml", tmp_path / "models.yaml"
    text = (
        "# top\ndefault: b\npairs:\n  # about a\n  a:\n    target: a.gguf\n\n"
        "  # about b\n  b:\n    target: b.gguf\n    # inside b\n    draft: c.gguf\n  7:\n"
        "    target: seven.gguf\n# the end\n"
    )
    real.write_text(text)
    path.symlink_to(real)
    models_file.remove("a", user_file=path)
    assert path.is_symlink()
    assert real.read_text() == text.replace("  a:\n    target: a.gguf\n", "")
    models_file.remove("7", user_file=path)
    long = tmp_path / ("x" * 200) / "new.gguf"
    models_file.add("new", long, None, user_file=path)
    models_file.add("b", long, None, user_file=path)
    assert registry.load(path).find("new").target == str(long)
    assert registry.load(path).find().target == str(long)
    left = real.read_text()
    assert left.startswith("# top\ndefault: b\npairs:\n  # about a\n\n  # about b\n  b:\n")
    assert left.endswith("# the end\n")
    for start in ("# only a comment\n", "", "pairs:\n", "pairs: {a: {target: t.gguf}}\n"):
        real.write_text(start)
        models_file.add("new", long, None, user_file=path)
        assert registry.load(path).find("new").target == str(long)
        assert real.read_text().startswith(start if start.startswith("#") else "pairs:")


def test_a_file_with_mistakes_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "models.yaml"
    path.write_text("pairs:\n  a:\n    target: t\n    drft: d\n", encoding="utf-8")
    before = path.read_bytes()
    with pytest.raises(UsageError, match=r"unknown key drft \(line 4\)"):
        models_file.add("b", tmp_path / "t.gguf", None, user_file=path)
    assert path.read_bytes() == before


@pytest.mark.real
def test_a_template_that_refuses_is_left_out(
    smollm2: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    refuse = "{{ raise_exception('only tools') }}"
    with Pair(PairSpec.of(smollm2[0], params=EngineParams(n_ctx=128), template=refuse)) as pair:
        ((n_prompt, tokens),) = write_texts(pair, ["Hello"], 5, SamplingParams())
    assert len(tokens) > n_prompt
    assert "qdraft generates texts without the template" in caplog.text


class TestCommand:
    @pytest.fixture
    def target(self, tmp_path: Path, source_file: Path) -> Path:
        """The demo model as a user has it: a file of their own."""
        path = tmp_path / "smol-Q4_1.gguf"
        path.symlink_to(source_file)
        return path

    @pytest.fixture
    def small_target(self, tmp_path: Path, shallow: tuple[Path, Path]) -> Path:
        path = tmp_path / "smol-Q4_1.gguf"
        path.symlink_to(shallow[0])
        return path

    @pytest.fixture
    def calibration(self, tmp_path: Path) -> tuple[str, str]:
        """The option for a part of the built-in text, so that the matrix takes seconds."""
        path = tmp_path / "calibration" / "part.txt"
        path.parent.mkdir()
        path.write_text(built_in_text()[:2400], encoding="utf-8")
        return "--calibration", str(path)

    def test_a_draft_is_made_measured_and_registered(
        self, small_target: Path, calibration: tuple[str, str]
    ) -> None:
        target = small_target
        args = ("--type", "q5_0", "--written", "32", "--measure", "60", "--json")
        done = invoke("make", str(target), *args, *calibration)
        assert done.returncode == 0, done.stderr
        outcome = json.loads(done.stdout)
        jsonschema.validate(outcome, schema("make"))
        (each,) = outcome["drafts"]
        assert each["pair"] == "smol-Q5_0"
        reported = each["made"]
        draft = target.with_name("smol-Q5_0.gguf")
        assert reported["draft"]["path"] == str(draft)
        assert reported["draft"]["n_bytes"] == draft.stat().st_size
        assert reported["matrix"] == str(target.with_name("smol.imatrix.gguf"))
        for made in (reported["quality"], reported["plain"]):
            for kv in ("shared", "own"):
                assert made[kv]["n"] > 30
                assert 0.5 < made[kv]["sum_min"] <= 1  # of 60 places
                assert 0.5 < made[kv]["same_top"] <= 1
        assert registry.load().find("smol-Q5_0").draft == str(draft)
        assert not [p for p in target.parent.iterdir() if p.name.startswith((".", "qdraft-"))]
        for how in (("--pair", "smol-Q5_0"), ("-m", str(target))):  # by name, or as known for it
            run = invoke("run", *how, "-p", "Hi", "-n", "4", "--temp", "0", "--json")
            assert run.returncode == 0, run.stderr
            assert json.loads(run.stdout)["draft"]["path"] == str(draft)
        again = invoke("make", str(target), "--type", "Q5_0")
        assert again.returncode == 2
        assert "already exists" in again.stderr

    @pytest.mark.skipif(sys.platform == "win32", reason="sends signals to a child")
    @pytest.mark.parametrize(
        ("stage", "number"),
        [
            ("collecting the importance matrix", signal.SIGINT),
            ("building smol-Q4_0", signal.SIGTERM),
        ],
    )
    def test_an_interrupt_leaves_no_partial_file(
        self, target: Path, calibration: tuple[str, str], stage: str, number: signal.Signals
    ) -> None:
        """What is whole stays: the matrix, when it is the quantization that is interrupted."""
        before = set(target.parent.iterdir())
        args = ("make", str(target), "--type", "Q4_0", "--written", "16", "--measure", "0")
        args = (*args, *calibration)
        child = subprocess.Popen(
            [sys.executable, "-m", "qdraft", *args],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert child.stderr is not None
        for line in child.stderr:
            if line.startswith(stage):
                break
        time.sleep(0.3)
        child.send_signal(number)
        _, err = child.communicate(timeout=60)
        assert child.returncode == 128 + number, err
        assert "Traceback" not in err
        left = {path.name for path in set(target.parent.iterdir()) - before}
        assert left == (set() if stage.startswith("collecting") else {"smol.imatrix.gguf"})

    def test_dry_run_writes_nothing(self, target: Path) -> None:
        before = sorted(target.parent.iterdir())
        done = invoke("make", str(target), "--type", "Q2_K", "--type", "IQ2_XXS", "--dry-run")
        assert done.returncode == 0, done.stderr
        reported = " ".join(done.stderr.split())
        assert "180 tensors fall back" in reported
        assert "needs an importance matrix" in reported
        as_json = invoke("make", str(target), "--type", "Q8_0", "--dry-run", "--json")
        jsonschema.validate(json.loads(as_json.stdout), schema("make-dry-run"))
        assert sorted(target.parent.iterdir()) == before
        planned = preview(target, Recipe("Q8_0"))
        made = quantize(target, target.with_name("made.gguf"), Recipe("Q8_0"), threads=2)
        assert planned.bits_per_weight == pytest.approx(made.bits_per_weight, abs=0.01)
        assert planned.n_bytes == pytest.approx(made.n_bytes, rel=0.03)  # all but the header

    def test_the_target_is_never_overwritten(self, target: Path, source_file: Path) -> None:
        before = source_file.stat()
        done = invoke("make", str(target), "--out", str(target), "--force")
        assert done.returncode == 2
        assert "the target itself" in done.stderr
        assert source_file.stat() == before

    def test_no_part_of_the_target_is_overwritten(self, tmp_path: Path) -> None:
        """Nor an importance matrix that is still needed."""
        source = tiny.windowed(tmp_path / "big.gguf")
        parts = tuple(tmp_path / f"big-0000{i}-of-00002.gguf" for i in (1, 2))
        for part in parts:
            part.write_bytes(b"weights")
        matrix = tmp_path / "matrix.gguf"
        matrix.write_bytes(b"sums")
        facts = replace(read_facts(source), path=parts[0], parts=parts)
        link = tmp_path / "link.gguf"
        link.symlink_to(parts[1])
        for out, message in (
            (parts[0], "is the target itself, or a part of it"),
            (parts[1], "is the target itself, or a part of it"),
            (link, "is the target itself, or a part of it"),
            (matrix, "is the importance matrix"),
        ):
            job = DraftJob(facts, out, None, None, 1, True, 0)
            with pytest.raises(UsageError, match=message):
                job.check([Recipe("Q2_K", matrix)])
        job = DraftJob(facts, tmp_path / "big-00001-of-00002.imatrix.gguf", None, None, 1, True, 0)
        with pytest.raises(UsageError, match="is the importance matrix"):
            job.check([Recipe("Q2_K")])

    def test_drafts_that_do_not_fit_the_disk(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Refused before any work; what is compared, and removed again, counts too."""

        def plan(source: Path, recipe: Recipe) -> QuantizePreview:
            size = {"Q8_0": 800, "Q4_0": 400, "IQ2_S": 200}.get(recipe.file_type, 500)
            needs_matrix = recipe.file_type == "IQ2_S"
            return QuantizePreview(recipe.file_type, size, 4.5, 0, needs_matrix)

        job = DraftJob(
            read_facts(tiny.windowed(tmp_path / "big.gguf")), None, None, None, 1, False, 90
        )
        monkeypatch.setattr(job_module, "preview", plan)
        two, two_bits = [Recipe("Q8_0"), Recipe("Q4_0")], [Recipe("IQ2_S", Path("matrix"))]
        for needed, recipes, search, collects in (
            (2000, two, False, True),
            (1200, two, False, False),
            (1600, two, True, True),
            (200, two_bits, False, True),
            (1000, [], True, True),  # the default recipes
        ):
            for module in (job_module, disk):
                monkeypatch.setattr(module, "free_bytes", lambda folder, n=needed: n)
            job.require_space(recipes, search=search, collects=collects)
            for module in (job_module, disk):
                monkeypatch.setattr(module, "free_bytes", lambda folder, n=needed: n - 1)
            with pytest.raises(DiskSpaceError, match="needs 0 MB in") as raised:
                job.require_space(recipes, search=search, collects=collects)
            assert raised.value.hint == "choose another folder with --out"

    def test_a_draft_that_appears_meanwhile_stays(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        source = tiny.windowed(tmp_path / "big.gguf")
        out = tmp_path / "out.gguf"

        def make(*args: object, overwrite: bool, **kwargs: object) -> None:
            with new_file(out, overwrite=overwrite) as part:
                part.write_bytes(b"mine")
                out.write_bytes(b"another's")

        monkeypatch.setattr(job_module, "make_draft", make)
        job = DraftJob(read_facts(source), out, None, None, 1, False, 0)
        job.check([Recipe("Q8_0")])
        with pytest.raises(UsageError, match=r"out.gguf already exists"):
            job.make(Recipe("Q8_0"), no_progress)
        assert out.read_bytes() == b"another's"

    def test_options_that_do_not_go_together(self, target: Path, tmp_path: Path) -> None:
        text = tmp_path / "text.txt"
        text.write_text("short")
        for args, message in (
            (
                ("--no-imatrix", "--imatrix", "x.gguf"),
                "--imatrix cannot be combined with --no-imatrix",
            ),
            (
                ("--imatrix", "x.gguf", "--written", "5"),
                "--written cannot be combined with --imatrix",
            ),
            (("--type", "Q9"), "unknown file type"),
            (("--type", "Q8_0", "--type", "Q2_K", "--name", "x"), "one --type"),
            (("--written", "-1"), "--written"),
            (("--calibration", str(text), "--written", "0"), "fewer than 512"),
            (("--calibration", str(tmp_path / "none.txt"), "--written", "0"), "cannot be read"),
        ):
            done = invoke("make", str(target), *args)
            assert done.returncode == 2, args
            assert message in " ".join(done.stderr.split()), args
        broken = tmp_path / "broken.gguf"
        broken.write_bytes(b"GGUF")
        done = invoke("make", str(target), "--imatrix", str(broken))
        assert done.returncode == 3
        assert "is not an importance matrix" in " ".join(done.stderr.split())

    def test_two_bit_i_quants_need_a_matrix(self, target: Path, tmp_path: Path) -> None:
        """The error quotes llama.cpp, and no file is left behind.

        https://github.com/ggml-org/llama.cpp/issues/6249
        """
        out = tmp_path / "iq2.gguf"
        done = invoke("make", str(target), "--type", "IQ2_XXS", "--no-imatrix", "--out", str(out))
        assert done.returncode == 6
        assert not out.exists()

    def test_layers_are_pruned(self, tmp_path: Path) -> None:
        source = tiny.windowed(tmp_path / "two.gguf")
        made = quantize(source, tmp_path / "one.gguf", Recipe("F16", prune_layers=(1,)), threads=1)
        assert sum(made.types.values()) == 2 + 7  # output and embedding, and one layer's

    def test_a_full_disk_leaves_the_target_and_nothing_else(self, target: Path) -> None:
        code = (
            "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
            "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20)); "
            "from qdraft.cli.main import main; main(sys.argv[1:])"
        )
        resource = pytest.importorskip("resource", reason="needs POSIX limits")
        assert resource
        done = subprocess.run(
            [sys.executable, "-c", code, "make", str(target), "--no-imatrix", "--type", "Q4_0"],
            capture_output=True,
            text=True,
        )
        assert done.returncode == 1, done.stderr
        lines = done.stderr.splitlines()[-2:]
        assert lines[0].startswith("error: the quantized file cannot be written to")
        assert lines[1].startswith("hint: the disk is full, or a limit is reached")
        assert [path.name for path in target.parent.iterdir()] == [target.name]
