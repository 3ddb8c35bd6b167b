"""The header of a GGUF file: metadata and tensor table, read without trusting any of its numbers.

The gguf package maps the file and believes its counts. This module checks every length, count and
offset against the size of the file and against fixed limits before it reads or allocates anything.
It reads no weights, and holds a few MiB of the file at a time.
"""

from __future__ import annotations

import hashlib
import math
import os
import struct
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeAlias

from qdraft.errors import ModelFileError
from qdraft.gguf.identify import require_gguf

_NUMBERS = zip((*range(8), 10, 11, 12), "BbHhIif?Qqd", strict=True)  # the value types of gguf.h
_FORMATS = {kind: struct.Struct(f"<{form}") for kind, form in _NUMBERS}
_STRING, _ARRAY = 8, 9
# Of a longer array, qdraft keeps only the length and a digest. llama.cpp takes 512 layers at most,
# and each may have a number of its own.
_SHORT = 512
_LONG_TEXT = 1 << 22  # bytes; of a longer text, qdraft keeps only the length and a digest
# Limits well above every known model: a vocabulary has up to 300,000 tokens and twice the merges.
_MAX_KEYS, _MAX_TENSORS, _MAX_TEXTS = 1 << 14, 1 << 18, 1 << 21
_MAX_NAME, _MAX_BYTES = 1 << 16, 1 << 28
_MAX_DIMS = 4
TOKENS, TOKEN_TYPES = "tokenizer.ggml.tokens", "tokenizer.ggml.token_type"


@dataclass(frozen=True, slots=True)
class LongArray:
    """An array or a text that is too long to keep: its length and the SHA-256 of its bytes.

    ``items`` are its elements if ``read_header`` was asked to keep them. ``repeated`` are the
    numbers of two tokens with the same text, as llama.cpp reads them, if this is a vocabulary that
    has such tokens.
    """

    n: int
    sha256: str
    items: tuple[bytes | float, ...] = ()
    repeated: tuple[int, int] | None = None


_Texts: TypeAlias = "list[bytes]"
Value: TypeAlias = "int | float | bool | str | tuple[Value, ...] | LongArray"


@dataclass(frozen=True, slots=True)
class Tensor:
    """One entry of the tensor table. ``n_bytes`` is None for an unknown type."""

    name: str
    shape: tuple[int, ...]
    type: str
    n_bytes: int | None
    offset: int

    @property
    def n_elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Header:
    """What a file holds before its weights, which begin at byte ``data_start``.

    ``sha256`` is that of all bytes of the header.
    """

    path: Path
    n_bytes: int
    version: int
    metadata: Mapping[str, Value]
    tensors: tuple[Tensor, ...]
    data_start: int
    sha256: str

    def text(self, key: str) -> str:
        """Return a string of the metadata; empty if it is missing or not a string."""
        value = self.metadata.get(key)
        return value if isinstance(value, str) else ""

    def number(self, key: str) -> int | None:
        """Return a count of the metadata; the largest one if there is one for each layer.

        Layers without attention have 0 heads. None if it is missing, not a whole number, or
        negative.
        """
        value = self.metadata.get(key)
        if isinstance(value, tuple) and all(isinstance(n, int) for n in value):
            value = max(value, default=-1)  # type: ignore[type-var]
        is_count = isinstance(value, int) and not isinstance(value, bool) and value >= 0
        return value if is_count else None  # type: ignore[return-value]


def read_header(path: Path, *, keep: Collection[str] = ()) -> Header:
    """Read the header of one file. Raises ModelFileError if anything is wrong with it.

    ``keep`` are keys of long arrays whose elements to keep. The size of the header bounds time,
    and fixed limits bound memory, whatever numbers it claims.
    """
    require_gguf(path)
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            return _read(path, _Reader(file, size), size, keep)
    except _Broken as broken:
        raise ModelFileError(
            f"{path} is a damaged GGUF: {broken}", hint="download it again, or make it again"
        ) from None
    except OSError as error:
        raise ModelFileError(f"{path} cannot be read: {error.strerror}") from error


class _Broken(Exception):
    """The file holds something impossible."""


class _Reader:
    """Reads values from the start of a file; raises ``_Broken`` if it ends too early.

    It holds what it has read ahead, and drops what it has passed.
    """

    _STEP = 1 << 20

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file = file
        self._left = size  # bytes of the file after those in ``_data``
        self._size = size
        self._data = bytearray()
        self._at = 0  # where in ``_data`` the next value begins
        self._passed = hashlib.sha256()  # of what was dropped
        self._n_passed = 0

    @property
    def place(self) -> int:
        """The byte of the file where the next value begins."""
        return self._n_passed + self._at

    def need(self, n: int) -> None:
        """Read on until there are ``n`` more bytes; the next value then begins at index 0."""
        if n > self._size - self.place:
            raise _Broken(f"it ends at byte {self._size}, within its header")
        if n <= len(self._data) - self._at:
            return
        self._passed.update(self._data[: self._at])
        self._n_passed += self._at
        del self._data[: self._at]
        self._at = 0
        while len(self._data) < n:
            more = self._file.read(max(self._STEP, n - len(self._data)))
            if not more:
                raise _Broken("it became shorter while qdraft read it")
            self._data += more

    def sha256(self) -> str:
        """Return the SHA-256 of all bytes before the next value."""
        digest = self._passed.copy()
        digest.update(self._data[: self._at])
        return digest.hexdigest()

    def bytes(self, n: int) -> bytes:
        self.need(n)
        self._at += n
        return bytes(self._data[self._at - n : self._at])

    def digest(self, n: int) -> str:
        """Pass ``n`` bytes and return their SHA-256."""
        digest = hashlib.sha256()
        for start in range(0, n, self._STEP):
            digest.update(self.bytes(min(self._STEP, n - start)))
        return digest.hexdigest()

    def value(self, kind: int) -> int | float | bool:
        form = _FORMATS[kind]
        self.need(form.size)
        value: int | float | bool = form.unpack_from(self._data, self._at)[0]
        self._at += form.size
        return value

    def count(self, what: str, least_bytes: int, most: int) -> int:
        """Read how many things follow, each of which takes at least ``least_bytes``."""
        n = int(self.value(10))
        if n * least_bytes > self._size - self.place:
            raise _Broken(f"it claims {n} {what}, which is more than it has room for")
        if n > most:
            raise _Broken(f"it has {n} {what}, but qdraft reads at most {most}")
        return n

    def name(self) -> str:
        return self.bytes(self.count("bytes of a name", 1, _MAX_NAME)).decode("utf-8", "replace")

    def text(self) -> str | LongArray:
        n = self.count("bytes of text", 1, _MAX_BYTES)
        if n > _LONG_TEXT:
            return LongArray(n, self.digest(n))
        return self.bytes(n).decode("utf-8", "replace")

    def texts(self, n: int, kept: _Texts | None) -> str:
        """Pass ``n`` texts, hundreds of thousands in a vocabulary, and return their SHA-256.

        They are added to ``kept``.
        """
        digest = hashlib.sha256()
        unpack = _FORMATS[10].unpack_from
        data, at = self._data, self._at
        start, end = at, len(data)
        for _ in range(n):
            length = unpack(data, at)[0] if at <= end - 8 else 0
            if at + 8 + length > end:  # the text is not all in ``data``
                digest.update(data[start:at])
                self._at = at
                self.need(8)
                (length,) = unpack(data, self._at)
                self.need(8 + min(length, _MAX_NAME))
                at = start = self._at
                end = len(data)
            if length > _MAX_NAME:
                raise _Broken(f"it has a text of {length} bytes in an array")
            if kept is not None:
                kept.append(bytes(data[at + 8 : at + 8 + length]))
            at += 8 + length
        digest.update(data[start:at])
        self._at = at
        return digest.hexdigest()


def _read(path: Path, reader: _Reader, size: int, keep: Collection[str]) -> Header:
    reader.bytes(4)
    version = int(reader.value(4))
    if version not in (2, 3):
        raise ModelFileError(
            f"{path} is a GGUF of version {version}, but qdraft reads versions 2 and 3"
        )
    n_tensors = reader.count("tensors", 24, _MAX_TENSORS)
    n_keys = reader.count("keys", 13, _MAX_KEYS)
    metadata: dict[str, Value] = {}
    for _ in range(n_keys):
        key = reader.name()
        if key in metadata:
            raise _Broken(f"it has the key {key} twice")
        kind = int(reader.value(4))
        metadata[key] = _array(reader, key, keep) if kind == _ARRAY else _value(reader, kind)
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 8 or alignment & (alignment - 1):
        raise _Broken(f"its alignment is {alignment!r:.20}")
    tensors = _tensors(reader, n_tensors, alignment)
    data_start = -(-reader.place // alignment) * alignment
    for tensor in tensors:
        end = data_start + tensor.offset + (tensor.n_bytes or 0)
        if end > size:
            raise ModelFileError(
                f"{path} is cut off: {tensor.name} ends at byte {end}, the file at {size}",
                hint="download it again: the download did not finish",
            )
    return Header(path, size, version, metadata, tensors, data_start, reader.sha256())


def _value(reader: _Reader, kind: int) -> Value:
    if kind in _FORMATS:
        return reader.value(kind)
    if kind == _STRING:
        return reader.text()
    raise _Broken(f"it has a value of the unknown type {kind}")


def _array(reader: _Reader, key: str, keep: Collection[str]) -> Value:
    kind = int(reader.value(4))
    if kind in _FORMATS:
        size = _FORMATS[kind].size
        most = _MAX_TEXTS if key in keep else _MAX_BYTES // size
        n = reader.count("numbers", size, most)
        if key in keep:
            return LongArray(n, "", tuple(reader.value(kind) for _ in range(n)))
        if n <= _SHORT:
            return tuple(reader.value(kind) for _ in range(n))
        return LongArray(n, reader.digest(n * size))
    if kind != _STRING:
        raise _Broken(f"it has an array of the unknown type {kind}")
    n = reader.count("texts", 8, _MAX_TEXTS)
    if key == TOKENS:
        texts: list[bytes] = []
        digest = reader.texts(n, texts)
        kept = tuple(texts) if key in keep else ()
        return LongArray(n, digest, kept, _repeated(texts))
    if n <= _SHORT:
        return tuple(reader.name() for _ in range(n))
    return LongArray(n, reader.texts(n, None))


def _repeated(texts: list[bytes]) -> tuple[int, int] | None:
    """Return the numbers of the first two tokens that llama.cpp reads as the same text.

    It reads texts up to a zero byte, and gives tokens without a text one of their own.
    """
    if len(set(texts)) == len(texts) and all(texts) and b"\0" not in b"".join(texts):
        return None
    ids: dict[bytes, int] = {}
    for i, text in enumerate(texts):
        shown = text.split(b"\0", 1)[0] or b"[EMPTY_%d]" % i
        first = ids.setdefault(shown, i)
        if first != i:
            return first, i
    return None


def _tensors(reader: _Reader, n: int, alignment: int) -> tuple[Tensor, ...]:
    tensors: dict[str, Tensor] = {}
    for _ in range(n):
        tensor = _tensor(reader)
        if tensor.name in tensors:
            raise _Broken(f"it has the tensor {tensor.name} twice")
        if tensor.offset % alignment:
            raise _Broken(f"the tensor {tensor.name} is not aligned")
        tensors[tensor.name] = tensor
    return tuple(tensors.values())


def _tensor(reader: _Reader) -> Tensor:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    name = reader.name()
    n_dims = int(reader.value(4))
    if n_dims > _MAX_DIMS:
        raise _Broken(f"the tensor {name} has {n_dims} dimensions")
    shape = tuple(int(reader.value(10)) for _ in range(n_dims)) or (1,)
    if not 0 < math.prod(shape) < 1 << 63:
        raise _Broken(f"the tensor {name} has the shape {shape}")
    kind, offset = int(reader.value(4)), int(reader.value(10))
    try:
        known = GGMLQuantizationType(kind)
    except ValueError:
        return Tensor(name, shape, f"type {kind}", None, offset)
    block, n_bytes = GGML_QUANT_SIZES[known]
    if shape[0] % block:
        raise _Broken(f"the tensor {name} has rows of {shape[0]}, not whole blocks of {known.name}")
    return Tensor(name, shape, known.name, math.prod(shape) // block * n_bytes, offset)
