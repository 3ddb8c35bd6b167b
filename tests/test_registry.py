"""models.yaml: the shipped list, the user's own, and what is wrong with a bad one."""

from __future__ import annotations

import hashlib
import os
import re
from importlib.metadata import distribution
from pathlib import Path

import pytest
from closed import close_folder
from invoke import one_error, qdraft

from qdraft.errors import ModelFileError, UsageError
from qdraft.pairs import registry
from qdraft.pairs.packages import materialize, packaged_file
from qdraft.paths import cache_dir, config_dir


def write(folder: Path, text: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "models.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def source(
    path: str = "p/m.gguf",
    package: str = "p",
    sha256: str = "0" * 64,
    target: str = "F16",
    draft: str = "Q2_K",
) -> str:
    """A pair of a package."""
    files = f"[{{package: '{package}', path: '{path}'}}]"
    return f"pairs: {{a: {{target: {target}, draft: {draft}, source: {{sha256: '{sha256}', files: {files}}}}}}}"


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
        ("pairs:\n\ta: {target: t}", "not valid YAML"),
        ("pairs: {a: {target: \0}}", "not valid YAML"),
        ('pairs: {a: {target: "\\U99999999"}}', "not valid YAML"),
        ("pairs: {a: {target: t}}\n---\npairs: {}", "not valid YAML"),
        ("[" * 200_000, "nested too deeply"),
        ("- " * 2000, "nested too deeply"),
        (f"pairs: *{'x' * 9000}", "not valid YAML"),
        ("- a", "must be a mapping"),
        ("pairs: {1: {target: t}, '1': {target: u}}", r"the key 1 is there twice \(line 1\)"),
        ("pairs: {}\npairs: {}", r"the key pairs is there twice \(line 2\)"),
        ("pairs: {a: {target: t, target: u}}", "the key target is there twice"),
        ("pairs: {[a]: {target: t}}", "the key in line 1 must be text"),
        (
            "pairs: {a: {target: t, draft: 2024-01-01}}",
            "must be text or a number, not '2024-01-01'",
        ),
        ("pairs: {a: {target: !!binary aGk=}}", "must be text or a number, not 'aGk='"),
        ("pairs: {a: !mine {target: t}}", "must be a mapping"),
        ("pairs: {a: {target: ''}}", "the key target is empty"),
        ("pairs: {a: {target: t, draft: }}", "draft .* must be text, not empty"),
        ('pairs: {a: {target: "a\\0b"}}', "target .* holds a null character"),
        ('pairs: {a: {target: "\\ud800"}}', "target .* is not Unicode text"),
        (
            f"pairs: {{a: {{target: t, context: {'9' * 5000}}}}}",
            "must be text or a number, not '999",
        ),
        ("pairs: {a: {target: t, context: 1.5}}", "must be a number, not 1.5"),
        ("pairs: {a: {target: t, context: -_}}", "must be text or a number, not '-_'"),
        ("pairs: {a: {target: t, tuned: {n-draft: true}}}", "must be text or a number, not true"),
        ("pairs: {a: {target: t, tuned: {n-draft: [1]}}}", "must be text or a number, not a list"),
        ("pairs: {a: {target: t, <<: 3}}", "line 1 must be a mapping"),
        ("pairs: &p {a: *p}", "unknown key a"),
        ("pairs: {a: &a {target: t, <<: [*a, *a], tuned: *a}}", "unknown key target"),
        # Names and paths that lead out of the cache, or out of a package.
        ("pairs: {../../x: {target: t}}", "the name in line 1 is '../../x'"),
        ("pairs: {'..': {target: t}}", "the name in line 1"),
        ("pairs: {'a\\b': {target: t}}", "the name in line 1"),
        ("pairs: {'': {target: t}}", "the name in line 1"),
        (f"pairs: {{{'x' * 300}: {{target: t}}}}", "the name in line 1 is 'xxx"),
        (source(path="/etc/hostname"), "path .* must be inside the package"),
        (source(path="a/../../b"), "path .* must be inside the package"),
        (source(path="C:/b"), "path .* must be inside the package"),
        (source(path="a\\b"), "path .* must be inside the package"),
        (source(path=""), "path .* must be inside the package"),
        (source(package="../p"), "package .* must be the name of a package"),
        (source(sha256="../x"), "sha256 .* must be 64 hexadecimal digits"),
        (source(target="../F16"), "target .* must be a file type"),
        (source(draft="a/b"), "draft .* must be a file type"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        registry.load(write(tmp_path, text))
    assert len(str(caught.value)) < 600


def test_aliases_take_no_time(tmp_path: Path) -> None:
    """Ten to the power of 30 values, if each alias were followed; once it took gigabytes."""
    levels = ["a0: &a0 [x]"]
    levels += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 30)]
    nested = "{" + ", ".join(levels) + "}"
    for text in (
        f"pairs: {{a: {{target: t, description: {nested}}}}}",
        f"pairs: {{a: {{target: t, tuned: {{n-draft: {nested}}}}}}}",
        f"{{? {nested} : x}}",
    ):
        with pytest.raises(UsageError) as caught:
            registry.load(write(tmp_path, text))
        assert len(str(caught.value)) < 400
    merges = "".join(f"a{i}: &a{i} {{<<: [*a{i - 1}, *a{i - 1}]}}\n" for i in range(1, 60))
    with pytest.raises(UsageError, match="unknown key a0"):
        registry.load(write(tmp_path, f"a0: &a0 {{target: t}}\n{merges}pairs: {{a: {{<<: *a59}}}}"))


def test_anchors_and_merged_keys(tmp_path: Path) -> None:
    known = registry.load(
        write(
            tmp_path,
            "pairs:\n"
            "  a: &a {target: /t, tuned: &t {n-draft: 3, p-min: .5}, context: 0x10}\n"
            "  b: {<<: *a, target: /u, context: 1_000}\n"
            "  c: {target: /v, tuned: {<<: [{n-draft: 4}, *t], drafter: model}}\n"
            "  d: &a {target: /w}\n",  # an anchor may be set anew
        )
    ).entries
    assert known["a"].context == 16
    assert (known["b"].target, known["b"].tuned, known["b"].context) == (
        "/u",
        {"n-draft": 3, "p-min": 0.5},
        1000,
    )
    assert known["c"].tuned == {"n-draft": 4, "p-min": 0.5, "drafter": "model"}


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32"])
def test_any_encoding_with_a_mark(tmp_path: Path, encoding: str) -> None:
    path = tmp_path / "models.yaml"
    path.write_bytes("pairs: {größer: {target: /t}}\r\n".encode(encoding))
    assert registry.load(path).find("größer").target == "/t"


def test_what_is_no_list_of_pairs_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(UsageError, match="more than 262144 bytes"):
        registry.load(path)
    path.unlink()
    path.write_bytes(b"pairs: \xe9")
    with pytest.raises(UsageError, match="not UTF-8 text"):
        registry.load(path)
    with pytest.raises(UsageError, match="cannot be read"):
        registry.load(tmp_path)


def test_a_closed_draft_of_another_pair_is_none_of_our_business(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On Python before 3.14, is_file of pathlib fails in a closed folder, and so did every run."""
    target, other = tmp_path / "t.gguf", tmp_path / "u.gguf"
    target.touch(), other.touch()
    secret = tmp_path / "secret"
    write(
        tmp_path / "config",
        f"pairs: {{a: {{target: {target}, draft: {secret}/d.gguf}}, b: {{target: {secret}/t.gguf, draft: {target}}},"
        f" c: {{target: {other}, draft: {target}}}}}",
    )
    secret.mkdir()
    close_folder(secret, monkeypatch)
    assert [entry.name for entry in registry.find_entries(other)] == ["c"]
    assert not caplog.records
    assert registry.find_entries(target) == []
    assert registry.find_entries(target) == []
    assert [record.message for record in caplog.records] == [
        f"{secret}/d.gguf cannot be read, so qdraft leaves out the pair a: Permission denied"
    ]
    known = registry.load().entries
    assert registry.find_closed(known["a"]) == [f"{secret}/d.gguf"]
    assert registry.find_missing(known["a"]) == []
    assert "closed to you: d.gguf" in qdraft("models", "list", COLUMNS="200").stdout


def test_a_closed_file_of_ones_own_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """HOME of another user, as in a container: what was not asked for does not stop a run."""
    path = write(tmp_path / "config", "pairs: {mine: {target: t}}")
    close_folder(path.parent, monkeypatch)
    assert list(registry.load().entries) == ["smollm2", "gemma3-270m"]
    assert "leaves your own pairs out: Permission denied" in caplog.text


def test_nobody_has_no_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths of users who are not here stay as they are, and lead nowhere."""
    path = write(
        tmp_path, "pairs: {a: {target: ~nosuchuser/t.gguf, draft: ~/d.gguf, template: ~x/y}}"
    )
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # neither HOME nor passwd
    entry = registry.load(path).find("a")
    assert entry.target == str(tmp_path / "~nosuchuser/t.gguf")
    assert registry.find_missing(entry) == [entry.target, entry.draft]
    with pytest.raises(UsageError, match=r"the template .* cannot be read"):
        registry.read_template(entry)
    monkeypatch.delenv("QDRAFT_CONFIG_DIR")
    monkeypatch.delenv("QDRAFT_CACHE_DIR", raising=False)
    for name in ("XDG_CONFIG_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert registry.load().find().name == "smollm2"
    for directory, variable in ((config_dir, "QDRAFT_CONFIG_DIR"), (cache_dir, "QDRAFT_CACHE_DIR")):
        with pytest.raises(OSError, match=re.escape(f"unknown and {variable} is not set")):
            directory()
    assert one_error(qdraft("models", "remove", "x"), 2) == (
        "error: your home directory is unknown and QDRAFT_CONFIG_DIR is not set"
    )


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
