"""Options that commands share, under llama.cpp's names, and how their values are read."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from qdraft.errors import UsageError

_MODELS, _TEXT, _SAMPLING = "Models", "Prompt and text", "Sampling"
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_DRAFTING, MACHINE, _OUTPUT = "Drafting", "Machine", "Output"


def option(panel: str, *names: str, help: str, default: str | None = None, **kw: Any) -> Any:
    """An option in a panel of the help page; ``default`` says in words what None means."""
    return typer.Option(
        *names, help=help, rich_help_panel=panel, show_default=default or True, **kw
    )


Target = Annotated[Path | None, option(_MODELS, "-m", "--model", help="Target GGUF file.")]
DraftFile = Annotated[
    Path | None, option(_MODELS, "-d", "-md", "--model-draft", help="Draft GGUF file.")
]
PairName = Annotated[
    str | None, option(_MODELS, "--pair", help="A pair of models.yaml.", default="its default")
]
ModelsFile = Annotated[
    Path | None,
    option(_MODELS, "--models-file", help="Your models.yaml, added to the shipped one."),
]
NoDraft = Annotated[bool, option(_MODELS, "--no-draft", help="Run the target alone.")]

Prompt = Annotated[str | None, option(_TEXT, "-p", "--prompt", help="The prompt, - for stdin.")]
PromptFile = Annotated[
    str | None, option(_TEXT, "-f", "--file", help="A file with the prompt, - for stdin.")
]
System = Annotated[str | None, option(_TEXT, "-sys", "--system", help="System text of the chat.")]
Raw = Annotated[bool, option(_TEXT, "--raw", help="No chat template: continue the prompt.")]
NPredict = Annotated[
    int, option(_TEXT, "-n", "--n-predict", help="Most tokens to generate; -1 is no limit.")
]
Stop = Annotated[
    list[str] | None, option(_TEXT, "--stop", help="End the text before this string (repeatable).")
]

Temperature = Annotated[float, option(_SAMPLING, "--temp", "--temperature", help="0 is greedy.")]
TopK = Annotated[int, option(_SAMPLING, "--top-k", help="Keep the k likeliest; 0 is off.")]
TopP = Annotated[float, option(_SAMPLING, "--top-p", help="Nucleus; 1 is off.")]
MinP = Annotated[float, option(_SAMPLING, "--min-p", help="Share of the likeliest; 0 is off.")]
TypicalP = Annotated[float, option(_SAMPLING, "--typical-p", "--typical", help="1 is off.")]
RepeatPenalty = Annotated[float, option(_SAMPLING, "--repeat-penalty", help="1 is off.")]
RepeatLastN = Annotated[
    int,
    option(_SAMPLING, "--repeat-last-n", help="Window of the penalties; -1 is the whole text."),
]
PresencePenalty = Annotated[float, option(_SAMPLING, "--presence-penalty", help="0 is off.")]
FrequencyPenalty = Annotated[float, option(_SAMPLING, "--frequency-penalty", help="0 is off.")]
LogitBias = Annotated[
    list[str] | None,
    option(
        _SAMPLING,
        "-l",
        "--logit-bias",
        help="TOKEN_ID+BIAS or TOKEN_ID-BIAS (-inf bans; repeatable).",
    ),
]
Seed = Annotated[
    int,
    option(
        _SAMPLING,
        "-s",
        "--seed",
        help="-1 draws one. A seed repeats a text under --draft-policy fixed.",
    ),
]

DrafterName = Annotated[
    str,
    option(
        _DRAFTING,
        "--drafter",
        help="model, ngram (repetitions in the text), or hybrid (both).",
    ),
]
DraftPolicy = Annotated[
    str,
    option(
        _DRAFTING,
        "--draft-policy",
        help="auto: as far as it pays by measured costs; fixed; confidence: down to --p-min.",
    ),
]
NDraft = Annotated[
    int | None,
    option(
        _DRAFTING,
        "--n-draft",
        help="Most tokens drafted in a round.",
        default="8 for auto, else 4",
    ),
]
PMin = Annotated[
    float | None,
    option(
        _DRAFTING,
        "--p-min",
        help="Stop drafting below this top probability.",
        default="0.5 for confidence, else 0",
    ),
]
Verify = Annotated[
    str,
    option(
        _DRAFTING,
        "--verification",
        "--verify",
        help="Rejection by block or by token (sampled text).",
    ),
]
ShareKv = Annotated[
    str, option(_DRAFTING, "--share-kv", help="The target's KV for the draft: auto, on or off.")
]
Exact = Annotated[
    bool,
    option(
        _DRAFTING,
        "--exact",
        help="Only drafts whose target rows are bit-identical to decoding one token at a time.",
    ),
]

CtxSize = Annotated[
    int | None,
    option(
        MACHINE, "-c", "--ctx-size",
        help="Context in tokens; 0 is the model's own.", default="4096, or the model's if less",
    ),
]  # fmt: skip
CtxSizeDraft = Annotated[
    int | None, option(MACHINE, "-cd", "--ctx-size-draft", help="The draft's.", default="as -c")
]
BatchSize = Annotated[int, option(MACHINE, "-b", "--batch-size", help="Logical batch.")]
UbatchSize = Annotated[
    int | None,
    option(MACHINE, "-ub", "--ubatch-size", help="Physical batch.", default="512, or -b if less"),
]

Json = Annotated[bool, option(_OUTPUT, "--json", help="One JSON object on stdout.")]
Quiet = Annotated[bool, option(_OUTPUT, "--quiet", help="Only the text, errors and --check.")]
Verbose = Annotated[bool, option(_OUTPUT, "--verbose", help="llama.cpp's own log on stderr.")]
Color = Annotated[
    bool,
    option(_OUTPUT, "--color", help="Show draft, bonus, residual and plain target tokens apart."),
]
CheckOption = Annotated[
    bool, option(_OUTPUT, "--check", help="Compare with the target alone afterwards.")
]


def read_prompt(prompt: str | None, file: str | None) -> str:
    """The prompt from -p, -f or standard input (``-``, or a pipe when neither is given).

    What is read is UTF-8, with or without a byte order mark, any newlines, and without the
    one newline that ends a file.
    """
    if prompt is not None and file is not None:
        raise UsageError("give either -p or -f, not both")
    piped = sys.stdin is not None and not sys.stdin.isatty()
    if "-" in (prompt, file) or (prompt is None and file is None and piped):
        return _text_of(sys.stdin.buffer.read() if sys.stdin else b"", "standard input")
    if file is not None:
        return read_text_file(Path(file))
    if prompt is None:
        raise UsageError("no prompt", hint='give one with -p "...", -f FILE or on stdin')
    return prompt


def read_text_file(path: Path) -> str:
    """A text file. Raises UsageError where it cannot be read, or is not UTF-8."""
    try:
        return _text_of(path.read_bytes(), str(path))
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error


def _text_of(data: bytes, name: str) -> str:
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"{name} is not UTF-8 text") from error
    return text.replace("\r\n", "\n").removesuffix("\n")


def parse_logit_bias(items: list[str] | None) -> dict[int, float]:
    """llama.cpp's TOKEN_ID(+/-)BIAS, such as 15043+1 or 15043-inf."""
    biases: dict[int, float] = {}
    for item in items or []:
        found = re.fullmatch(r"(\d+)([+-](?:\d+(?:\.\d*)?|\.\d+|inf))", item)
        if not found:
            raise UsageError(
                f"--logit-bias is {item}, but must be a token id and a signed number",
                hint="for example 15043+1, 15043-0.5 or 15043-inf",
            )
        token = int(found[1])
        biases[token] = biases.get(token, 0.0) + float(found[2])
    return biases


def parse_size(text: str, option: str) -> int:
    """Bytes, from 12G, 500M or a number. Raises UsageError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if not found:
        raise UsageError(f"{option} is {text}, but must be a size such as 12G or 500M")
    return int(float(found[1]) * _UNITS[found[2].upper()])
