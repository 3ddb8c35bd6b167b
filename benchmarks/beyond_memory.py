"""A target that does not fit in memory: qdraft at its defaults, the target alone, and llama.cpp.

llama.cpp is its tool llama-speculative-simple of the version that qdraft runs on, and the newest
that installs as a wheel, at temperature 1 also with its rejection by p/q.

Every text runs in a process of its own, inside a memory cgroup that is smaller than the target and
larger than the draft, with files that are not in memory yet. The contenders take turns on each
prompt, with the same files, threads and number of tokens. Speed is tokens after the first one over
their seconds. The target alone, whose tokens all cost the same, writes fewer of them. Needs Linux,
and a user who may write cgroups.

    python benchmarks/beyond_memory.py --quick              # the bars, on the large rig
    python benchmarks/beyond_memory.py --json FILE          # more prompts
    python benchmarks/beyond_memory.py --real DIR           # Qwen2.5-Coder 1.5B (real_model.py)
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

from figures import NEWEST, NEWEST_ALONE
from gguf import GGUFReader, GGUFWriter
from newest_rival import WHEEL, Drafting, Newest, NoWheel, draftings, interpreter
from real_model import real_model
from rig import rig
from rivals import Run, Setting, run_simple

from qdraft.host import default_threads
from qdraft.llama.held_pages import HeldPages, Stretch
from qdraft.llama.model import LlamaModel
from qdraft.llama.params import EngineParams
from qdraft.llama.repack_probe import extra_buffers_are_safe
from qdraft.paths import cache_dir, new_file
from qdraft.session.prompt import encode_prompt
from qdraft.session.store import describe_machine
from qdraft.study.prompts import TASK_KINDS

ALONE, OWN_ALONE = "target alone, mapped", "target alone, qdraft"
OURS, FIRST, USELESS = "qdraft", "qdraft, first run", "qdraft, useless draft"
N_MAX, NEWEST_N_MAX = (3, 8, 16, 32), (3, 16)
# Tokens of the target alone, and of a text with a useless draft, which must win back its start.
N_ALONE, N_USELESS = 24, 160
WANTED = {
    "t0_vs_target": ">= 8",
    "t0_vs_best": ">= 1.1",
    "t1_vs_target": ">= 4.5",
    "t1_vs_best": ">= 1.5",
    "t0_vs_newest": ">= 1.1",
    "t1_vs_newest": ">= 1.5",
    "first_run": ">= 0.85",
    "draft_c": "<= 0.08",
    "never_slower": ">= 0.95",
}


@dataclass(frozen=True, slots=True)
class Text:
    """One measured text."""

    contender: str
    temperature: float
    prompt: str
    n_tokens: int
    seconds: float
    n_drafted: int
    n_accepted: int
    c: float | None = None


class MemoryGroup:
    """A cgroup with a limit of memory, of version 1 or 2, that processes can be started in."""

    def __init__(self, n_bytes: int) -> None:
        """Raises OSError if cgroups cannot be written."""
        first = Path("/sys/fs/cgroup/memory")
        is_first = first.is_dir()
        root = first if is_first else Path("/sys/fs/cgroup")
        self._path = root / f"qdraft-{os.getpid()}"
        self._path.mkdir()
        limit = "memory.limit_in_bytes" if is_first else "memory.max"
        (self._path / limit).write_text(str(n_bytes))
        if not is_first:
            (self._path / "memory.swap.max").write_text("0")
        self._members = self._path / "cgroup.procs"

    def enter(self) -> None:
        """Move this process into the group."""
        self._members.write_text(str(os.getpid()))

    def close(self) -> None:
        self._path.rmdir()


def say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


def drop(paths: Sequence[Path]) -> None:
    """Have the system forget what it holds of these files."""
    for path in paths:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@contextmanager
def useless_draft(draft: Path) -> Iterator[Path]:
    """A draft of the same shape whose layers are in reverse order, so that it predicts nothing."""
    reader = GGUFReader(draft)
    names = [tensor.name for tensor in reader.tensors]
    n_layers = 1 + max(int(name.split(".")[1]) for name in names if name.startswith("blk."))

    def swapped(name: str) -> str:
        first, *rest = name.split(".")
        if first != "blk":
            return name
        return ".".join([first, str(n_layers - 1 - int(rest[0])), *rest[1:]])

    path = cache_dir() / "rig" / f"useless-{draft.name}"
    if not path.exists():
        with new_file(path) as part:
            writer = GGUFWriter(part, reader.fields["general.architecture"].contents())
            for field in reader.fields.values():
                if field.name.startswith("GGUF.") or field.name == "general.architecture":
                    continue
                kind = field.types[0]
                inner = field.types[-1] if len(field.types) > 1 else None
                writer.add_key_value(field.name, field.contents(), kind, sub_type=inner)
            by_name = {tensor.name: tensor for tensor in reader.tensors}
            for name in names:
                tensor = by_name[swapped(name)]
                if tensor.tensor_type != by_name[name].tensor_type:
                    tensor = by_name[name]  # a layer of another type stays where it is
                writer.add_tensor(name, tensor.data, raw_dtype=tensor.tensor_type)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
            writer.close()
    yield path


@contextmanager
def held(draft: Path, enter: Callable[[], None]) -> Iterator[None]:
    """Lock a file's pages while a rival runs that maps it; they count in the group that is entered.

    Where llama.cpp repacks weights, its draft is in memory of its own and nothing is locked.
    """
    if extra_buffers_are_safe():
        yield
        return
    fork = multiprocessing.get_context("fork")
    here, there = fork.Pipe()
    process = fork.Process(target=hold, args=(draft, enter, here, there))
    process.start()
    there.close()
    try:
        refusal = here.recv()
        if refusal:
            say(f"the draft of llama.cpp is not locked in memory: {refusal}")
        yield
    finally:
        here.close()
        process.join()


def hold(draft: Path, enter: Callable[[], None], far: Connection, pipe: Connection) -> None:
    """Lock a file's pages, send the system's refusal or "", and wait until ``far`` is closed."""
    far.close()  # this process's copy of it
    enter()
    n_bytes = draft.stat().st_size
    pages = HeldPages([Stretch(draft, 0, n_bytes)])
    pages.hold(n_bytes)
    pipe.send(pages.refusal)
    with suppress(EOFError):
        pipe.recv()
    pages.close()


class Bench:
    """The files, the limit, and the texts that were written so far."""

    def __init__(self, target: Path, draft: Path, limit: int, n_predict: int) -> None:
        self.target, self.draft, self.n_predict = target, draft, n_predict
        self.group = MemoryGroup(limit)
        self.texts: list[Text] = []
        self.newest = False  # measure the newest llama.cpp too
        self._model = LlamaModel(draft, EngineParams(devices=("none",)), dry=True)  # its template
        self._cache = Path(tempfile.mkdtemp(prefix="qdraft-bench-"))

    def close(self) -> None:
        self._model.close()
        self.group.close()
        shutil.rmtree(self._cache)

    def ours(
        self,
        prompt: str,
        temperature: float,
        options: Sequence[str] = (),
        *,
        draft: Path | None = None,
        fresh: bool = False,
        n_predict: int | None = None,
    ) -> tuple[Run, float | None]:
        """Run ``qdraft run`` as a user does; ``fresh`` has nothing in its cache directory."""
        files = ["-m", str(self.target)]
        if draft:
            files += ["-d", str(draft)]
        sampling = ["--temp", str(temperature), "--top-k", "0", "--top-p", "1", "--min-p", "0"]
        limits = ["-n", str(n_predict or self.n_predict), "--ignore-eos", "-c", "1024", "-s", "7"]
        cache = tempfile.mkdtemp(dir=self._cache) if fresh else str(self._cache / "kept")
        output = ["--json", "-p", prompt]
        done = subprocess.run(
            [sys.executable, "-m", "qdraft", "run", *files, *options, *limits, *sampling, *output],
            capture_output=True,
            text=True,
            preexec_fn=self.group.enter,
            env={**os.environ, "QDRAFT_CACHE_DIR": cache, "QDRAFT_CONFIG_DIR": cache},
        )
        if done.returncode:
            raise RuntimeError(f"qdraft failed:\n{done.stderr[-2000:]}")
        summary = json.loads(done.stdout)["summary"]
        seconds = summary["draft_s"] + summary["verify_s"] + summary["other_s"]
        run = Run(summary["n_tokens"] - 1, seconds, summary["n_drafted"], summary["n_accepted"])
        return run, summary["c"]

    def theirs(self, prompt: str, temperature: float, n_max: int) -> tuple[Run, float | None]:
        """Run llama.cpp's tool, with its draft locked in memory as far as the system allows."""
        text = self._model.vocab.render_chat([{"role": "user", "content": prompt}])
        setting = Setting(n_max, 0.0)
        with held(self.draft, self.group.enter):
            run = run_simple(
                self.target,
                self.draft,
                text,
                self.n_predict,
                temperature,
                7,
                setting=setting,
                enter=self.group.enter,
            )
        return run, None

    def newest_alone(self, prompt: str, temperature: float) -> tuple[Run, None]:
        """Run the newest llama.cpp without a draft."""
        server = Newest(self.target, enter=self.group.enter)
        return self._write(server, prompt, temperature, N_ALONE)

    def newest_drafts(
        self, prompt: str, temperature: float, drafting: Drafting
    ) -> tuple[Run, None]:
        """Run the newest llama.cpp, its draft locked as in ``theirs``."""
        with held(self.draft, self.group.enter):
            server = Newest(self.target, self.draft, drafting, enter=self.group.enter)
            return self._write(server, prompt, temperature, self.n_predict)

    def _write(
        self, server: Newest, prompt: str, temperature: float, n_predict: int
    ) -> tuple[Run, None]:
        tokens = encode_prompt(self._model.vocab, prompt)
        try:
            return server.run(tokens, n_predict, temperature, 7), None
        finally:
            server.close()

    def measure(
        self,
        name: str,
        temperature: float,
        prompt: str,
        write: Callable[[str, float], tuple[Run, float | None]],
    ) -> None:
        drop([self.target, self.draft])
        run, c = write(prompt, temperature)
        self.texts.append(
            Text(
                name,
                temperature,
                prompt,
                run.n_tokens,
                run.seconds,
                run.n_drafted,
                run.n_accepted,
                c,
            )
        )
        say(f"T {temperature:g} {name}: {run.n_tokens / run.seconds:.2f} t/s")

    def run(self, prompts: Sequence[str], temperatures: Sequence[float], useless: Path) -> None:
        ours = partial(self.ours, draft=self.draft)
        alone = partial(self.ours, n_predict=N_ALONE)
        for number, prompt in enumerate(prompts):
            for temperature in temperatures:
                contenders = {
                    ALONE: partial(alone, options=("--no-draft", "--mmap")),
                    OWN_ALONE: partial(alone, options=("--no-draft",)),
                    FIRST: partial(ours, fresh=True),
                    OURS: ours,
                    **{f"llama.cpp, n_max {n}": partial(self.theirs, n_max=n) for n in N_MAX},
                }
                if self.newest:
                    contenders[NEWEST_ALONE] = self.newest_alone
                    for drafting in draftings(NEWEST_N_MAX, temperature):
                        run = partial(self.newest_drafts, drafting=drafting)
                        contenders[f"{NEWEST}, {drafting}"] = run
                if not number and not temperature:
                    contenders[USELESS] = partial(self.ours, draft=useless, n_predict=N_USELESS)
                names = list(contenders)
                turn = number % len(names)
                for name in names[turn:] + names[:turn]:
                    self.measure(name, temperature, prompt, contenders[name])


def speed(texts: Sequence[Text], contender: str, temperature: float) -> float:
    """Total tokens over total seconds."""
    chosen = [t for t in texts if t.contender == contender and t.temperature == temperature]
    return sum(t.n_tokens for t in chosen) / sum(t.seconds for t in chosen)


def find_bars(texts: Sequence[Text]) -> dict[str, float]:
    """The figures that ``WANTED`` names."""
    figures: dict[str, float] = {}
    for temperature in (0.0, 1.0):
        ours = speed(texts, OURS, temperature)
        figures[f"t{temperature:g}_vs_target"] = ours / speed(texts, ALONE, temperature)
        for bar, family in (("best", "llama.cpp"), ("newest", NEWEST)):
            rivals = {
                t.contender
                for t in texts
                if t.contender.startswith(family) and t.temperature == temperature
            } - {NEWEST_ALONE}
            if rivals:
                best = max(speed(texts, name, temperature) for name in rivals)
                figures[f"t{temperature:g}_vs_{bar}"] = ours / best
    figures["first_run"] = speed(texts, FIRST, 0.0) / speed(texts, OURS, 0.0)
    costs = [t.c for t in texts if t.contender == OURS and t.c is not None]
    figures["draft_c"] = max(costs)
    first = next(t.prompt for t in texts if t.contender == USELESS)
    same = [t for t in texts if t.prompt == first]
    figures["never_slower"] = speed(same, USELESS, 0.0) / speed(same, OWN_ALONE, 0.0)
    return figures


def table(texts: Sequence[Text], bars: dict[str, float]) -> str:
    """The speeds and the bars, in Markdown."""
    names = list(dict.fromkeys(t.contender for t in texts))
    lines = ["| contender | T 0, t/s | T 1, t/s |", "|---|---|---|"]
    for name in names:
        cells = [
            f"{speed(texts, name, temperature):.2f}"
            if any(t.contender == name and t.temperature == temperature for t in texts)
            else ""
            for temperature in (0.0, 1.0)
        ]
        lines.append(f"| {name} | {cells[0]} | {cells[1]} |")
    lines += ["", "| bar | figure | wanted |", "|---|---|---|"]
    lines += [f"| {name} | {x:.3f} | {WANTED[name]} |" for name, x in bars.items()]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one prompt in place of three")
    parser.add_argument("--real", type=Path, help="use the 1.5B model, built in this directory")
    parser.add_argument("--draft", help="file type of the draft (Q4_K_M, or Q2_K with --real)")
    parser.add_argument("--limit", type=float, help="bytes of memory, in MB")
    parser.add_argument("--n-predict", type=int, default=96, help="tokens of a text")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    args = parser.parse_args()
    if args.real:
        target, draft = real_model(args.real), real_model(args.real, args.draft or "Q2_K")
    else:
        target, draft = rig("large"), rig("large", args.draft or "Q4_K_M")
    default_limit = draft.stat().st_size + 0.5 * target.stat().st_size
    limit = int(args.limit * 1e6) if args.limit else int(default_limit)
    prompts = [TASK_KINDS[kind][0] for kind in ("code", "question", "story")][
        : 1 if args.quick else 3
    ]
    try:
        bench = Bench(target, draft, limit, args.n_predict)
    except OSError as error:
        sys.exit(f"skipped: cgroups cannot be written here ({error})")
    try:
        interpreter()
        bench.newest = True
    except NoWheel as error:
        say(f"without {WHEEL}: {error}")
    try:
        with useless_draft(draft) as useless:
            bench.run(prompts, (0.0, 1.0), useless)
    finally:
        bench.close()
    figures = find_bars(bench.texts)
    report = {
        "machine": {**describe_machine(), "threads": default_threads()},
        "target": {"name": target.name, "n_bytes": target.stat().st_size},
        "draft": {"name": draft.name, "n_bytes": draft.stat().st_size},
        "newest": WHEEL if bench.newest else None,
        "limit": limit,
        "n_predict": args.n_predict,
        "bars": figures,
        "texts": [asdict(text) for text in bench.texts],
    }
    print(table(bench.texts, figures))
    if args.json:
        args.json.write_text(json.dumps(report, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
