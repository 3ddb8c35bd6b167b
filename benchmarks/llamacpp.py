"""llama.cpp's own tools, built from the source that the installed llama-cpp-python was built from.

The source comes from that version's source distribution, so that the tools and qdraft run the same
code. Builds them once, into the cache; needs the extra `bench` (cmake, ninja, scikit-build-core).

    python benchmarks/llamacpp.py            # builds what is missing, prints the paths
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tarfile
from pathlib import Path

from qdraft.host import default_threads
from qdraft.llama.native import library_version
from qdraft.paths import cache_dir

TOOLS = (
    "llama-speculative-simple",
    "llama-server",
    "llama-cli",
    "llama-bench",
    "llama-imatrix",
    "llama-quantize",
    "llama-perplexity",
)
# As the binding builds them; the build would download the server's web page.
OPTIONS = (
    "CMAKE_BUILD_TYPE=Release",
    "GGML_NATIVE=ON",
    "LLAMA_CURL=OFF",
    "LLAMA_OPENSSL=OFF",
    "LLAMA_BUILD_TESTS=OFF",
    "LLAMA_BUILD_APP=OFF",
    "LLAMA_BUILD_UI=OFF",
    "LLAMA_USE_PREBUILT_UI=OFF",
)


def tool(name: str) -> Path:
    """The path of one of ``TOOLS``; builds all of them if it is missing."""
    folder = cache_dir() / "llama.cpp" / library_version()
    build_folder = folder / ("-".join(["build", *own_options()]).replace("/", "_"))
    path = build_folder / "bin" / name
    if not path.exists():
        build(find_tree(folder), build_folder)
    return path


def own_options() -> list[str]:
    """The options in CMAKE_ARGS, as for the binding: -DGGML_CUDA=ON builds tools for the GPU."""
    return [part.removeprefix("-D") for part in shlex.split(os.environ.get("CMAKE_ARGS", ""))]


def find_tree(folder: Path) -> Path:
    """The llama.cpp tree in the source distribution; downloads and unpacks it if it is missing."""
    name = f"llama_cpp_python-{library_version()}"
    tree = folder / name / "vendor" / "llama.cpp"
    if not tree.exists():
        folder.mkdir(parents=True, exist_ok=True)
        say(f"downloading the source of {name}")
        wanted = f"llama-cpp-python=={library_version()}"
        run(
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--no-binary",
            ":all:",
            "--no-build-isolation",
            "--dest",
            str(folder),
            wanted,
        )
        with tarfile.open(folder / f"{name}.tar.gz") as archive:
            archive.extractall(folder, filter="data")
    return tree


def build(tree: Path, folder: Path) -> None:
    """Configure and build ``TOOLS``."""
    say("building llama.cpp's tools, which takes some minutes")
    options = [f"-D{option}" for option in (*OPTIONS, *own_options())]
    run("cmake", "-S", str(tree), "-B", str(folder), "-G", "Ninja", *options)
    jobs = str(default_threads())
    run("cmake", "--build", str(folder), "--parallel", jobs, "--target", *TOOLS)


def run(*command: str) -> None:
    """Run a command; if it fails, exit with the end of its output."""
    done = subprocess.run(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout[-4000:]}")


def say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


if __name__ == "__main__":
    for name in TOOLS:
        print(tool(name))
