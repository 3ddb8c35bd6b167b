"""The benchmark's rival that runs in a process of its own, with a fake in place of its library."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
FAKE = """
from types import SimpleNamespace as N
from enum import Enum

__version__ = "1"
llama_flash_attn_type = Enum("F", "LLAMA_FLASH_ATTN_TYPE_ENABLED")
common_speculative_type = Enum("S", "COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE")

def CommonParams():
    draft = N(mparams=N(), cpuparams=N(), cpuparams_batch=N())
    return N(model=N(), cpuparams=N(), cpuparams_batch=N(), speculative=N(draft=draft))

class Server:
    def __init__(self, params):
        self.draft = params.speculative.draft
        print("a line of a log")

    def handle_completions(self, asked):
        assert asked["ignore_eos"] and not asked["cache_prompt"] and asked["top_k"] == 0
        n = asked["n_predict"]
        drafted = {"draft_n": self.draft.n_max, "draft_n_accepted": int(self.draft.probabilistic)}
        return {"timings": {"predicted_n": n, "predicted_ms": 500.0, **drafted}}
"""


def test_answers_are_lines_of_json_and_the_log_is_not_among_them(tmp_path: Path) -> None:
    (tmp_path / "xllamacpp.py").write_text(FAKE)
    files = {"target": "t", "draft": "d", "n_max": 16, "probabilistic": True}
    asked = [
        {**files, "n_ctx": 64, "threads": 2, "repack": False},
        {"prompt": [1, 2], "n_predict": 9, "temperature": 1, "seed": 3},
    ]
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "newest.py")],
        input="\n".join(map(json.dumps, asked)),
        env={"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert [json.loads(line) for line in done.stdout.splitlines()] == [
        {"version": "1"},
        {"n_tokens": 8, "seconds": 0.5, "n_drafted": 16, "n_accepted": 1},
    ]
    assert "a line of a log" in done.stderr


def test_without_a_temperature_there_is_one_way_to_verify(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from newest_rival import draftings

    assert [str(each) for each in draftings((3, 16), 0)] == ["n_max 3", "n_max 16"]
    assert str(draftings((3,), 1)[-1]) == "n_max 3, p/q"
