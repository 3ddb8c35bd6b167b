"""qdraft serve against llama-server: the same pair, prompts and clients, and what serving costs.

llama-server drafts with the best of some settings, found first on a prompt that does not count.
Both servers take the same requests on loopback: texts of ``--n-predict`` tokens, end-of-generation
tokens banned, from one client and from four at once, at temperature 0 and 1. Speed is tokens over
the seconds from the first request to the last answer. The bars compare one client. With four,
llama-server runs once with one slot, and once with four, whose texts share each pass over the
weights; qdraft writes one text after another. The overhead is the time of a text by the
server over that of the same text by the library, which is what `qdraft run` uses. The second turn
of a conversation counts the prompt tokens that the server read.

    python benchmarks/serve.py --json FILE            # about 5 minutes on two cores
    python benchmarks/serve.py --quick                # one prompt, one client
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rig import rig
from rivals import N_CTX, Server, Setting
from tasks import TUNING

from qdraft import DecodeParams, EngineParams, Pair, PairSpec, SamplingParams
from qdraft.session.endless import ban_ends
from qdraft.session.prompt import encode_prompt
from qdraft.session.store import describe_machine
from qdraft.study.prompts import TASK_KINDS, WARM_UP

OURS, THEIRS, PARALLEL = "qdraft serve", "llama-server", "llama-server, 4 slots"
SETTINGS = (Setting(1, 0.0), Setting(2, 0.0), Setting(3, 0.0), Setting(5, 0.75))
Ask = Callable[[Sequence[int], int, float, int], int]


@dataclass(frozen=True, slots=True)
class Measured:
    """The texts of some clients at once: their tokens, and the seconds from first to last."""

    server: str
    temperature: float
    n_clients: int
    n_tokens: int
    seconds: float

    @property
    def speed(self) -> float:
        return self.n_tokens / self.seconds


class OurServer:
    """`qdraft serve` in a process of its own."""

    def __init__(self, target: Path, draft: Path) -> None:
        command = [sys.executable, "-m", "qdraft", "serve", "--port", "0", "-c", str(N_CTX)]
        self._process = subprocess.Popen(
            [*command, "-m", str(target), "-d", str(draft)], stderr=subprocess.PIPE, text=True
        )
        assert self._process.stderr
        for line in self._process.stderr:
            if match := re.search(r"listening on (http://\S+) ", line):
                self.address = match[1]
                break
        else:
            raise RuntimeError("qdraft serve did not start")
        threading.Thread(target=self._process.stderr.read, daemon=True).start()

    def post(self, path: str, body: Any) -> Any:
        return post(self.address + path, body)

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()


def post(address: str, body: Any) -> Any:
    with urllib.request.urlopen(address, json.dumps(body).encode(), timeout=600) as reply:
        return json.load(reply)


def ask(address: str, prompt: Sequence[int], n: int, temperature: float, seed: int) -> int:
    """Have a server write one text; return the number of its tokens."""
    body = {
        "prompt": list(prompt),
        "n_predict": n,
        "temperature": temperature,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "seed": seed,
        "ignore_eos": True,
        "cache_prompt": False,
    }
    return int(post(address + "/completion", body)["tokens_predicted"])


def asking(address: str) -> Ask:
    """Return what asks the server at an address for a text."""
    return lambda prompt, n, temperature, seed: ask(address, prompt, n, temperature, seed)


def measure(
    name: str,
    one_text: Ask,
    prompts: Sequence[Sequence[int]],
    n_clients: int,
    n: int,
    temperature: float,
) -> Measured:
    """Send each prompt from one of ``n_clients`` threads, which take turns."""
    n_tokens = [0] * n_clients
    started = time.perf_counter()

    def client(i: int) -> None:
        for k in range(i, len(prompts), n_clients):
            n_tokens[i] += one_text(prompts[k], n, temperature, 100 + k)

    threads = [threading.Thread(target=client, args=(i,)) for i in range(n_clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - started
    measured = Measured(name, temperature, n_clients, sum(n_tokens), seconds)
    say(f"{name}, T {temperature:g}, {n_clients} clients: {measured.speed:.2f} t/s")
    return measured


def best_setting(files: tuple[Path, Path], prompt: Sequence[int], n: int) -> dict[float, Setting]:
    """Find the settings with which llama-server is fastest, by temperature."""
    speeds: dict[float, dict[Setting, float]] = {0.0: {}, 1.0: {}}
    for setting in SETTINGS:
        server = Server(*files, setting)
        for temperature, by_setting in speeds.items():
            run = server.run(prompt, n, temperature, 5)
            by_setting[setting] = run.n_tokens / run.seconds
            say(f"{THEIRS}, T {temperature:g}, {setting}: {by_setting[setting]:.2f} t/s")
        server.close()
    return {t: max(by_setting, key=lambda s: by_setting[s]) for t, by_setting in speeds.items()}


def measure_overhead(
    ours: OurServer, pair: Pair, prompts: Sequence[Sequence[int]], n: int
) -> list[tuple[float, float]]:
    """Seconds of the same greedy text of the target by the server and by the library, in turns."""
    sampling = ban_ends(SamplingParams(temperature=0), pair.vocab)
    decode = DecodeParams(n_predict=n, n_draft=0, seed=1)  # drafts follow the clock

    def by_library(prompt: Sequence[int]) -> None:
        with pair.session() as session:
            session.generate(list(prompt), sampling, decode).read()

    def by_server(prompt: Sequence[int]) -> None:
        body = {"prompt": list(prompt), "n_predict": n, "temperature": 0, "ignore_eos": True}
        ours.post("/completion", {**body, "cache_prompt": False, "n_draft": 0})

    times = []
    for k, prompt in enumerate([*prompts, *prompts]):
        seconds = {}
        for write in (by_server, by_library) if k % 2 else (by_library, by_server):
            started = time.perf_counter()
            write(prompt)
            seconds[write] = time.perf_counter() - started
        times.append((seconds[by_server], seconds[by_library]))
        say(f"overhead: {times[-1][0]:.2f} s by the server, {times[-1][1]:.2f} s by the library")
    return times


def second_turn(ours: OurServer) -> dict[str, int]:
    """The counts of a conversation's second turn."""
    messages = [{"role": "user", "content": TUNING[0]}]
    asked = {"messages": messages, "max_tokens": 16, "temperature": 0}
    first = ours.post("/v1/chat/completions", asked)
    messages += [first["choices"][0]["message"], {"role": "user", "content": "Go on."}]
    second = ours.post("/v1/chat/completions", asked)
    n_known = first["usage"]["total_tokens"] - 1  # the last token has no cells yet
    return {
        "n_prompt": second["usage"]["prompt_tokens"],
        "n_known": n_known,
        "n_read": second["timings"]["prompt_n"],
    }


def say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one prompt and one client")
    parser.add_argument("--n-predict", type=int, default=48, help="tokens of a text")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    args = parser.parse_args()
    files = (rig("large"), rig("large", "Q4_K_M"))
    n, machine = args.n_predict, describe_machine()
    texts = [prompts[0] for kind, prompts in TASK_KINDS.items()][: 1 if args.quick else 4]
    with Pair(PairSpec.of(*files, EngineParams(n_ctx=N_CTX), share_kv="on")) as pair:
        prompts = [encode_prompt(pair.vocab, text) for text in texts]
        tuning, warm_up = (encode_prompt(pair.vocab, text) for text in (TUNING[0], WARM_UP))
        ours = OurServer(*files)
        for temperature in (0.0, 1.0):
            asking(ours.address)(warm_up, n, temperature, 7)
        overheads = measure_overhead(ours, pair, prompts[:3], n)
        turn = second_turn(ours)
    best = best_setting(files, tuning, n // 2)
    measured: list[Measured] = []
    clients = (1,) if args.quick else (1, 4)
    for temperature in (0.0, 1.0):
        own = asking(ours.address)
        measured += [measure(OURS, own, prompts, k, n, temperature) for k in clients]
        for name, n_slots in ((THEIRS, 1), (PARALLEL, 4))[: len(clients)]:
            theirs = Server(*files, best[temperature], n_slots)
            one_text = asking(f"http://127.0.0.1:{theirs.port}")
            one_text(warm_up, 8, temperature, 7)
            counts = clients if n_slots == 1 else (4,)
            measured += [measure(name, one_text, prompts, k, n, temperature) for k in counts]
            theirs.close()
    ours.close()

    def ratio(temperature: float, n_clients: int, name: str) -> float:
        speeds = {
            each.server: each.speed
            for each in measured
            if (each.temperature, each.n_clients) == (temperature, n_clients)
        }
        return speeds[OURS] / speeds[name]

    overhead = median(server / library for server, library in overheads)
    is_new_only = turn["n_read"] == turn["n_prompt"] - turn["n_known"]
    figures = {
        "t0_vs_llama_server": (ratio(0.0, 1, THEIRS), 1.15),
        "t1_vs_llama_server": (ratio(1.0, 1, THEIRS), 1.5),
        "overhead": (overhead, 1.05),
    }
    bars = {
        name: {
            "value": value,
            "bar": bar,
            "passed": value <= bar if name == "overhead" else value >= bar,
        }
        for name, (value, bar) in figures.items()
    }
    bars["second_turn"] = {"value": turn["n_read"], "bar": None, "passed": is_new_only}
    report = {
        "machine": {**machine, "load_after": describe_machine()["load"]},
        "bars": bars,
        "settings": {f"T {t:g}": str(setting) for t, setting in best.items()},
        "measured": [{**asdict(m), "speed": m.speed} for m in measured],
        "four_clients": {
            f"T {temperature:g}, against {name}": ratio(temperature, 4, name)
            for temperature in (0.0, 1.0)
            for name in (THEIRS, PARALLEL)
            if 4 in clients
        },
        "overheads": overheads,
        "second_turn": turn,
    }
    print(json.dumps({k: report[k] for k in ("bars", "four_clients")}, indent=1))
    if args.json:
        args.json.write_text(json.dumps(report, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
