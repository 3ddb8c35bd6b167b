"""Every pattern over llama.cpp's log finds what it is for in the lines that it was written for."""

from __future__ import annotations

import pytest

from qdraft.llama import logs
from qdraft.llama.logs import PATTERNS

SAMPLES = [
    (name, line, groups)
    for name, pattern in PATTERNS.items()
    for line, groups in pattern.samples.items()
]


@pytest.mark.parametrize(("name", "line", "groups"), SAMPLES, ids=lambda x: str(x)[:24])
def test_a_pattern_finds_its_lines(name: str, line: str, groups: tuple[str, ...]) -> None:
    match = PATTERNS[name].search(line)
    assert match is not None
    assert match.groups() == groups


@pytest.mark.parametrize("name", PATTERNS)
def test_a_pattern_has_samples_and_takes_no_others(name: str) -> None:
    assert PATTERNS[name].samples
    for other, line, _ in SAMPLES:
        if other != name:
            assert PATTERNS[name].search(line) is None, f"{name} also finds a line of {other}"


def test_memory_that_ran_out_in_any_case() -> None:
    assert logs.OUT_OF_MEMORY.search("CUDA error: Out of Memory")
