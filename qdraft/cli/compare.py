"""`qdraft compare`: the quantization ladder of one model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from qdraft.cli.options.devices import DeviceOptions
from qdraft.cli.options.group import Only, option, takes_options
from qdraft.cli.options.imatrix import ImatrixOptions
from qdraft.cli.options.output import PANEL, StudyOutputOptions
from qdraft.cli.options.sampling import TemperatureOptions
from qdraft.cli.options.text import read_text_file
from qdraft.cli.run import INTERRUPTED
from qdraft.cli.study_view import StudyView, show_study
from qdraft.making.calibration import evaluation_text
from qdraft.render import compare as render
from qdraft.render.progress import ProgressBars
from qdraft.session.store import describe_machine
from qdraft.study.compare import ComparisonSpec, compare_rungs

_TEXT = "Text"

TargetFile = Annotated[Path, typer.Argument(metavar="TARGET.gguf", help="Reference GGUF file.")]
Rungs = Annotated[
    list[str],
    typer.Argument(
        metavar="DRAFT_OR_TYPE...", help="GGUF files, or types to quantize the reference to."
    ),
]


@dataclass(frozen=True, kw_only=True)
class LadderOptions(ImatrixOptions):
    """The text to score every rung on, and how types become files."""

    file: Annotated[
        Path | None,
        option(
            _TEXT,
            "-f",
            "--file",
            help="Text to score, for example a raw file of WikiText.",
            default="a built-in text",
        ),
    ] = None
    parse_special: Annotated[
        bool,
        option(
            _TEXT,
            "--parse-special",
            help="Read the names of control tokens in the text as these tokens.",
        ),
    ] = False
    chunks: Annotated[
        int | None,
        option(
            _TEXT, "--chunks", min=1, help="Number of chunks to score.", default="the whole text"
        ),
    ] = None
    ctx_size: Annotated[
        int, option(_TEXT, "-c", "--ctx-size", min=16, help="Tokens per chunk.")
    ] = 512
    n_predict: Annotated[
        int,
        option(_TEXT, "-n", "--n-predict", min=8, help="Tokens to generate per timed text."),
    ] = 32
    again: Annotated[
        bool, option(PANEL, "--again", help="Measure again what the cache already holds.")
    ] = False


@takes_options
def compare(
    target: TargetFile,
    rungs: Rungs,
    ladder: LadderOptions,
    temperatures: TemperatureOptions,
    devices: Annotated[
        DeviceOptions,
        Only(
            "threads",
            "cache_type_k",
            "cache_type_v",
            "flash_attn",
            "gpu_layers",
            "device",
            "rpc",
        ),
    ],
    output: StudyOutputOptions,
) -> None:
    """Compare quantizations of one model: size, speed, quality, and worth as a draft.

    Ends with the pair to run, the single file to run, and why.
    """
    spec = ComparisonSpec(
        reference=target,
        rungs=tuple(_parse_rung(text) for text in dict.fromkeys(rungs)),
        text=read_text_file(ladder.file) if ladder.file else evaluation_text(),
        n_ctx=ladder.ctx_size,
        n_chunks=ladder.chunks,
        temperatures=temperatures.parse_temperatures(),
        n_predict=ladder.n_predict,
        imatrix=ladder.matrix,
        with_imatrix=not ladder.no_matrix,
        params=devices.engines()[0],
        again=ladder.again,
        parse_special=ladder.parse_special,
        servers=devices.servers,
    )
    with ProgressBars(quiet=output.quiet) as bars:
        comparison = compare_rungs(spec, progress=bars.report)
    about = {
        **describe_machine(devices.threads),
        "text": str(ladder.file) if ladder.file else "built in",
        "n_ctx": ladder.ctx_size,
        "temperatures": spec.temperatures,
    }
    view = StudyView(
        f"qdraft compare {target.name}",
        render.sheets(comparison),
        render.charts(comparison),
        render.report(comparison, about),
        comparison.recommendation.words,
        comparison.doubts(about["date"]),
        about,
    )
    show_study(view, output)
    if not comparison.complete:
        raise typer.Exit(INTERRUPTED)


def _parse_rung(text: str) -> Path | str:
    """A file, or the name of a type."""
    path = Path(text)
    return path if path.exists() or path.suffix == ".gguf" or "/" in text else text.upper()
