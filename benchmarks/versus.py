"""qdraft against the target alone, llama.cpp's speculative tools and its newest wheel, in one run.

All contenders use the same files, prompts, threads and number of tokens. They take turns on each
prompt in changing order, every text has caches of its own, and end-of-generation tokens are banned.
Speed is total tokens over total seconds after the first token; the time to the first token is
measured apart. qdraft learns the costs that it keeps from run to run on a text that does not count.

    python benchmarks/versus.py --quick                     # the bars, under 4 minutes
    python benchmarks/versus.py --json FILE --page FILE     # everything
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from figures import ALONE, NEWEST, NEWEST_ALONE, OURS, Q2, Q4, SIMPLE, TUNED, bars, page, table
from newest_rival import WHEEL, Newest, NoWheel, draftings, interpreter
from rig import rig
from rivals import N_CTX, Run, Server, Setting, run_simple
from tasks import LONG, TUNING

from qdraft import DecodeParams, EngineParams, Pair, PairSpec, SamplingParams
from qdraft.host import default_threads
from qdraft.pairs.packages import materialize
from qdraft.pairs.registry import load
from qdraft.session.prompt import encode_prompt
from qdraft.session.store import describe_machine
from qdraft.study.prompts import TASK_KINDS, WARM_UP

SERVER = "llama-server"
# qdraft, each time without one of its mechanisms. The first uses the pair that shares no cells.
WITHOUT = {
    "qdraft, own KV": DecodeParams(),
    "qdraft, fixed 4": DecodeParams(draft_policy="fixed", n_draft=4),
    "qdraft, token by token": DecodeParams(verification="token"),
}


@dataclass(frozen=True, slots=True)
class Text:
    """One measured text."""

    pair: str
    kind: str
    prompt: int
    temperature: float
    contender: str
    n_tokens: int
    seconds: float
    n_drafted: int = 0
    n_tested: int = 0
    n_accepted: int = 0
    n_rounds: int = 0
    predicted: float | None = None  # speed-up by the cost model
    outside_s: float | None = None  # neither in llama_decode nor in the KV copy


class Bench:
    """A pair of files, its contenders, and the texts that they have written so far."""

    def __init__(self, name: str, target: Path, draft: Path, args: argparse.Namespace) -> None:
        self.name, self.args = name, args
        self.texts: list[Text] = []
        self._files = (target, draft)
        self._stack = ExitStack()
        params = EngineParams(n_ctx=N_CTX)
        self.pair = self._stack.enter_context(
            Pair(PairSpec.of(target, draft, params, share_kv="on"))
        )
        self.own = self._stack.enter_context(
            Pair(PairSpec.of(target, draft, params, share_kv="off"))
        )
        self.vocab = self.pair.vocab
        ends = [t for t in range(self.vocab.n_tokens) if self.vocab.is_end(t)]
        self._endless = dict.fromkeys(ends, -float("inf"))
        self._servers: dict[str, Server] = {}
        self._newest: dict[str, Newest] = {}
        self.tuned: dict[float, Setting] = {}

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        for server in (*self._servers.values(), *self._newest.values()):
            server.close()
        self._stack.close()

    def ours(self, pair: Pair, params: DecodeParams, temperature: float, prompt: str) -> Run:
        """Generate a text with qdraft; ``last`` is its summary."""
        sampling = SamplingParams(temperature, top_k=0, top_p=1, min_p=0, logit_bias=self._endless)
        text = pair.generate(prompt, sampling, params)
        first = 0.0
        n_first, spent = 0, 0.0
        for _ in text:
            if not first:
                first, n_first, spent = time.perf_counter(), len(text.tokens), inside(pair)
        seconds = time.perf_counter() - first
        self.last, self.outside_s = text.summary, seconds - (inside(pair) - spent)
        return Run(len(text.tokens) - n_first, seconds, self.last.n_drafted, self.last.n_accepted)

    def warm_up(self) -> None:
        """Bring weights into memory, and learn the costs that a user has after a first text."""
        say(f"{self.name}: warming up")
        for pair in (self.pair, self.own):
            self.ours(pair, DecodeParams(n_predict=8, n_draft=0), 0, WARM_UP)
        for temperature in (0.0, 1.0):
            n = self.args.n_predict
            for pair in (self.pair, self.own)[: 1 if self.args.quick else 2]:
                self.ours(pair, DecodeParams(n_predict=n, seed=7), temperature, WARM_UP)

    def tune(self) -> None:
        """Find llama-server's best n_max and p_min on prompts that do not count."""
        self._servers[ALONE] = Server(self._files[0])
        self._servers[SERVER] = Server(*self._files)
        settings = [Setting(n, 0.0) for n in (1, 2, 3, 5)] + [Setting(n, 0.75) for n in (3, 5)]
        quick = self.args.quick
        chosen = (0.0,) if quick and self.name != Q4 else (0.0, 1.0)
        speeds: dict[float, dict[Setting, float]] = {t: {} for t in chosen}
        for setting in (settings[0], settings[2]) if quick else settings:
            server = Server(*self._files, setting)
            for temperature, by_setting in speeds.items():
                runs = [
                    server.run(self.encode(prompt), self.args.n_predict // 2, temperature, 5)
                    for prompt in TUNING[: 1 if quick else 2]
                ]
                speed = sum(r.n_tokens for r in runs) / sum(r.seconds for r in runs)
                by_setting[setting] = speed
                say(f"{self.name}: T {temperature:g}, {setting}: {speed:.2f} t/s")
            server.close()
        for temperature, by_setting in speeds.items():
            best = max(by_setting, key=lambda setting: by_setting[setting])
            self.tuned[temperature] = best
            if str(best) not in self._servers:
                self._servers[str(best)] = Server(*self._files, best)

    def start_newest(self) -> None:
        """Load the files into processes of the newest llama.cpp, one for each way to draft."""
        self._newest[NEWEST_ALONE] = Newest(self._files[0])
        for drafting in draftings((3,) if self.args.quick else (1, 3), 1):
            self._newest[f"{NEWEST}, {drafting}"] = Newest(*self._files, drafting)

    def encode(self, prompt: str) -> list[int]:
        return encode_prompt(self.vocab, prompt)

    def contenders(self, temperature: float) -> dict[str, Callable[[str, int], Run]]:
        n = self.args.n_predict
        ablate = not self.args.quick and temperature in (0, 1)

        def server(name: str) -> Callable[[str, int], Run]:
            by_name = {**self._servers, **self._newest}
            return lambda p, seed: by_name[name].run(self.encode(p), n, temperature, seed)

        def ours(pair: Pair, params: DecodeParams) -> Callable[[str, int], Run]:
            def run(prompt: str, seed: int) -> Run:
                return self.ours(pair, replace(params, n_predict=n, seed=seed), temperature, prompt)

            return run

        contenders = {
            ALONE: ours(self.pair, DecodeParams(n_draft=0)),
            OURS: ours(self.pair, DecodeParams()),
        }
        if self._servers:
            contenders[TUNED] = server(str(self.tuned[1.0 if temperature else 0.0]))
            contenders[SIMPLE] = lambda p, seed: run_simple(
                *self._files,
                self.vocab.render_chat([{"role": "user", "content": p}]),
                n,
                temperature,
                seed,
            )
            if ablate:
                contenders[SERVER] = server(SERVER)
                contenders["llama-server, target alone"] = server(ALONE)
        if ablate or temperature == 1:
            contenders |= {
                name: server(name) for name in self._newest if temperature or "p/q" not in name
            }
        if ablate and self._servers:
            for name, params in WITHOUT.items():
                if temperature or "token" not in name:
                    contenders[name] = ours(self.own if "own" in name else self.pair, params)
        return contenders

    def run(self, kinds: Mapping[str, Sequence[str]], temperatures: Sequence[float]) -> None:
        """Run every contender on every prompt, in an order that rotates with the prompt."""
        n_runs = 0
        for kind, prompts in kinds.items():
            for i, prompt in enumerate(prompts):
                for temperature in temperatures:
                    contenders = list(self.contenders(temperature).items())
                    n_runs += 1
                    turn = n_runs % len(contenders)
                    for name, write in contenders[turn:] + contenders[:turn]:
                        self.outside_s = self.last = None
                        self._keep(kind, i, temperature, name, write(prompt, 100 + i))
                    say(f"{self.name}: {kind} {i}, temperature {temperature:g}")

    def _keep(self, kind: str, i: int, temperature: float, name: str, run: Run) -> None:
        summary = self.last
        self.texts.append(
            Text(
                self.name,
                kind,
                i,
                temperature,
                name,
                run.n_tokens,
                run.seconds,
                run.n_drafted,
                summary.n_tested if summary else 0,
                run.n_accepted,
                sum(summary.accepted_histogram) if summary else 0,
                summary.predicted_speedup if summary else None,
                self.outside_s,
            )
        )

    def first_tokens(self, repeats: int) -> Iterator[tuple[str, float]]:
        """Seconds to the first token of a prompt of about 500 tokens, alone and with the draft."""
        for _ in range(repeats):
            for name, n_draft in ((ALONE, 0), (OURS, None)):
                text = self.pair.generate(
                    LONG, SamplingParams(temperature=0), DecodeParams(n_predict=8, n_draft=n_draft)
                )
                text.read()
                yield name, text.summary.ttft_s or 0.0


def say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


def newest_wheel() -> str | None:
    """The newest llama.cpp that is measured; None, and a line that says why, if it cannot be."""
    try:
        interpreter()
    except NoWheel as error:
        say(f"without {WHEEL}: {error}")
        return None
    return WHEEL


def inside(pair: Pair) -> float:
    """Seconds spent in llama_decode and in the KV copy so far."""
    return sum(context.decode_s + context.copy_s for context in pair.contexts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="measure only what the bars need")
    parser.add_argument("--n-predict", type=int, help="tokens of a text at most")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--page", type=Path, help="write a Markdown page to this file")
    args = parser.parse_args()
    args.n_predict = args.n_predict or (20 if args.quick else 64)
    machine = {
        **describe_machine(),
        "n_predict": args.n_predict,
        "quick": args.quick,
    }
    kinds = {k: p[:1] for k, p in TASK_KINDS.items() if not args.quick or k in ("code", "story")}
    temperatures = (0.0, 1.0) if args.quick else (0.0, 0.7, 1.0)
    texts: list[Text] = []
    firsts: list[tuple[str, float]] = []
    costs, tuned = {}, {}
    newest = newest_wheel()
    small = materialize(load().find("smollm2"), threads=default_threads())
    pairs = {Q4: "Q4_K_M", Q2: "Q2_K-im", "smollm2": ""}
    for name, draft in pairs.items():
        files = (rig("large"), rig("large", draft)) if draft else small
        assert files[1]
        with Bench(name, files[0], files[1], args) as bench:
            bench.warm_up()
            if draft:
                bench.tune()
                if newest and (draft == "Q4_K_M" or not args.quick):
                    bench.start_newest()
                tuned[name] = {f"T {t:g}": str(setting) for t, setting in bench.tuned.items()}
            else:
                args.n_predict *= 4  # it is so fast that short texts measure nothing
            greedy_only = args.quick and draft != "Q4_K_M"
            bench.run(kinds, temperatures[:1] if greedy_only else temperatures)
            if draft == "Q4_K_M":
                firsts = list(bench.first_tokens(3 if args.quick else 9))
            known = bench.pair.learned.costs.medians()
            costs[name] = {"target_s": known.target_s, "c": known.c, "v": known.v}
            texts += bench.texts
    rows = [asdict(text) for text in texts]
    report = {
        "machine": {**machine, "load_after": describe_machine()["load"]},
        "bars": bars(rows, firsts),
        "newest": newest,
        "tuned": tuned,
        "costs": costs,
        "first_tokens": firsts,
        "texts": rows,
    }
    print(table(report))
    if args.json:
        args.json.write_text(json.dumps(report, indent=1), encoding="utf-8")
    if args.page:
        args.page.write_text(page(report), encoding="utf-8")


if __name__ == "__main__":
    main()
