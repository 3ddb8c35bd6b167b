#!/usr/bin/env bash
# On Debian without a GPU: builds llama-cpp-python for Vulkan on Mesa's software device, and runs the
# tests of exactness, placement and shared KV there. Real device code, and very slow. Where it cannot
# be built it says why in one line and exits with 0.
#
#     benchmarks/vulkan.sh
#
# Debian's packages are unpacked under VENV (default .venv-vulkan), not installed, so no root is
# needed. HEADERS is the release whose Vulkan headers are used: llama.cpp needs newer ones than
# Debian 12 has. JOBS is the number of processes that compile (default: one for each core). With
# SKIP_BUILD=1 the environment is used as it is.
set -uo pipefail
cd "$(dirname "$0")/.." || exit
venv="${VENV:-$PWD/.venv-vulkan}"
root="$venv/debian"
headers="${HEADERS:-trixie}"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

skip() {
  echo "skipped: $*" >&2
  exit 0
}

unpack() { # options of apt-get, --, packages: download these and unpack them into $root
  local options=()
  while [ "$1" != -- ]; do
    options+=("$1")
    shift
  done
  shift
  mkdir -p "$work/packages" "$root"
  rm -f "$work"/packages/*.deb
  (cd "$work/packages" && apt-get -q "${options[@]}" download "$@") > "$work/apt.log" 2>&1 \
    || skip "$(grep -m 1 '^E:' "$work/apt.log" || echo "apt-get cannot download $*")"
  for package in "$work"/packages/*.deb; do
    dpkg -x "$package" "$root" || skip "$package cannot be unpacked"
  done
}

newer_headers() { # the same Debian mirror, but another release
  local state="$work/apt" mirror
  # shellcheck disable=SC2016
  mirror=$(apt-get indextargets --format '$(SITE)' 'Created-By: Packages' 'Component: main' \
    2> "$work/apt.log" | grep -m 1 '/debian/*$') || skip "apt has no Debian mirror"
  mkdir -p "$state/lists/partial" "$state/archives/partial"
  echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror $headers main" \
    > "$state/sources.list"
  local options=(-o "Dir::Etc::sourcelist=$state/sources.list" -o Dir::Etc::sourceparts=/dev/null
    -o "Dir::State::lists=$state/lists" -o "Dir::Cache=$state")
  apt-get -q "${options[@]}" update > "$work/apt.log" 2>&1 \
    || skip "apt-get cannot read the packages of $headers"
  unpack "${options[@]}" -- libvulkan-dev spirv-headers
}

packages() {
  command -v apt-get > /dev/null || skip "this needs Debian's apt-get"
  local wanted missing
  wanted=(glslc libshaderc1 libvulkan1 mesa-vulkan-drivers)
  apt-get -s install --no-install-recommends "${wanted[@]}" > "$work/plan" 2> "$work/apt.log" \
    || skip "apt-get does not know ${wanted[*]} (apt-get update may help)"
  # What these need and this system lacks, and the four themselves.
  mapfile -t missing < <(awk '/^Inst/ && $3 !~ /^\[/ {print $2}' "$work/plan")
  mapfile -t missing < <(printf '%s\n' "${wanted[@]}" "${missing[@]}" | sort -u)
  unpack -- "${missing[@]}"
  newer_headers
}

[ -n "${SKIP_BUILD:-}" ] || packages
library=$(dirname "$(find "$root" -name 'libvulkan.so.1' 2> "$work/find.log" | head -n 1)")
driver=$(find "$root" -name 'lvp_icd*.json' 2> "$work/find.log" | head -n 1)
[ -n "$driver" ] || skip "mesa-vulkan-drivers has no software device"
sed "s#\"/usr/lib#\"$root/usr/lib#" "$driver" > "$root/lvp.json"
export LD_LIBRARY_PATH="$library" VK_ICD_FILENAMES="$root/lvp.json" VK_DRIVER_FILES="$root/lvp.json"
export GGML_VK_VISIBLE_DEVICES=0 # llama.cpp leaves out devices that are CPUs unless they are named
"$root/usr/bin/glslc" --version > "$work/glslc.log" 2>&1 || skip "glslc does not run: $(tail -n 1 "$work/glslc.log")"

[ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv" || skip "no virtual environment"
# shellcheck disable=SC1091
. "$venv/bin/activate"
if [ -z "${SKIP_BUILD:-}" ]; then
  export CMAKE_BUILD_PARALLEL_LEVEL="${JOBS:-$(nproc)}"
  export CMAKE_ARGS="-DGGML_VULKAN=ON -DCMAKE_PREFIX_PATH=$root/usr
    -DVulkan_INCLUDE_DIR=$root/usr/include -DVulkan_LIBRARY=$library/libvulkan.so.1
    -DVulkan_GLSLC_EXECUTABLE=$root/usr/bin/glslc"
  CMAKE_ARGS=${CMAKE_ARGS//$'\n'/ }
  # Not pip's usual cache: it does not look at CMAKE_ARGS.
  PIP_CACHE_DIR="$venv/pip-cache" pip install --quiet -e '.[demo,test]' > "$work/build.log" 2>&1 \
    || skip "the build failed: $(grep -m 1 -iE 'error:|CMake Error|^ERROR' "$work/build.log")"
fi
qdraft devices --json > "$work/devices.json" || exit 1
grep -q Vulkan "$work/devices.json" || skip "llama.cpp does not take Mesa's software device"
# In another order than by name, so that what costs least fails first.
pytest -q tests/test_devices.py tests/test_placing.py tests/test_placement.py \
  tests/test_exact.py tests/test_exactness.py tests/test_real.py
