"""qdraft compare's perplexity and KL figures against llama.cpp's own llama-perplexity.

Both use the same files, text, context and chunks. Prints both figures and their ratio; exits with
status 1 if a figure is off by more than 1 %.

    python benchmarks/perplexity.py [--size small] [--draft Q4_K_M] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from llamacpp import tool
from rig import rig

from qdraft.host import default_threads
from qdraft.making.calibration import evaluation_text

N_CTX = 512
# Figures that both print: the name here, llama-perplexity's line, and the path in qdraft's JSON.
SAME = {
    "PPL(Q)": (r"Mean PPL\(Q\)\s+:\s+([\d.]+)", ("ppl", "value")),
    "PPL(base)": (r"Mean PPL\(base\)\s+:\s+([\d.]+)", ("ppl_base", "value")),
    "Mean KLD": (r"Mean\s+KLD:\s+([\d.]+)", ("kld", "value")),
    "Mean KLD, error": (r"Mean\s+KLD:\s+[\d.]+\s+±\s+([\d.]+)", ("kld", "error")),
    "Median KLD": (r"Median\s+KLD:\s+([\d.]+)", ("kld_median",)),
    "99.0% KLD": (r"99\.0%\s+KLD:\s+([\d.]+)", ("kld_99",)),
    "RMS Δp": (r"RMS Δp\s+:\s+([\d.]+)", ("rms_dp", "value")),
    "Same top p": (r"Same top p:\s+([\d.]+)", ("same_top", "value")),
}
PERCENT = ("RMS Δp", "Same top p")


def run_llama_perplexity(reference: Path, draft: Path, text: Path) -> dict[str, float]:
    """Return llama-perplexity's figures."""
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder) / "base.kld"
        options = [
            "-f",
            str(text),
            "-c",
            str(N_CTX),
            "-b",
            str(N_CTX),
            "-t",
            str(default_threads()),
            "-fa",
            "on",
            "-ngl",
            "0",
            "--kl-divergence-base",
            str(base),
            "--no-repack",  # repacked weights round differently, and qdraft scores without them
        ]
        run = [str(tool("llama-perplexity"))]
        subprocess.run([*run, "-m", str(reference), *options], check=True, capture_output=True)
        done = subprocess.run(
            [*run, "-m", str(draft), *options, "--kl-divergence"],
            check=True,
            capture_output=True,
            text=True,
        )
    figures = {}
    for name, (pattern, _) in SAME.items():
        match = re.search(pattern, done.stdout + done.stderr)
        if not match:
            raise SystemExit(f"llama-perplexity does not print {name}:\n{done.stdout[-2000:]}")
        figures[name] = float(match[1]) / (100 if name in PERCENT else 1)
    return figures


def run_compare(reference: Path, draft: Path, text: Path) -> dict[str, float]:
    """Return the figures of qdraft compare."""
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "qdraft",
            "compare",
            str(reference),
            str(draft),
            "-f",
            str(text),
            "-c",
            str(N_CTX),
            "-n",
            "8",
            "--temp",
            "0",
            "--json",
            "--quiet",
        ],
        check=True,
        capture_output=True,
        text=True,
    )
    quality: dict[str, Any] = json.loads(done.stdout)["rows"][0]["quality"]
    figures = {}
    for name, (_, path) in SAME.items():
        value: Any = quality
        for key in path:
            value = value[key]
        figures[name] = float(value)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="small", help="size of the rig: small or large")
    parser.add_argument("--draft", default="Q4_K_M", help="file type of the draft")
    parser.add_argument("--json", type=Path, help="write both sets of figures to this file")
    args = parser.parse_args()
    files = rig(args.size), rig(args.size, args.draft)
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "text.txt"
        text.write_text(evaluation_text(), encoding="utf-8")
        measured, wanted = run_compare(*files, text), run_llama_perplexity(*files, text)
    for name, value in measured.items():
        print(f"{name:<18}{value:10.5f} {wanted[name]:10.5f}  {value / wanted[name]:7.4f}")
    if args.json:
        args.json.write_text(json.dumps({"qdraft": measured, "llama-perplexity": wanted}, indent=1))
    off = [name for name, value in measured.items() if abs(value / wanted[name] - 1) > 0.01]
    if off:
        raise SystemExit(f"off by more than 1 %: {', '.join(off)}")


if __name__ == "__main__":
    main()
