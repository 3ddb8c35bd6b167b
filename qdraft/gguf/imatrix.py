"""Importance matrices: how much each input column of a weight matters, and their two file formats.

The importance of a column is the mean of its squared activations over a calibration text.
llama.cpp writes them as GGUF (sums and counts as tensors) and, before 2025, as a plain binary
(.dat). qdraft reads both and writes the GGUF form, which llama-quantize takes.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from qdraft.errors import ModelFileError
from qdraft.paths import new_file

# Parts of the names of tensors of layers that llama.cpp leaves as they are.
_NOT_QUANTIZED = (
    "_norm.",
    "ffn_gate_inp.",
    "ffn_gate_tid2eid.",
    "ssm_conv1d",
    "shortconv.conv",
    "time_mix_",
    "indexer.",
    "attn_rel_b",
    "altup",
    "laurel",
)
_SUMS, _COUNTS = ".in_sum2", ".counts"


@dataclass(slots=True)
class ImportanceMatrix:
    """Sums over the activations that each weight was multiplied with, by the name of the weight.

    The ``sums`` of their squares have the shape [n_matrices, n_columns], the ``counts`` of rows in
    them [n_matrices]; a dense weight is one matrix, each expert of a mixture is one. The model read
    ``n_chunks`` chunks of ``chunk_size`` tokens.
    """

    sums: dict[str, NDArray[np.float64]] = field(default_factory=dict)
    counts: dict[str, NDArray[np.int64]] = field(default_factory=dict)
    chunk_size: int = 512
    n_chunks: int = 0
    datasets: tuple[str, ...] = ()

    def add(self, name: str, matrix: int, n_matrices: int, rows: NDArray[np.float32]) -> None:
        """Add activations, shape [n, n_columns], of matrix ``matrix`` of a weight."""
        if name not in self.sums:
            self.sums[name] = np.zeros((n_matrices, rows.shape[1]))
            self.counts[name] = np.zeros(n_matrices, dtype=np.int64)
        self.sums[name][matrix] += np.einsum("ij,ij->j", rows, rows, dtype=np.float64)
        self.counts[name][matrix] += len(rows)

    def means(self, name: str) -> NDArray[np.float32]:
        """Return a weight's importances, shape [n_matrices * n_columns].

        They are 1 for a matrix without activations, or with zeros only: llama.cpp would write
        zeros for the weights of a matrix that has no importance at all.
        """
        counts = self.counts[name][:, None]
        has_data = (self.sums[name] != 0).any(axis=1, keepdims=True) & (counts > 0)
        means = np.where(has_data, self.sums[name] / np.maximum(counts, 1), 1.0)
        return means.astype(np.float32).ravel()

    def count_gaps(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, int]:
        """Return how many matrices of a model have no data, and how many may need some.

        ``shapes`` are those of the model's tensors, the columns first, by name. These are the
        matrices of its layers that llama.cpp quantizes; each expert is one.
        """
        n_gaps = n_all = 0
        for name, shape in shapes.items():
            is_of_layer = name.startswith("blk.") and name.endswith(".weight") and len(shape) > 1
            if not is_of_layer or any(part in name for part in _NOT_QUANTIZED):
                continue
            n_matrices = math.prod(shape[2:])
            sums = self.sums.get(name, np.zeros(1)).reshape(n_matrices, -1)
            n_all += n_matrices
            n_gaps += n_matrices - int(np.count_nonzero((sums != 0).any(axis=1)))
        return n_gaps, n_all

    def require_shapes(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raise ValueError unless every entry is that of a tensor with these ``shapes``."""
        foreign = [name for name in self.sums if name not in shapes]
        if foreign:
            raise ValueError(
                f"{len(foreign)} of its {len(self.sums)} entries name no tensor of that model, for "
                f"example {foreign[0]}"
            )
        for name, sums in self.sums.items():
            n_values = shapes[name][0] * math.prod(shapes[name][2:])
            if sums.size != n_values:
                raise ValueError(f"its {name} has {sums.size} values, the model's {n_values}")

    def save(self, path: Path, *, overwrite: bool = True) -> None:
        """Write llama.cpp's GGUF form, complete or not at all; see ``new_file``."""
        from gguf import GGUFWriter

        with new_file(path, overwrite=overwrite) as part:
            writer = GGUFWriter(part, "")
            writer.add_type("imatrix")
            writer.add_array("imatrix.datasets", list(self.datasets) or ["unknown"])
            writer.add_uint32("imatrix.chunk_count", self.n_chunks)
            writer.add_uint32("imatrix.chunk_size", self.chunk_size)
            for name in sorted(self.sums):
                writer.add_tensor(name + _SUMS, self.sums[name].astype(np.float32))
                counts = self.counts[name].astype(np.float32)
                writer.add_tensor(name + _COUNTS, counts.reshape(-1, 1))
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
            writer.close()


def load(path: Path) -> ImportanceMatrix:
    """Read a file of either form. Raises ModelFileError if it has neither or is cut off."""
    try:
        with path.open("rb") as data:
            magic = data.read(4)
        matrix = _load_gguf(path) if magic == b"GGUF" else _load_legacy(path.read_bytes())
    except OSError as error:
        raise ModelFileError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, IndexError, struct.error, OverflowError) as error:
        raise ModelFileError(f"{path} is not an importance matrix: {error}") from error
    if not matrix.sums:
        raise ModelFileError(f"{path} is not an importance matrix: it has no entries")
    if not all(np.isfinite(sums).all() for sums in matrix.sums.values()):
        raise ModelFileError(f"{path} is a broken importance matrix: not all values are finite")
    if any((sums < 0).any() for sums in matrix.sums.values()):
        raise ModelFileError(f"{path} is a broken importance matrix: it has negative values")
    if not any(sums.any() for sums in matrix.sums.values()):
        raise ModelFileError(f"{path} is a broken importance matrix: all values are zero")
    return matrix


def _load_gguf(path: Path) -> ImportanceMatrix:
    from gguf import GGUFReader

    reader = GGUFReader(path)

    def value(key: str) -> int:
        if key not in reader.fields:
            raise ValueError(f"it lacks {key}")
        return int(reader.fields[key].contents())

    matrix = ImportanceMatrix(
        chunk_size=value("imatrix.chunk_size"), n_chunks=value("imatrix.chunk_count")
    )
    if "imatrix.datasets" in reader.fields:
        matrix.datasets = tuple(reader.fields["imatrix.datasets"].contents())
    tensors = {tensor.name: np.asarray(tensor.data) for tensor in reader.tensors}
    for key, sums in tensors.items():
        if not key.endswith(_SUMS):
            continue
        name = key.removesuffix(_SUMS)
        counts = tensors[name + _COUNTS].astype(np.int64).ravel()
        matrix.counts[name] = counts
        matrix.sums[name] = sums.astype(np.float64).reshape(len(counts), -1)
    return matrix


def _load_legacy(data: bytes) -> ImportanceMatrix:
    """Read entries: name, number of calls, means times calls. What follows them is optional."""
    matrix = ImportanceMatrix()
    place = 0

    def number() -> int:
        nonlocal place
        (n,) = struct.unpack_from("<i", data, place)
        place += 4
        if n < 0:
            raise ValueError("it has a negative length")
        return int(n)

    def bytes_of(n: int) -> bytes:
        nonlocal place
        if n > len(data) - place:
            raise ValueError("it is cut off")
        place += n
        return data[place - n : place]

    for _ in range(number()):
        name = bytes_of(number()).decode()
        n_calls = number()
        values = np.frombuffer(bytes_of(4 * number()), dtype="<f4")
        matrix.sums[name] = values.astype(np.float64).reshape(1, -1)
        matrix.counts[name] = np.array([max(1, n_calls)])
    if len(data) - place >= 4:
        matrix.n_chunks = number()
    if len(data) - place >= 4:
        matrix.datasets = (bytes_of(number()).decode(errors="replace"),)
    return matrix
