"""llama.cpp's speculative tools, run on the same token ids, files and threads as qdraft.

On a machine where llama.cpp's repacked weights crash (qdraft's probe finds out), its tools run
without them, as qdraft does.
"""

from __future__ import annotations

import json
import re
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from llamacpp import tool

from qdraft.host import default_threads
from qdraft.llama.devices import devices
from qdraft.llama.repack_probe import extra_buffers_are_safe

N_CTX = 1024
_DECODED = re.compile(r"decoded\s+(\d+) tokens in\s+([\d.]+) seconds")
_ACCEPTED = re.compile(r"n_drafted\s*=\s*(\d+)[\s\S]*n_accept\s*=\s*(\d+)")


@dataclass(frozen=True, slots=True)
class Setting:
    """How llama.cpp drafts; None is its default."""

    n_max: int | None = None
    p_min: float | None = None

    def options(self) -> list[str]:
        asked = {"--spec-draft-n-max": self.n_max, "--spec-draft-p-min": self.p_min}
        return [text for name, x in asked.items() if x is not None for text in (name, str(x))]

    def __str__(self) -> str:
        return " ".join(self.options()) or "defaults"


@dataclass(frozen=True, slots=True)
class Run:
    """Tokens after the first, the seconds that they took, and draft tokens made and accepted."""

    n_tokens: int
    seconds: float
    n_drafted: int = 0
    n_accepted: int = 0


def common_options(target: Path, draft: Path | None, setting: Setting) -> list[str]:
    threads = str(default_threads())
    layers = "99" if any(d.takes_layers for d in devices()) else "0"
    options = ["-m", str(target), "-c", str(N_CTX), "-t", threads, "-ngl", layers, "-fa", "on"]
    if not extra_buffers_are_safe():
        options.append("--no-repack")
    if draft:
        options += ["-ngld", layers]
        options += ["-md", str(draft), "--spec-type", "draft-simple", *setting.options()]
    return options


class Server:
    """A llama-server on a free port of this machine; ``close`` ends it."""

    def __init__(
        self,
        target: Path,
        draft: Path | None = None,
        setting: Setting | None = None,
        n_parallel: int = 1,
    ) -> None:
        """``n_parallel`` texts are decoded in one batch, each with a context of N_CTX tokens."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the server)
        options = common_options(target, draft, setting or Setting())
        address = [
            "--host",
            "127.0.0.1",
            "--port",
            str(self.port),
            "--parallel",
            str(n_parallel),
            "-c",
            str(n_parallel * N_CTX),
            "--no-webui",
        ]
        self._process = subprocess.Popen(
            [tool("llama-server"), *options, *address], stdout=self._log, stderr=subprocess.STDOUT
        )
        for _ in range(600):
            if self._process.poll() is not None:
                break
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=2):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.1)
        self._log.seek(0)
        output = self._log.read().decode(errors="replace")[-2000:]
        self.close()
        raise RuntimeError(f"llama-server did not start:\n{output}")

    def run(self, prompt: Sequence[int], n_predict: int, temperature: float, seed: int) -> Run:
        asked = {
            "prompt": list(prompt),
            "n_predict": n_predict,
            "temperature": temperature,
            "top_k": 0,
            "top_p": 1.0,
            "min_p": 0.0,
            "seed": seed,
            "ignore_eos": True,
            "cache_prompt": False,
        }
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/completion",
            json.dumps(asked).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=600) as reply:
            timings = json.load(reply)["timings"]
        return Run(
            timings["predicted_n"] - 1,
            timings["predicted_ms"] / 1000,
            timings.get("draft_n", 0),
            timings.get("draft_n_accepted", 0),
        )

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()
        self._log.close()


def run_simple(  # noqa: PLR0913 (what a text needs)
    target: Path,
    draft: Path,
    prompt: str,
    n_predict: int,
    temperature: float,
    seed: int,
    *,
    setting: Setting = Setting(),
    enter: Callable[[], None] | None = None,
) -> Run:
    """Run llama-speculative-simple in a process of its own, which calls ``enter`` first."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt", encoding="utf-8") as file:
        file.write(prompt)
        file.flush()
        sampling = ["--temp", str(temperature), "--top-k", "0", "--top-p", "1", "--min-p", "0"]
        done = subprocess.run(
            [
                tool("llama-speculative-simple"),
                *common_options(target, draft, setting),
                "-f",
                file.name,
                "--no-escape",
                "-n",
                str(n_predict),
                "--ignore-eos",
                "-s",
                str(seed),
                *sampling,
            ],
            capture_output=True,
            text=True,
            errors="replace",
            preexec_fn=enter,
        )
    output = done.stdout + done.stderr
    decoded, accepted = _DECODED.search(output), _ACCEPTED.search(output)
    if done.returncode or not decoded or not accepted:
        raise RuntimeError(f"llama-speculative-simple failed:\n{output[-2000:]}")
    return Run(int(decoded[1]), float(decoded[2]), int(accepted[1]), int(accepted[2]))
