"""Files: what is not a GGUF is named, and nothing is ever half written."""

from __future__ import annotations

import errno
import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from qdraft.disk import require_space, show_bytes
from qdraft.errors import DiskSpaceError, ModelFileError
from qdraft.gguf.identify import require_gguf
from qdraft.paths import new_file, sweep


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


PART = r"\..*\.qdraft\.part"


class TestLeftovers:
    """A killed process leaves its parts; the next one that writes there removes them."""

    CODE = (
        "import os, sys; from pathlib import Path; "
        "from qdraft.paths import new_file, scratch_folder; "
        "path = Path(sys.argv[1]); first = new_file(path); first.__enter__(); "
        "other = new_file(path.with_name('x' * 250)); other.__enter__(); "
        "folder = scratch_folder(path.parent); "
        "(folder.__enter__() / 'big').write_bytes(b'half'); "
        "print('ready', flush=True); sys.stdin.read()"
    )

    def test_they_are_swept_when_their_process_is_gone(self, tmp_path: Path) -> None:
        pytest.importorskip("fcntl", reason="needs file locks")
        foreign = tmp_path / ".out.gguf.abc.part"
        foreign.write_bytes(b"of another program")
        out = tmp_path / "out.gguf"
        writer = subprocess.Popen(
            [sys.executable, "-c", self.CODE, str(out)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert writer.stdin
        assert writer.stdout
        with writer.stdin, writer.stdout:
            assert writer.stdout.readline() == b"ready\n"
            with new_file(out) as part:
                part.write_bytes(b"mine")
                left = set(tmp_path.iterdir()) - {foreign, part}
                assert len(left) == 3  # it runs, so its parts stay
                assert all(re.fullmatch(PART, path.name) for path in left)
            writer.kill()
            writer.wait()
        assert left < set(tmp_path.iterdir())
        with new_file(tmp_path / "another") as part:
            part.write_bytes(b"x")
        names = {path.name for path in tmp_path.iterdir()}
        assert names == {foreign.name, "out.gguf", "another"}

    def test_those_in_folders_below(self, tmp_path: Path) -> None:
        pytest.importorskip("fcntl", reason="needs file locks")
        (tmp_path / "ladder").mkdir()
        part = tmp_path / "ladder" / ".a.gguf.01234567.qdraft.part"
        part.write_bytes(b"half")
        sweep(tmp_path)
        assert part.exists()
        sweep(tmp_path, below=True)
        assert not part.exists()


def test_a_file_that_appears_meanwhile_is_not_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_links(*args: object) -> None:
        raise OSError(errno.EPERM, "no hard links here")

    path = tmp_path / "out"
    for _ in range(2):
        with new_file(path, overwrite=False) as part:
            part.write_bytes(b"first")
        with pytest.raises(FileExistsError), new_file(path, overwrite=False) as part:
            part.write_bytes(b"second")
        assert path.read_bytes() == b"first"
        assert list(tmp_path.iterdir()) == [path]
        path.unlink()
        monkeypatch.setattr(os, "link", no_links)


def test_a_full_disk_names_the_file(tmp_path: Path) -> None:
    """Python's error of a write does not say where."""
    path = tmp_path / "out.bin"
    with pytest.raises(OSError, match=r"No space left on device: .*out.bin"), new_file(path):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert list(tmp_path.iterdir()) == []


def test_what_a_write_needs_is_compared_with_what_is_free(tmp_path: Path) -> None:
    folder = tmp_path / "not" / "there" / "yet"
    require_space(folder, 1, "a file", "a hint")
    with pytest.raises(DiskSpaceError) as raised:
        require_space(folder, 10**18, "the file", "write less")
    words = rf"the file needs 1000000000.0 GB in {re.escape(str(folder))}, but [\d.]+ [MG]B is free"
    assert re.fullmatch(words, str(raised.value))
    assert (raised.value.hint, raised.value.exit_code) == ("write less", 1)
    assert (show_bytes(14_200_000_000), show_bytes(600_000_000)) == ("14.2 GB", "600 MB")
