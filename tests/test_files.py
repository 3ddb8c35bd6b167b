"""Files: what is not a GGUF is named, and nothing is ever half written."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from qdraft.errors import ModelFileError
from qdraft.gguf.identify import require_gguf
from qdraft.paths import new_file


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"version https://git-lfs.github.com/spec/v1\noid", "Git LFS pointer"),
        (b"PK\x03\x04rest", "zip archive"),
        (b"<!DOCTYPE html><html>", "web page"),
        (b"\x80\x02}q", "pickle"),
        (b'\x40\x00\x00\x00\x00\x00\x00\x00{"a":{}}', "safetensors"),
        (b"GGUF\x00\x00\x00\x03", "big-endian"),
        (b"tjgg\x03\x00\x00\x00", "before 2023-08"),
        (b"hello world", "not a GGUF file: it starts with b'hello wo'"),
    ],
)
def test_other_files_are_named(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelFileError, match=message):
        require_gguf(path)


def test_missing_and_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="does not exist"):
        require_gguf(tmp_path / "none.gguf")
    with pytest.raises(ModelFileError, match="folder"):
        require_gguf(tmp_path)


def test_new_file_appears_only_when_complete(tmp_path: Path) -> None:
    path = tmp_path / "sub" / "out.bin"
    with new_file(path) as part:
        part.write_bytes(b"new")
        assert not path.exists()
    assert path.read_bytes() == b"new"
    assert list(path.parent.iterdir()) == [path]


def test_a_replaced_file_hands_down_its_mode_and_a_link_stays_one(tmp_path: Path) -> None:
    real, link = tmp_path / "real", tmp_path / "link"
    link.symlink_to(real)
    for mode in (0o600, 0o640, 0o444):
        real.unlink(missing_ok=True)
        real.write_bytes(b"old")
        real.chmod(mode)
        with new_file(link) as part:
            part.write_bytes(b"new")
        assert link.is_symlink()
        assert real.read_bytes() == b"new"
        assert stat.S_IMODE(real.stat().st_mode) == mode


def test_a_new_file_never_changes_the_umask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The umask is one for all threads: others' files would be open to everyone for a moment."""
    before = os.umask(0o027)
    try:
        monkeypatch.setattr(os, "umask", None)
        with new_file(tmp_path / "out") as part:
            part.write_bytes(b"x")
    finally:
        monkeypatch.undo()
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == 0o640


def test_a_device_or_folder_is_never_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path):
        with pytest.raises(OSError, match="not a file that can be replaced"), new_file(path):
            pass
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_failed_write_leaves_the_old_file(tmp_path: Path, error: BaseException) -> None:
    path = tmp_path / "out.bin"
    path.write_bytes(b"old")

    def fail() -> None:
        with new_file(path) as part:
            part.write_bytes(b"half")
            raise error

    with pytest.raises(type(error)):
        fail()
    assert path.read_bytes() == b"old"
    assert list(tmp_path.glob("*.part")) == []
