"""`qdraft models`: pairs by name, and files where other programs keep them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import jsonschema
import pytest
import tiny
from closed import close_folder
from invoke import one_error, qdraft, qdraft_process, schema

from qdraft.errors import UsageError
from qdraft.llama.quantize import Recipe, quantize
from qdraft.pairs import editing as models_file
from qdraft.pairs import registry
from qdraft.pairs import scan as find
from qdraft.pairs.scan import gguf_files, known_folders, ollama_models, propose, read_all


@pytest.fixture(scope="module")
def ladder(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One small model in three precisions, and another one."""
    pytest.importorskip("llama_cpp")
    folder = tmp_path_factory.mktemp("ladder")
    files = {"F32": tiny.windowed(folder / "tiny-F32.gguf")}
    for kind in ("F16", "Q4_0"):
        path = folder / f"tiny-{kind}.gguf"
        files[kind] = quantize(files["F32"], path, Recipe(kind), threads=1).path
    files["other"] = tiny.mixture(folder / "other.GGUF")
    return files


@pytest.fixture(autouse=True)
def _small_files_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(find, "_MODEL_BYTES", 0)


def home(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    for name in ("HF_HOME", "HF_HUB_CACHE", "LLAMA_CACHE", "OLLAMA_MODELS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.setenv("USERPROFILE", str(folder))


def test_the_usual_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ladder: dict[str, Path]
) -> None:
    home(monkeypatch, tmp_path)
    assert known_folders([]) == []
    blobs = tmp_path / ".cache/huggingface/hub/models--a--b/blobs"
    snapshot = blobs.parent / "snapshots/123"
    studio = tmp_path / ".lmstudio/models/pub/repo"
    for folder in (blobs, snapshot, studio):
        folder.mkdir(parents=True)
    (blobs / "abc").write_bytes(ladder["F16"].read_bytes())
    (snapshot / "tiny-F16.gguf").symlink_to(blobs / "abc")  # as the hub keeps them
    (studio / "tiny-Q4_0.gguf").write_bytes(ladder["Q4_0"].read_bytes())
    ollama = tmp_path / ".ollama/models"
    manifest = ollama / "manifests/registry.ollama.ai/library/tiny/latest"
    manifest.parent.mkdir(parents=True)
    (ollama / "blobs").mkdir()
    (ollama / "blobs/sha256-77").write_bytes(ladder["F32"].read_bytes())
    layers = [
        {"mediaType": "application/vnd.ollama.image.license", "digest": "sha256:1"},
        {"mediaType": "application/vnd.ollama.image.model", "digest": "sha256:77"},
    ]
    manifest.write_text(json.dumps({"layers": layers}))
    (manifest.parent / "broken").write_text("{")
    wrong: list[str] = []
    folders = known_folders(wrong)
    assert len(folders) == 2
    assert list(ollama_models(wrong)) == [ollama / "blobs/sha256-77"]
    models = read_all([*gguf_files(folders, wrong), *ollama_models(wrong)], wrong)
    assert not wrong
    assert {m.file_type for m in models} == {"unknown", "F16", "Q4_0"}
    # Files of less than a megabyte hold no weights for a user; the same file, filled up, does.
    large = studio / "large-Q4_0.gguf"
    large.write_bytes(ladder["Q4_0"].read_bytes() + bytes(2**20))
    shown = json.loads(qdraft_process("models", "scan", "--json").stdout)
    assert [model["path"] for model in shown["models"]] == [str(large)]
    assert shown["unreadable"] == []


def test_pairs_of_one_model_are_ranked(ladder: dict[str, Path], tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(ladder["F16"].read_bytes()[:-100])
    wrong: list[str] = []
    models = read_all([*ladder.values(), broken, ladder["F16"]], wrong)
    assert len(models) == 4
    assert len(wrong) == 1
    assert "cut off" in wrong[0]
    pairs = propose(models)
    names = [(p.target.path.name, p.draft.path.name) for p in pairs]
    assert names[0] == ("tiny-F32.gguf", "tiny-Q4_0.gguf")
    assert set(names) == {
        ("tiny-F32.gguf", "tiny-Q4_0.gguf"),
        ("tiny-F32.gguf", "tiny-F16.gguf"),
        ("tiny-F16.gguf", "tiny-Q4_0.gguf"),
    }
    assert pairs[0].expected > pairs[-1].expected


def test_split_parts_are_one_model(tmp_path: Path) -> None:
    parts = [tiny.part(tmp_path / f"big-{i:05}-of-00003.gguf", i - 1, 3) for i in (1, 2, 3)]
    lone = tiny.part(tmp_path / "lone.gguf", 0, 3)
    for path in (*parts, lone):
        with path.open("rb+") as file:
            file.truncate(2 << 20)  # smaller files are left out
    wrong: list[str] = []
    models = read_all(gguf_files([tmp_path], wrong), wrong)
    assert [m.parts for m in models] == [tuple(parts)]
    assert len(wrong) == 1
    assert "lone.gguf is part 1 of 3 by its header" in wrong[0]


def test_what_cannot_be_read_is_named_and_the_rest_is_there(
    ladder: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A link into a folder that is closed ended the whole search, on Python before 3.14."""
    (tmp_path / "a").mkdir()
    (tmp_path / "a/good.gguf").write_bytes(ladder["F16"].read_bytes())
    (tmp_path / "a/loop.gguf").symlink_to("loop.gguf")
    (tmp_path / "a/gone.gguf").symlink_to("nothing")
    (tmp_path / "a/folder.gguf").mkdir()
    (tmp_path / "a/inside.gguf").symlink_to(tmp_path / "b/m.gguf")
    (tmp_path / "b").mkdir()
    (tmp_path / "b/m.gguf").write_bytes(ladder["F16"].read_bytes())
    close_folder(tmp_path / "b", monkeypatch)
    wrong: list[str] = []
    models = read_all(gguf_files([tmp_path], wrong), wrong)
    assert [facts.path.name for facts in models] == ["good.gguf"]
    denied, loop = "cannot be read: Permission denied", "cannot be read: Too many levels"
    assert [line.split(f"{tmp_path}/")[1][:50] for line in sorted(wrong)] == [
        "a/gone.gguf cannot be read: No such file or directory"[:50],
        f"a/inside.gguf {denied}"[:50],
        f"a/loop.gguf {loop} of symbolic links"[:50],
        f"b {denied}"[:50],
    ]
    wrong = []
    assert list(ollama_models(wrong, tmp_path / "b")) == []
    assert wrong == [f"{tmp_path}/b {denied}"]
    refused = qdraft("models", "scan", str(tmp_path / "b/c"))
    assert one_error(refused, 2) == f"error: {tmp_path}/b/c {denied}"


def test_without_a_home_there_are_fewer_folders(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    home(monkeypatch, tmp_path)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # neither HOME nor passwd
    monkeypatch.setattr(find, "_OLLAMA_SERVICE", tmp_path)
    monkeypatch.setenv("LLAMA_CACHE", str(tmp_path))
    assert known_folders([]) == [tmp_path]
    assert list(ollama_models([])) == []


def test_a_manifest_names_no_files_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "manifests").mkdir()
    (tmp_path / "secret").touch()
    (tmp_path / "blobs").mkdir()
    layer = {"mediaType": "application/vnd.ollama.image.model", "digest": "../secret"}
    (tmp_path / "manifests/m").write_text(json.dumps({"layers": [layer]}))
    (tmp_path / "manifests/n").write_text("[" * 100_000)
    assert list(ollama_models([], tmp_path)) == []


class TestCommands:
    def test_add_show_list_remove(self, ladder: dict[str, Path], tmp_path: Path) -> None:
        files = ("-m", str(ladder["F32"]), "-d", str(ladder["Q4_0"]))
        added = qdraft("models", "add", "mine", *files, "--description", "a tiny one")
        assert added.returncode == 0, added.stderr
        shown = json.loads(qdraft("models", "show", "mine", "--json").stdout)
        jsonschema.validate(shown, schema("models-show"))
        assert (shown["target"], shown["description"]) == (str(ladder["F32"]), "a tiny one")
        again = qdraft("models", "add", "mine", *files)
        assert again.returncode == 2
        assert "--force" in again.stderr
        listed = qdraft("models", "list")
        assert "mine" in listed.stdout
        assert "smollm2" in listed.stdout
        assert max(map(len, listed.stdout.splitlines())) <= 80
        known = json.loads(qdraft("models", "list", "--json").stdout)
        jsonschema.validate(known, schema("models-list"))
        names = [pair["name"] for pair in known["pairs"]]
        assert names == ["smollm2", "gemma3-270m", "mine"]
        assert qdraft("models", "remove", "mine").returncode == 0
        gone = qdraft("models", "remove", "mine")
        assert gone.returncode == 2
        shipped = qdraft("models", "remove", "smollm2")
        assert "shipped pairs stay" in shipped.stderr

    def test_files_that_cannot_pair_are_refused(
        self, ladder: dict[str, Path], source_file: Path, tmp_path: Path
    ) -> None:
        done = qdraft("models", "add", "bad", "-m", str(source_file), "-d", str(ladder["Q4_0"]))
        assert done.returncode == 4
        assert "do not pair" in done.stderr
        assert not (tmp_path / "config" / "models.yaml").exists()

    def test_scan_of_a_folder(self, source_file: Path, ladder: dict[str, Path]) -> None:
        done = qdraft("models", "scan", str(source_file.parent))
        assert done.returncode == 0, done.stderr
        assert "Q4_1" in done.stdout
        assert "qdraft make TARGET.gguf" in done.stdout
        assert max(map(len, done.stdout.splitlines())) <= 80
        folders = (str(source_file.parent), str(ladder["F32"].parent))
        shown = json.loads(qdraft("models", "scan", *folders, "--json").stdout)
        jsonschema.validate(shown, schema("models-scan"))
        assert shown["pairs"]
        assert str(source_file) in [m["path"] for m in shown["models"]]
        assert qdraft("models", "scan", "/nowhere/at/all").returncode == 2


def test_removing_keeps_comments_and_drops_the_default(tmp_path: Path) -> None:
    path = tmp_path / "models.yaml"
    path.write_text(
        "default: b\n# all mine\npairs:\n  a:  # first\n    target: a.gguf\n  b:\n    target: b.gguf\n"
    )
    models_file.remove("b", user_file=path)
    assert path.read_text() == "# all mine\npairs:\n  a:  # first\n    target: a.gguf\n"
    with pytest.raises(UsageError, match="no pair b"):
        models_file.remove("b", user_file=path)


def test_a_file_that_is_all_in_braces_loses_only_what_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "models.yaml"
    path.write_text("{default: a, pairs: {a: {target: x.gguf}, b: {target: y.gguf}}}\n")
    models_file.remove("a", user_file=path)
    assert list(registry.read(path).entries) == ["b"]
    assert registry.read(path).default is None
    models_file.remove("b", user_file=path)
    models_file.add("c", Path("z.gguf"), None, user_file=path)
    assert list(registry.read(path).entries) == ["c"]


def test_what_an_entry_says_is_shown(tmp_path: Path) -> None:
    path = tmp_path / "models.yaml"
    path.write_text(
        "pairs:\n  a:\n    target: t.gguf\n    draft: d.gguf\n    context: 512\n    origin: a friend\n"
        "    template: chat.jinja\n    devices: {gpu-layers: all}\n"
        "    tuned: {n-draft: 3, evidence: 1.2 times}\n"
    )
    shown = json.loads(qdraft("models", "show", "a", "--models-file", str(path), "--json").stdout)
    jsonschema.validate(shown, schema("models-show"))
    assert shown["context"] == 512
    assert shown["origin"] == "a friend"
    assert shown["template"] == str(tmp_path / "chat.jinja")
    assert shown["devices"] == {"gpu-layers": "all"}
    assert shown["tuned"] == {"n-draft": 3, "evidence": "1.2 times"}
    shown = "".join(qdraft("models", "show", "a", "--models-file", str(path)).stdout.split())
    for text in ("afriend", "chat.jinja", "512", "gpu-layersall", "n-draft3(1.2times)"):
        assert text in shown
