"""What the documents say is true of the code."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jsonschema
import pytest

import qdraft
from qdraft.cli.main import app

TOP = Path(__file__).parent.parent
README = (TOP / "README.md").read_text(encoding="utf-8")


def test_every_package_and_module_is_in_the_file_map() -> None:
    for path in (TOP / "qdraft").iterdir():
        if not path.name.startswith("_"):
            assert re.search(rf"^  {re.escape(path.name)}/?\s", README, re.M), path.name


def test_every_command_is_in_the_table() -> None:
    for command in app.registered_commands:
        assert command.callback is not None
        assert f"| `qdraft {command.name or command.callback.__name__}`" in README


def test_schemas_are_valid() -> None:
    for path in (TOP / "docs/schema").glob("*.json"):
        jsonschema.Draft202012Validator.check_schema(json.loads(path.read_text(encoding="utf-8")))


def test_the_changelog_names_this_version() -> None:
    assert f"## {qdraft.__version__}" in (TOP / "CHANGELOG.md").read_text(encoding="utf-8")


def test_the_pages_of_the_example_study_need_nothing_beside_themselves() -> None:
    pages = sorted((TOP / "examples/study").glob("*.html"))
    assert [page.stem for page in pages] == ["bench", "ladder", "tune"]
    for page in pages:
        text = page.read_text(encoding="utf-8")
        assert "<script" not in text
        assert not re.findall(r'\b(?:src|href)="(?!#)', text)
        assert json.loads(page.with_suffix(".json").read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    "path", sorted(TOP.glob("*.md")) + sorted((TOP / "docs").rglob("*.md")), ids=lambda p: p.name
)
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", path.read_text(encoding="utf-8")):
        assert (path.parent / target).exists(), target
