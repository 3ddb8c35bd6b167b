"""Fixtures shared by all tests: an isolated user directory, and the real pair where it is installed."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _own_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads or writes the user's own configuration."""
    monkeypatch.setenv("QDRAFT_CONFIG_DIR", str(tmp_path / "config"))
    for name in ("QDRAFT_MODELS", "NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
