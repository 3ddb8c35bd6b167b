"""models.yaml: the shipped list, the user's own, and what is wrong with a bad one."""

from __future__ import annotations

import hashlib
from importlib.metadata import distribution
from pathlib import Path

import pytest

from qdraft.errors import ModelFileError, UsageError
from qdraft.pairs import registry
from qdraft.pairs.packages import materialize, packaged_file


def write(folder: Path, text: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "models.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_shipped_pairs() -> None:
    known = registry.load()
    assert known.find().name == "smollm2"
    assert known.find("gemma3-270m").target == "F16"
    packaged = known.find("gemma3-270m").packaged
    assert packaged is not None
    assert len(packaged.files) == 4


def test_the_shipped_file_is_the_one_at_the_top() -> None:
    top = Path(__file__).parent.parent / "models.yaml"
    assert registry.shipped_path().read_bytes() == top.read_bytes()


def test_unknown_pair_names_the_known_ones() -> None:
    with pytest.raises(UsageError, match="nothing") as caught:
        registry.load().find("nothing")
    assert caught.value.hint == "known pairs: gemma3-270m, smollm2"


def test_flag_then_environment_then_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "config", "pairs: {mine: {target: home.gguf}}")
    assert registry.load().find("mine").target == str(tmp_path / "config" / "home.gguf")
    by_env = write(tmp_path / "env", "pairs: {mine: {target: env.gguf}}\ndefault: mine")
    monkeypatch.setenv("QDRAFT_MODELS", str(by_env))
    assert registry.load().find().target == str(tmp_path / "env" / "env.gguf")
    flag = write(tmp_path / "flag", "pairs: {mine: {target: /abs/t.gguf, draft: d.gguf}}")
    entry = registry.load(flag).find("mine")
    assert (entry.target, entry.draft) == (
        str(Path("/abs/t.gguf")),
        str(tmp_path / "flag" / "d.gguf"),
    )
    assert registry.load(flag).find().name == "smollm2"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("pears: {}", "unknown key pears"),
        ("pairs: {a: {target: t, drft: d}}", "pair a: unknown key drft"),
        ("pairs: {a: {draft: d}}", "pair a: the key target is missing"),
        ("pairs: {a: {target: 3}}", "target .* must be text"),
        ("pairs: {a: }", "must be a mapping of keys to values"),
        ("pairs: [a]", "pairs must map"),
        ("pairs: {a: {target: F16, source: {files: []}}}", "key sha256 is missing"),
        ("pairs: {a: {target: F16, source: {files: [], sha256: x}}}", "files must be a list"),
        (
            "pairs: {a: {target: F16, source: {files: [{package: p}], sha256: x}}}",
            "key path is missing",
        ),
        ("a: [", "not valid YAML"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        registry.load(write(tmp_path, text))


def test_a_file_that_was_asked_for_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        registry.load(tmp_path / "none.yaml")


def test_an_entry_is_found_in_the_file_that_was_asked_for(tmp_path: Path) -> None:
    """Also by its target: only the default models.yaml was searched."""
    for name in ("target.gguf", "draft.gguf"):
        (tmp_path / name).touch()
    own = write(tmp_path, "pairs: {mine: {target: target.gguf, draft: draft.gguf}}")
    entry = registry.find_entry(tmp_path / "target.gguf", None, None, own)
    assert entry
    assert entry.name == "mine"
    assert registry.find_entry(tmp_path / "target.gguf", None, None) is None


def entry(package: str, path: str, sha256: str) -> registry.Entry:
    packaged = registry.PackagedModel((registry.PackagedFile(package, path),), sha256, "demo")
    return registry.Entry("it", "F16", None, packaged)


def test_missing_package_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QDRAFT_CACHE_DIR", str(tmp_path))
    with pytest.raises(UsageError, match="no-such-package") as caught:
        materialize(entry("no-such-package", "x", "y"), threads=1)
    assert caught.value.hint is not None
    assert "pip install 'qdraft[demo]'" in caught.value.hint


def test_content_must_match_its_checksum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QDRAFT_CACHE_DIR", str(tmp_path))
    with pytest.raises(ModelFileError, match="SHA-256"):
        materialize(entry("numpy", "numpy/__init__.py", "0" * 64), threads=1)
    with pytest.raises(ModelFileError, match="lacks"):
        materialize(entry("numpy", "numpy/none.py", "0" * 64), threads=1)
    assert not list(tmp_path.rglob("*.gguf*"))


def test_parts_are_joined_and_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for gemma3-270m, with two small files of an installed package as parts."""
    monkeypatch.setenv("QDRAFT_CACHE_DIR", str(tmp_path))
    parts = [registry.PackagedFile("numpy", p) for p in ("numpy/__init__.py", "numpy/version.py")]
    content = b"".join(
        Path(str(distribution("numpy").locate_file(p.path))).read_bytes() for p in parts
    )
    right = registry.PackagedModel(tuple(parts), hashlib.sha256(content).hexdigest(), "")
    joined = packaged_file(registry.Entry("it", "F16", None, right), right, tmp_path)
    assert joined.read_bytes() == content
    swapped = registry.PackagedModel(tuple(reversed(parts)), right.sha256, "")
    with pytest.raises(ModelFileError, match="SHA-256"):
        packaged_file(registry.Entry("it", "F16", None, swapped), swapped, tmp_path / "other")
    assert list((tmp_path / "other").iterdir()) == []


def test_files_that_are_missing(tmp_path: Path) -> None:
    there, gone = tmp_path / "there.gguf", str(tmp_path / "gone.gguf")
    there.touch()
    assert registry.find_missing(registry.Entry("it", str(there), gone, None)) == [gone]
    assert registry.find_missing(registry.Entry("it", str(there), None, None)) == []
    assert registry.find_missing(registry.load().find("smollm2")) == []
