"""The parts of a split model, which say in their headers what they are parts of."""

from __future__ import annotations

import re
from pathlib import Path

from qdraft.errors import ModelFileError
from qdraft.gguf.header import Header, read_header

_NAME = re.compile(r"^(?P<stem>.*)-(?P<no>\d{5})-of-(?P<n>\d{5})\.gguf$")


def read_parts(path: Path) -> list[Header]:
    """Read all parts of a split model in order if ``path`` is any of them, else the file alone.

    As llama.cpp does, this believes ``split.count`` in the header: a merged file that has kept the
    name of a part is whole, and a part is none the less one under another name. Raises
    ModelFileError if a part is damaged or missing, or belongs to another model.
    """
    header = read_header(path)
    n = header.number("split.count") or 0
    if n <= 1:
        return [header]
    no = header.number("split.no")
    if no is None or no >= n:
        raise ModelFileError(f"{path} claims to be part {no} of {n}, counted from 0")
    name = _NAME.match(path.name)
    if not name or (int(name["no"]), int(name["n"])) != (no + 1, n):
        raise ModelFileError(
            f"{path} is part {no + 1} of {n} by its header, but its name does not say so",
            hint=f"name each part as llama.cpp does, for example {_part_name('NAME', no, n)}",
        )
    paths = [path.with_name(_part_name(name["stem"], i, n)) for i in range(n)]
    missing = [part.name for part in paths if not part.is_file()]
    if missing:
        shown = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if missing[3:] else "")
        raise ModelFileError(f"{path} is one of {n} parts, of which {shown} are missing")
    headers = [header if i == no else read_header(part) for i, part in enumerate(paths)]
    _require_whole(headers)
    return headers


def _part_name(stem: str, no: int, n: int) -> str:
    return f"{stem}-{no + 1:05}-of-{n:05}.gguf"


def _require_whole(headers: list[Header]) -> None:
    """Raise ModelFileError unless the headers are those of all parts of one model."""
    n = len(headers)
    for i, header in enumerate(headers):
        says = header.number("split.no"), header.number("split.count")
        if says != (i, n):
            raise ModelFileError(f"{header.path} is not part {i + 1} of {n} by its header")
    n_tensors = sum(len(header.tensors) for header in headers)
    wanted = headers[0].number("split.tensors.count")
    if wanted is not None and wanted != n_tensors:
        raise ModelFileError(
            f"the {n} parts of {headers[0].path} have {n_tensors} tensors together, but the model "
            f"has {wanted}",
            hint="the parts are of different models: download all of them again",
        )
