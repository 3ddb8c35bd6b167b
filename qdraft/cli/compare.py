"""`qdraft compare`: the quantization ladder of one model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from qdraft.cli import machine_options as mach
from qdraft.cli import options as opt
from qdraft.cli import study_options as study
from qdraft.cli.run import INTERRUPTED
from qdraft.cli.studies import Shown, show_study
from qdraft.errors import UsageError
from qdraft.llama.params import EngineParams
from qdraft.llama.rpc import parse_servers
from qdraft.making.calibration import evaluation_text
from qdraft.render import compare as view
from qdraft.render.progress import Bars
from qdraft.session.store import describe_machine
from qdraft.study.compare import ComparisonSpec
from qdraft.study.compare import compare as measure

_TEXT, _TYPES = "Text", "Types made on the fly"

TargetFile = Annotated[Path, typer.Argument(metavar="TARGET.gguf", help="The reference.")]
Rungs = Annotated[
    list[str],
    typer.Argument(metavar="DRAFT_OR_TYPE...", help="GGUF files, or types that are made of it."),
]
TextFile = Annotated[
    Path | None,
    opt.option(
        _TEXT, "-f", "--file", help="Text to score, as wikitext's raw files.", default="built in"
    ),
]
Chunks = Annotated[
    int | None, opt.option(_TEXT, "--chunks", min=1, help="Chunks to score.", default="all")
]
Ctx = Annotated[int, opt.option(_TEXT, "-c", "--ctx-size", min=16, help="Tokens of a chunk.")]
Matrix = Annotated[
    Path | None,
    opt.option(_TYPES, "--imatrix", help="A given one.", default="collected over a built-in text"),
]
NoMatrix = Annotated[bool, opt.option(_TYPES, "--no-imatrix", help="Quantize without one.")]
NPredict = Annotated[
    int, opt.option(_TEXT, "-n", "--n-predict", min=8, help="Tokens of each text that is timed.")
]
Again = Annotated[
    bool, opt.option("Output", "--again", help="Measure again what the cache has already.")
]


def compare(
    target: TargetFile,
    rungs: Rungs,
    file: TextFile = None,
    chunks: Chunks = None,
    ctx_size: Ctx = 512,
    temperatures: study.Temperatures = "0,1",
    n_predict: NPredict = 32,
    matrix: Matrix = None,
    no_matrix: NoMatrix = False,
    threads: mach.Threads = 0,
    cache_type_k: mach.CacheTypeK = "f16",
    cache_type_v: mach.CacheTypeV = "f16",
    flash_attn: mach.FlashAttn = "auto",
    gpu_layers: mach.GpuLayers = "auto",
    device: mach.DeviceNames = None,
    rpc: mach.Rpc = None,
    again: Again = False,
    output: study.OutputFormat = "table",
    as_json: opt.Json = False,
    quiet: opt.Quiet = False,
    plot: study.PlotFile = None,
    no_plot: study.NoPlot = False,
    report: study.ReportFile = None,
) -> None:
    """Compare quantizations of one model: size, speed, KL divergence, and each as a draft.

    Ends with a verdict: which pair to run, which single file, and why.
    """
    shown = Shown(output, as_json, quiet, plot, no_plot, report)
    if matrix and no_matrix:
        raise UsageError("give either --imatrix or --no-imatrix, not both")
    spec = ComparisonSpec(
        reference=target,
        rungs=tuple(_rung(text) for text in dict.fromkeys(rungs)),
        text=opt.read_text_file(file) if file else evaluation_text(),
        n_ctx=ctx_size,
        n_chunks=chunks,
        temperatures=study.parse_temperatures(temperatures),
        n_predict=n_predict,
        imatrix=matrix,
        with_imatrix=not no_matrix,
        params=EngineParams(
            n_threads=threads, cache_type_k=cache_type_k, cache_type_v=cache_type_v,
            flash_attn=flash_attn, n_gpu_layers=mach.parse_gpu_layers(gpu_layers, "--gpu-layers"),
            devices=mach.parse_devices(device),
        ),
        again=again,
        servers=parse_servers(rpc),
    )  # fmt: skip
    with Bars(quiet=quiet) as bars:
        found = measure(spec, progress=bars.step)
    about = {
        **describe_machine(threads), "text": str(file) if file else "built in", "n_ctx": ctx_size,
        "temperatures": spec.temperatures,
    }  # fmt: skip
    doubts = view.doubts(found, about["date"])
    show_study(
        f"qdraft compare {target.name}", view.sheets(found), view.charts(found),
        view.report(found, about), doubts, found.recommendation.words, shown, about,
    )  # fmt: skip
    if not found.complete:
        raise typer.Exit(INTERRUPTED)


def _rung(text: str) -> Path | str:
    """A file, or the name of a type."""
    path = Path(text)
    return path if path.exists() or path.suffix == ".gguf" or "/" in text else text.upper()
