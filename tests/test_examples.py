"""Every example runs, and the example study is as the commands print it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
from invoke import schema

FOLDER = Path(__file__).parent.parent / "examples"
EXAMPLES = sorted(FOLDER.glob("*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.name)
def test_example(path: Path, request: pytest.FixtureRequest) -> None:
    if "open_pair" in path.read_text(encoding="utf-8"):
        request.getfixturevalue("smollm2")
    result = subprocess.run(
        [sys.executable, str(path)], capture_output=True, text=True, timeout=300, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip()
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("study", "command"), [("bench", "bench"), ("ladder", "compare"), ("tune", "tune")]
)
def test_the_example_study_matches_the_schemas(study: str, command: str) -> None:
    data = json.loads((FOLDER / "study" / f"{study}.json").read_text(encoding="utf-8"))
    jsonschema.validate(data, schema(command))
