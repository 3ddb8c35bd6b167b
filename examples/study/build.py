"""A complete study of the demo model: its ladder, its pair on six kinds of tasks, its tuning.

    python examples/study/build.py

writes ladder.html, bench.html and tune.html beside this file, with their JSON, and takes about ten
minutes on two cores. Each page opens from disk.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from qdraft.host import default_threads
from qdraft.pairs import registry
from qdraft.pairs.packages import materialize

HERE = Path(__file__).parent
_FOLDERS = re.compile(r"(?<=[\";])/[^\"&]*/(?=[^/\"&]+\.(?:gguf|npz))")


def main() -> None:
    target, draft = materialize(registry.load().find("smollm2"), threads=default_threads())
    record = HERE / "smollm2.npz"
    studies = {
        "ladder": ["compare", str(target), "Q8_0", "Q6_K", "Q4_K_M", "Q2_K"],
        "bench": ["bench", "-m", str(target), "-d", str(draft), "-n", "96", "-r", "2"],
        "tune": [
            "tune",
            "-m",
            str(target),
            "-d",
            str(draft),
            "--temp",
            "0",
            "--record",
            str(record),
            "--no-write",
        ],
    }
    for name, command in studies.items():
        page, json_file = HERE / f"{name}.html", HERE / f"{name}.json"
        done = subprocess.run(
            [sys.executable, "-m", "qdraft", *command, "--json", "--report", str(page)],
            stdout=subprocess.PIPE,
            check=True,
        )
        json_file.write_bytes(done.stdout)
        for path in (page, json_file):  # files by name: their folders are this machine's
            text = path.read_text(encoding="utf-8")
            path.write_text(_FOLDERS.sub("", text), encoding="utf-8")
    record.unlink()


if __name__ == "__main__":
    main()
