"""Edits of models.yaml: every other pair and every other line stay as they are, or it is refused."""

from __future__ import annotations

import os
import random
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from qdraft.errors import UsageError
from qdraft.pairs import editing, registry
from qdraft.pairs.lock import locked


def write(folder: Path, text: str, encoding: str = "utf-8") -> Path:
    path = folder / "models.yaml"
    path.write_bytes(text.encode(encoding))
    return path


TEXT_BEFORE = """\
pairs:
  a:
    target: x.gguf
    description: |
      first line
      # second line, of the text
"""


def test_a_text_that_ends_like_a_comment_stays_whole(tmp_path: Path) -> None:
    """Cut at the line with #, the second pair took it as its own comment."""
    path = write(tmp_path, TEXT_BEFORE)
    editing.add("b", Path("/t.gguf"), None, user_file=path)
    assert path.read_text() == f"{TEXT_BEFORE}  b:\n    target: /t.gguf\n"
    editing.remove("b", user_file=path)
    assert path.read_text() == TEXT_BEFORE


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", "pairs:\n  b:\n    target: /t.gguf\n"),
        ("# mine\n", "# mine\npairs:\n  b:\n    target: /t.gguf\n"),
        ("default: a", "default: a\npairs:\n  b:\n    target: /t.gguf\n"),
        ("pairs: # none\ndefault: a\n", "pairs: # none\n  b:\n    target: /t.gguf\ndefault: a\n"),
        ("pairs: {}  # none\n", "pairs:  # none\n  b:\n    target: /t.gguf\n"),
        ("{}\n", "{pairs: {b: {target: /t.gguf}}}\n"),
        (
            "pairs: {a: {target: x},  # ,\n}\n",
            "pairs: {a: {target: x},  # ,\nb: {target: /t.gguf}}\n",
        ),
        (
            "pairs: {a: {target: x}  # ,\n}\n",
            "pairs: {a: {target: x}  # ,\n, b: {target: /t.gguf}}\n",
        ),
        (
            "pairs:\r\n    a: {target: x}\r\n",
            "pairs:\r\n    a: {target: x}\r\n    b:\r\n      target: /t.gguf\r\n",
        ),
        (
            "pairs:\n  a:\n    target: x  # x\n    # of a\n  # end\n...\n",
            "pairs:\n  a:\n    target: x  # x\n    # of a\n  b:\n    target: /t.gguf\n  # end\n...\n",
        ),
        (
            "pairs:\n  b: {target: x}  # b\n  c: {target: y}",
            "pairs:\n  b:  # b\n    target: /t.gguf\n  c: {target: y}",
        ),
        (
            "pairs:\n  'b': # b\n    target: x\n    # in b\n\n  # of c\n  c: {target: y}\n",
            "pairs:\n  b: # b\n    target: /t.gguf\n    # in b\n\n  # of c\n  c: {target: y}\n",
        ),
    ],
)
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_adding_and_replacing(tmp_path: Path, before: str, after: str, encoding: str) -> None:
    path = write(tmp_path, before, encoding)
    editing.add("b", Path("/t.gguf"), None, user_file=path)
    assert path.read_bytes() == (after or before).encode(encoding)


def test_tuning_writes_only_the_tuned_settings(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "pairs:\n  a:  # a\n    target: x # t\n    # how\n    tuned: {verify: block, n-draft: 3} # fast\n"
        "    draft: y\n  b: {target: x, context: 5}\n",
    )
    editing.set_tuned(
        registry.read(path).find("a"), {"n-draft": None, "p-min": 0.5}, user_file=path
    )
    editing.set_tuned(registry.read(path).find("b"), {"evidence": "1.2: #5"}, user_file=path)
    assert path.read_text() == (
        "pairs:\n  a:  # a\n    target: x # t\n    # how\n    tuned: # fast\n      verification: block\n"
        "      p-min: 0.5\n    draft: y\n"
        '  b: {target: x, context: 5, tuned: {evidence: "1.2: #5"}}\n'
    )
    editing.set_tuned(registry.load().find("smollm2"), {"n-draft": 2}, user_file=path)
    own, shipped = registry.read(path).find("smollm2"), registry.load().find("smollm2")
    assert (own.packaged, own.tuned) == (shipped.packaged, {"n-draft": 2})


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("pairs:\n  a: &a\n    target: x\n  b: *a\n", "a"),  # b needs it
        ("pairs:\n  a:\n    target: &t x\n  b:\n    target: *t\n", "a"),
    ],
)
def test_what_others_need_is_not_removed(tmp_path: Path, text: str, name: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(UsageError, match="without changing other lines") as caught:
        editing.remove(name, user_file=path)
    assert caught.value.hint == "edit it by hand"
    assert path.read_text() == text


def test_an_alias_is_no_text_of_its_own(tmp_path: Path) -> None:
    text = "pairs:\n  a: &a\n    target: x\n  b: *a\n  c: {<<: *a, draft: y}\n"
    path = write(tmp_path, text)
    with pytest.raises(UsageError, match="without changing other lines"):
        editing.set_tuned(registry.read(path).find("b"), {"n-draft": 3}, user_file=path)
    editing.set_tuned(registry.read(path).find("c"), {"n-draft": 3}, user_file=path)
    editing.remove("b", user_file=path)
    known = registry.read(path).entries
    assert list(known) == ["a", "c"]
    assert known["c"].target == known["a"].target
    assert known["c"].tuned == {"n-draft": 3}


class Writer:
    """Writes models.yaml in all the ways that a person may."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def pick(self, *choices: str) -> str:
        return self._random.choice(choices)

    def text(self, pad: str) -> str:
        return self.pick(
            f"|\n{pad}first\n{pad}# not a comment\n" + self.pick("", "\n", "\n\n"),
            f">-\n{pad}folded\n{pad}# text\n\n{pad}more\n",
            f"|+\n{pad}keep\n{pad}  # more\n\n\n",
            f'"quoted # no\\n comment\\\n{pad}next"\n',
            f"'single\n\n{pad}two lines'" + self.pick("", " # c") + "\n",
            f"plain text\n{pad}on two lines\n",
            f"\n{pad}below" + self.pick("", " # c") + "\n",
            self.pick("text", "t # comment", '"x: y"', "größe", "a#b", "'it''s'") + "\n",
        )

    def in_braces(self) -> str:
        fields = ["target: t.gguf"]
        fields += self._random.sample(
            ['draft: "d, e.gguf"', "tuned: {n-draft: 3}", "license: 'a # b, c}'"], 2
        )
        gap = self.pick(", ", ",", "\n      , ", ", # c\n      ")
        return "{" + self.pick("", " ") + gap.join(fields) + self.pick("", " ", ",", ", ") + "}"

    def entry(self, indent: int) -> str:
        if self._random.random() < 0.25:
            return " " + self.in_braces() + self.pick("", " # tail") + "\n"
        pad, lines = " " * indent, self.pick("", " # head") + "\n"
        keys = ["target", *self._random.sample(["draft", "description", "tuned", "origin"], 3)]
        self._random.shuffle(keys)
        for key in keys:
            lines += self.pick(*[""] * 9, "\n", f"{pad}# in\n", "# zero\n", f"{pad}   # deep\n")
            if key == "tuned":
                lines += f"{pad}tuned: # t\n{pad}  n-draft: 4 # q\n{pad}  evidence: {self.text(pad + '    ')}"
            else:
                lines += f"{pad}{key}{self.pick('', ' ')}: {self.text(pad + '  ')}"
        return lines

    def file(self) -> str:
        names = self._random.sample(["a", "coder 7b", "'2'", '"q-x"', "größer", "'#h'", "z:q"], 4)
        base = " " * self._random.choice([1, 2, 4])
        default = self.pick("", f"default: {names[0]} # d\n")
        if self._random.random() < 0.2:
            pairs = ", ".join(f"{name}: {self.in_braces()}" for name in names)
            return f"{default}pairs: {{{pairs}{self.pick('', ' ', ',')}}} # end\n"
        lines = "pairs:" + self.pick("", " # p", " &p") + "\n"
        for name in names:
            lines += self.pick("", "\n", f"{base}# before\n", "# zero\n", f"{base}  # deeper\n")
            lines += f"{base}{name}:{self.entry(len(base) + self._random.choice([1, 2, 4]))}"
        lines += self.pick("", "# end\n", "\n\n", f"{base}    # deep\n", "...\n")
        return (default + lines).replace("\n", self.pick("\n", "\n", "\r\n"))


def without(known: registry.Registry, name: str) -> dict[str, registry.Entry]:
    return {key: entry for key, entry in known.entries.items() if key != name}


@pytest.mark.parametrize("seed", range(24))
def test_any_file_keeps_its_other_pairs_and_lines(tmp_path: Path, seed: int) -> None:
    text = Writer(seed).file()
    path = write(tmp_path, text)
    before = registry.read(path)
    name = list(before.entries)[seed % 4]

    editing.add(
        "new", Path("/t é.gguf"), Path("/d#.gguf"), user_file=path, description="two\n# lines"
    )
    added = registry.read(path)
    assert without(added, "new") == before.entries
    assert added.find("new").description == "two\n# lines"
    assert added.default == before.default
    editing.remove("new", user_file=path)
    lines = path.read_bytes().decode().splitlines()
    assert [x for x in lines if x.lstrip().startswith("#")] == [
        x for x in text.splitlines() if x.lstrip().startswith("#")
    ]
    assert registry.read(path) == before

    editing.set_tuned(before.find(name), {"n-draft": 8, "evidence": None}, user_file=path)
    tuned = registry.read(path)
    assert without(tuned, name) == without(before, name)
    assert tuned.find(name).description == before.find(name).description
    assert tuned.find(name).tuned == {"n-draft": 8}
    editing.remove(name, user_file=path)
    assert registry.read(path).entries == without(before, name)


def test_a_name_is_never_a_path(tmp_path: Path) -> None:
    for name in ("../../x", "a/b", "a\\b", "..", "", " ", "a\nb", "\x1b", "x" * 201, "\udcff"):
        with pytest.raises(UsageError, match="the name of a pair"):
            editing.add(name, Path("/t"), None, user_file=tmp_path / "models.yaml")
    with pytest.raises(UsageError, match="the target of the pair a is not Unicode"):
        editing.add("a", Path("/\udcff"), None, user_file=tmp_path / "models.yaml")
    assert list(tmp_path.iterdir()) == []


def test_a_link_and_a_mode_stay(tmp_path: Path) -> None:
    real, link = write(tmp_path, "pairs:\n  a: {target: x}\n"), tmp_path / "link.yaml"
    link.symlink_to(real)
    real.chmod(0o600)
    editing.add("b", Path("/t"), None, user_file=link)
    assert link.is_symlink()
    assert list(registry.read(real).entries) == ["a", "b"]
    assert stat.S_IMODE(real.stat().st_mode) == 0o600
    assert sorted(os.listdir(tmp_path)) == ["link.yaml", "models.yaml"]


def test_processes_that_add_at_once_lose_nothing(tmp_path: Path) -> None:
    """Of 30 pairs that processes added at once, 21 were there. A dead process locks nothing."""
    path = tmp_path / "models.yaml"
    (tmp_path / ".models.yaml.lock").touch()  # of a process that was killed
    code = (
        "import sys; from pathlib import Path; from qdraft.pairs import editing\n"
        "for i in range(8): editing.add(f'{sys.argv[2]}{i}', Path('/t'), None, user_file=Path(sys.argv[1]))"
    )
    children = [subprocess.Popen([sys.executable, "-c", code, path, name]) for name in "abc"]
    assert [child.wait(timeout=60) for child in children] == [0, 0, 0]
    assert len(registry.read(path).entries) == 24
    assert os.listdir(tmp_path) == ["models.yaml"]


def test_whoever_waits_too_long_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, "pairs: {a: {target: x}}\n")
    with locked(path), pytest.raises(TimeoutError, match="too long"), locked(path, 0):
        pass
    monkeypatch.setattr(editing, "locked", lambda path: locked(path, 0))
    with locked(path), pytest.raises(UsageError, match="cannot be written: another process"):
        editing.remove("a", user_file=path)


def test_a_second_pair_of_one_name_is_refused_under_the_lock(tmp_path: Path) -> None:
    path = write(tmp_path, "pairs: {a: {target: x}}\n")
    with pytest.raises(UsageError, match="already exists"):
        editing.add("a", Path("/t"), None, user_file=path, must_be_new=True)


def test_a_file_that_is_none_stays_as_it_is(tmp_path: Path) -> None:
    for text in ("pairs: [", "pears: 1", "a: b\x00", "pairs: {a: {target: 3}}"):
        path = write(tmp_path, text)
        with pytest.raises(UsageError):
            editing.add("b", Path("/t"), None, user_file=path)
        assert path.read_text() == text
