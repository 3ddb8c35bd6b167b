#!/usr/bin/env bash
# On a machine with a GPU: builds llama-cpp-python and llama.cpp's tools for it, runs the tests of
# exactness and of placement there, then versus.py --quick; writes one JSON. Meant to take ten
# minutes; each step says how long it took, and one that fails is recorded, not hidden.
#
#     benchmarks/gpu.sh [FILE]          # default gpu.json
#
# CMAKE_ARGS chooses the build (default: CUDA, for the GPUs of this machine). VENV names an
# environment to use or to make; with SKIP_BUILD=1 it is used as it is.
set -uo pipefail
cd "$(dirname "$0")/.."
out=$(realpath "${1:-gpu.json}")
export CMAKE_ARGS="${CMAKE_ARGS:--DGGML_CUDA=ON -DCMAKE_CUDA_ARCHITECTURES=native}"
export CMAKE_BUILD_PARALLEL_LEVEL="${CMAKE_BUILD_PARALLEL_LEVEL:-$(nproc)}"
venv="${VENV:-$PWD/.venv-gpu}"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
: > "$work/steps"

step() { # name command...: run it, keep stdout and stderr apart, note its status and seconds
  local name=$1 started=$SECONDS
  shift
  "$@" > "$work/$name.json" 2> "$work/$name.log"
  local status=$?
  echo "$name $status $((SECONDS - started))" | tee -a "$work/steps" >&2
  return $status
}

[ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
# shellcheck disable=SC1091
. "$venv/bin/activate"
if [ -z "${SKIP_BUILD:-}" ]; then
  # Not pip's usual cache: it does not look at CMAKE_ARGS.
  PIP_CACHE_DIR="$venv/pip-cache" step build pip install -e '.[demo,test,bench]' || tail -n 30 "$work/build.log" >&2
fi
step devices qdraft devices --json
step exactness pytest -q tests/test_real.py tests/test_exact.py
step plan qdraft plan --compare-loaded --json
step tools python benchmarks/llamacpp.py
step rig python benchmarks/rig.py --types F16 Q4_K_M Q2_K-im
step versus python benchmarks/versus.py --quick --json "$work/figures.json"

python - "$work" "$out" <<'PY'
import json
import sys
from pathlib import Path

work, out = Path(sys.argv[1]), Path(sys.argv[2])
report = {"steps": {}}
for line in (work / "steps").read_text().splitlines():
    name, status, seconds = line.split()
    outputs = [(work / f"{name}.{end}").read_text(errors="replace") for end in ("json", "log")]
    tail = [line for text in outputs for line in text.splitlines()[-5:] if not text.startswith("{")]
    report["steps"][name] = {"status": int(status), "seconds": int(seconds), "tail": tail}
for name, path in (("devices", "devices"), ("plan", "plan"), ("versus", "figures")):
    try:
        report[name] = json.loads((work / f"{path}.json").read_text())
    except (OSError, ValueError) as error:
        report[name] = {"error": str(error)}
part = out.with_suffix(".part")
part.write_text(json.dumps(report, indent=1), encoding="utf-8")
part.replace(out)
print(f"written to {out}", file=sys.stderr)
sys.exit(any(step["status"] for step in report["steps"].values()))
PY
