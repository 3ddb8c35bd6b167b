"""Files that are not GGUF files, recognized by their first bytes."""

from __future__ import annotations

import re
import stat
from pathlib import Path

from qdraft.errors import ModelFileError

_KNOWN = (
    (b"version https://git-lfs", "a Git LFS pointer, not the model", "fetch it: git lfs pull"),
    (b"PK\x03\x04", "a zip archive", "convert it to GGUF, if it is a PyTorch checkpoint"),
    (b"\x80\x02", "a Python pickle", "convert it to GGUF with llama.cpp's convert_hf_to_gguf.py"),
    (b"lmgg", "a GGML file from before 2023-08", "download the model as GGUF"),
    (b"fmgg", "a GGML file from before 2023-08", "download the model as GGUF"),
    (b"tjgg", "a GGML file from before 2023-08", "download the model as GGUF"),
    (b"<!DOCTYPE", "a web page", "download it again: this is an error page or a login page"),
    (b"<!doctype", "a web page", "download it again: this is an error page or a login page"),
    (b"<html", "a web page", "download it again: this is an error page or a login page"),
)


# OWNER/NAME of the Hugging Face hub, with a file type or without.
_REPOSITORY = re.compile(r"([\w.-]+/[\w.-]+)(:[\w.-]+)?")


def require_gguf(path: Path) -> None:
    """Raise ModelFileError that says what the file is, unless it starts like a GGUF."""
    head = _read_start(path)
    if head.startswith(b"GGUF"):
        if head[4:6] == b"\0\0":  # the low half of the version, in little-endian files
            raise ModelFileError(f"{path} is a big-endian GGUF", hint="convert it to little-endian")
        return
    if not head:
        raise ModelFileError(f"{path} is empty")
    for magic, what, hint in _KNOWN:
        if head.startswith(magic):
            raise ModelFileError(f"{path} is {what}", hint=hint)
    if head[8:10] == b'{"':
        raise ModelFileError(f"{path} is a safetensors file", hint="convert it to GGUF")
    raise ModelFileError(f"{path} is not a GGUF file: it starts with {head[:8]!r}")


def _hint_at_hub(path: Path) -> str | None:
    """Return a hint for a missing file that is called like a repository, else None."""
    match = _REPOSITORY.fullmatch(str(path))
    if not match or path.suffix == ".gguf" or (not match[2] and path.parent.exists()):
        return None
    repo = f"{match[1]}{match[2] or ':Q4_K_M'}"
    return (
        f"for a model of the Hugging Face hub: qdraft run -hf {repo}, or qdraft models pull {repo}"
    )


def _read_start(path: Path) -> bytes:
    """Return the first bytes of a file. Raises ModelFileError if it is none or cannot be read."""
    try:
        mode = path.stat().st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):  # reading a pipe could wait for ever
            raise ModelFileError(f"{path} is a pipe or a device, not a file")
        with path.open("rb") as file:
            return file.read(64)
    except FileNotFoundError:
        raise ModelFileError(f"{path} does not exist", hint=_hint_at_hub(path)) from None
    except IsADirectoryError:
        raise ModelFileError(f"{path} is a folder", hint="name the GGUF file in it") from None
    except OSError as error:
        raise ModelFileError(f"{path} cannot be read: {error.strerror}") from error
