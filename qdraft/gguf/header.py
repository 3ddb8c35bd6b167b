"""The header of a GGUF file: metadata and tensor table, read without trusting any of its numbers.

The gguf package maps the file and believes its counts. This module checks every length, count and
offset against the size of the file before it reads or allocates anything. It reads no weights.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeAlias

from qdraft.errors import ModelFileError
from qdraft.gguf.identify import require_gguf

_NUMBERS = zip((*range(8), 10, 11, 12), "BbHhIif?Qqd", strict=True)  # the value types of gguf.h
_FORMATS = {kind: struct.Struct(f"<{form}") for kind, form in _NUMBERS}
_STRING, _ARRAY = 8, 9
_SHORT = 64  # of a longer array, qdraft keeps only the length and a digest
_MAX_NAME, _MAX_TEXT = 1 << 16, 1 << 26
_MAX_DIMS = 4


@dataclass(frozen=True, slots=True)
class LongArray:
    """An array that is too long to keep: its number of elements and the SHA-256 of its bytes."""

    n: int
    sha256: str


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
    """What a file holds before its weights, which begin at byte ``data_start``."""

    path: Path
    n_bytes: int
    version: int
    metadata: Mapping[str, Value]
    tensors: tuple[Tensor, ...]
    data_start: int

    def text(self, key: str) -> str:
        """Return a string of the metadata; empty if it is missing or not a string."""
        value = self.metadata.get(key)
        return value if isinstance(value, str) else ""

    def number(self, key: str) -> int | None:
        """Return a whole number of the metadata; the first one if there is one for each layer."""
        value = self.metadata.get(key)
        if isinstance(value, tuple) and value:
            value = value[0]
        return value if isinstance(value, int) and not isinstance(value, bool) else None


def read_header(path: Path, *, n_texts: int | None = None) -> Header:
    """Read the header of one file. Raises ModelFileError if anything is wrong with it.

    ``n_texts`` limits the digest of a long array of texts to its first ones. The size of the header
    bounds time and memory, whatever numbers it claims.
    """
    require_gguf(path)
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            return _read(path, _Reader(file, size, n_texts), size)
    except _Broken as broken:
        raise ModelFileError(
            f"{path} is a damaged GGUF: {broken}", hint="download it again, or make it again"
        ) from None


class _Broken(Exception):
    """The file holds something impossible."""


class _Reader:
    """Reads values from the start of a file; raises ``_Broken`` if it ends too early."""

    _STEP = 1 << 20

    def __init__(self, file: BinaryIO, size: int, n_texts: int | None = None) -> None:
        self._file = file
        self._n_texts = n_texts
        self._size = size
        self._data = bytearray()  # the start of the file, as far as it was read
        self.place = 0

    def need(self, n: int) -> None:
        """Read on until there are ``n`` more bytes after ``place``."""
        if n > self._size - self.place:
            raise _Broken(f"it ends at byte {self._size}, within its header")
        while len(self._data) < self.place + n:
            more = self._file.read(max(self._STEP, self.place + n - len(self._data)))
            if not more:
                raise _Broken("it became shorter while qdraft read it")
            self._data += more

    def bytes(self, n: int) -> bytes:
        self.need(n)
        self.place += n
        return bytes(self._data[self.place - n : self.place])

    def value(self, kind: int) -> int | float | bool:
        form = _FORMATS[kind]
        self.need(form.size)
        value: int | float | bool = form.unpack_from(self._data, self.place)[0]
        self.place += form.size
        return value

    def count(self, what: str, least_bytes: int) -> int:
        """Read how many things follow, each of which takes at least ``least_bytes``."""
        n = int(self.value(10))
        if n * least_bytes > self._size - self.place:
            raise _Broken(f"it claims {n} {what}, which is more than it has room for")
        return n

    def string(self, most: int) -> str:
        n = self.count("bytes of text", 1)
        if n > most:
            raise _Broken(f"it has a text of {n} bytes, but {most} is the limit")
        return self.bytes(n).decode("utf-8", "replace")

    def skip_strings(self, n: int) -> str:
        """Skip ``n`` texts, hundreds of thousands in a vocabulary, and return their SHA-256."""
        start = place = self.place
        counted = 0
        unpack = _FORMATS[10].unpack_from
        last = len(self._data) - 8  # where a length may begin
        for i in range(n):
            if i == self._n_texts:
                counted = place
            if place > last:
                self.place = place
                self.need(8)
                last = len(self._data) - 8
            (length,) = unpack(self._data, place)
            if length > _MAX_NAME:
                raise _Broken(f"it has a text of {length} bytes in an array")
            place += 8 + length
        self.place = start
        self.need(place - start)
        self.place = place
        return hashlib.sha256(memoryview(self._data)[start : counted or place]).hexdigest()


def _read(path: Path, reader: _Reader, size: int) -> Header:
    reader.bytes(4)
    version = int(reader.value(4))
    if version not in (2, 3):
        raise ModelFileError(
            f"{path} is a GGUF of version {version}, but qdraft reads versions 2 and 3"
        )
    n_tensors = reader.count("tensors", 24)
    n_keys = reader.count("keys", 13)
    metadata: dict[str, Value] = {}
    for _ in range(n_keys):
        key = reader.string(_MAX_NAME)
        if key in metadata:
            raise _Broken(f"it has the key {key} twice")
        metadata[key] = _value(reader, int(reader.value(4)))
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 8 or alignment & (alignment - 1):
        raise _Broken(f"its alignment is {alignment!r}")
    tensors: dict[str, Tensor] = {}
    for _ in range(n_tensors):
        tensor = _tensor(reader)
        if tensor.name in tensors:
            raise _Broken(f"it has the tensor {tensor.name} twice")
        if tensor.offset % alignment:
            raise _Broken(f"the tensor {tensor.name} is not aligned")
        tensors[tensor.name] = tensor
    data_start = -(-reader.place // alignment) * alignment
    for tensor in tensors.values():
        end = data_start + tensor.offset + (tensor.n_bytes or 0)
        if end > size:
            raise ModelFileError(
                f"{path} is cut off: {tensor.name} ends at byte {end}, the file at {size}",
                hint="download it again: the download did not finish",
            )
    return Header(path, size, version, metadata, tuple(tensors.values()), data_start)


def _value(reader: _Reader, kind: int, *, depth: int = 0) -> Value:
    if kind in _FORMATS:
        return reader.value(kind)
    if kind == _STRING:
        return reader.string(_MAX_TEXT)
    if kind != _ARRAY or depth:
        raise _Broken(f"it has a value of the unknown type {kind}")
    of = int(reader.value(4))
    if of in _FORMATS:
        size = _FORMATS[of].size
        n = reader.count("numbers", size)
        if n <= _SHORT:
            return tuple(reader.value(of) for _ in range(n))
        return LongArray(n, hashlib.sha256(reader.bytes(n * size)).hexdigest())
    if of != _STRING:
        raise _Broken(f"it has an array of the unknown type {of}")
    n = reader.count("texts", 8)
    if n <= _SHORT:
        return tuple(reader.string(_MAX_NAME) for _ in range(n))
    return LongArray(n, reader.skip_strings(n))


def _tensor(reader: _Reader) -> Tensor:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    name = reader.string(_MAX_NAME)
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
