"""A pair as the command lines and files of other programs.

Programs rename their options. ``LLAMA_CPP`` and the other stamps say which build each was read in.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from qdraft.errors import UsageError

LLAMA_CPP = "llama.cpp b11549, and 0c1e57098 in llama-cpp-python 0.3.36"
IK_LLAMA_CPP = "ik_llama.cpp 8337e4cd"
KOBOLDCPP = "a table of koboldcpp's options; no build was checked"
LM_STUDIO = "LM Studio's REST API; no version was checked"
OLLAMA = "Ollama fb307609"
VLLM = "the documents of vLLM 0.25"

_OTHER_ALL = "99"  # how programs that know no "all" are asked for all layers
_DRAFTS_WITH = {
    "model": "draft-simple",
    "ngram": "ngram-simple",
    "hybrid": "ngram-simple,draft-simple",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """A pair and how to run it.

    ``options`` are further options of llama.cpp by their long names without dashes; a flag has the
    value ``""``. ``n_draft`` is in tokens per round; None leaves it to a program that drafts from
    repetitions. ``n_ctx`` is in tokens.
    """

    name: str
    target: Path
    draft: Path | None
    n_ctx: int
    n_draft: int | None
    p_min: float = 0.0
    drafter: str = "model"
    template: str = ""
    options: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Exported:
    """What a program takes.

    ``checked_against`` names the build. ``command`` is the command line as arguments, None for a
    file. ``text`` is empty if the program cannot run the pair; ``reason`` then says why. ``notes``
    say what the program does not get, or should.
    """

    program: str
    checked_against: str
    text: str
    command: tuple[str, ...] | None = None
    notes: tuple[str, ...] = ()
    reason: str = ""


def export(program: str, settings: Settings) -> Exported:
    """Write the pair for ``program``, one of ``PROGRAMS``. Raises UsageError for another."""
    if program not in PROGRAMS:
        raise UsageError(f"PROGRAM is {program} but must be one of {', '.join(PROGRAMS)}")
    return PROGRAMS[program](settings)


def _llama_server(settings: Settings) -> Exported:
    command = ["llama-server", *_arguments(_llama_options(settings))]
    return _commands("llama-server", LLAMA_CPP, command, _llama_notes(settings))


def _llama_cli(settings: Settings) -> Exported:
    command = ["llama-cli", *_arguments(_llama_options(settings))]
    return _commands("llama-cli", LLAMA_CPP, command, _llama_notes(settings))


def _preset(settings: Settings) -> Exported:
    """The INI file of ``llama-server --models-preset``: option names without their dashes."""
    options = {"model": str(settings.target), **_llama_options(settings)}
    for value in (settings.name, *options.values()):
        if any(mark in value for mark in "#;\n\r]"):
            reason = f"a preset cannot hold {value!r}: #, ; and ] end a value or a name there"
            return Exported("preset", LLAMA_CPP, "", reason=reason)
    lines = [f"# checked against {LLAMA_CPP}", f"[{settings.name}]"]
    lines += [f"{name} = {value or 'true'}" for name, value in options.items()]
    notes = ("start it with llama-server --models-preset FILE", *_llama_notes(settings))
    return Exported("preset", LLAMA_CPP, "\n".join(lines) + "\n", notes=notes)


def _llama_options(settings: Settings) -> dict[str, str]:
    """llama.cpp's options, by their long names without dashes."""
    options = {"model": str(settings.target)}
    if settings.draft:
        options["spec-draft-model"] = str(settings.draft)
    options["spec-type"] = _DRAFTS_WITH[settings.drafter]
    if settings.draft:
        options["spec-draft-n-max"] = str(settings.n_draft)
        options["spec-draft-n-min"] = "0"
        options["spec-draft-p-min"] = f"{settings.p_min:g}"
    elif settings.n_draft:
        options["spec-ngram-simple-size-m"] = str(settings.n_draft)
    options["ctx-size"] = str(settings.n_ctx)
    if settings.template:
        options |= {"jinja": "", "chat-template-file": settings.template}
    return {**options, **settings.options}


def _llama_notes(settings: Settings) -> tuple[str, ...]:
    if not settings.draft:
        return ()
    notes = [
        "builds from b11368 on also take --spec-draft-sampling probabilistic, which accepts "
        "sampled drafts by rejection sampling, as qdraft does"
    ]
    if "rpc" in settings.options and "spec-draft-device" not in settings.options:
        notes.append(
            "llama.cpp may put the draft on an RPC server too; --spec-draft-device keeps it here"
        )
    return tuple(notes)


def _ik_llama(settings: Settings) -> Exported:
    if settings.draft is None or settings.drafter != "model":
        return _no_repetitions("ik_llama.cpp", IK_LLAMA_CPP)
    length = f"draft:n_max={settings.n_draft},p_min={settings.p_min:g}"
    known = {
        "gpu-layers": "-ngl",
        "spec-draft-ngl": "-ngld",
        "threads": "-t",
        "threads-batch": "-tb",
        "cache-type-k": "-ctk",
        "cache-type-v": "-ctv",
        "spec-draft-type-k": "-ctkd",
        "spec-draft-type-v": "-ctvd",
    }
    layers = {"gpu-layers": _OTHER_ALL, "spec-draft-ngl": _OTHER_ALL}
    options = {**layers, **settings.options}
    command = ["llama-server", "-m", str(settings.target), "-md", str(settings.draft)]
    command += ["--spec-type", length, "-c", str(settings.n_ctx)]
    command += _known_options(options, known, _OTHER_ALL)
    notes = _left_out(settings, known)
    return _commands("ik_llama.cpp", IK_LLAMA_CPP, command, notes)


def _koboldcpp(settings: Settings) -> Exported:
    if settings.draft is None or settings.drafter != "model":
        return _no_repetitions("koboldcpp", KOBOLDCPP)
    known = {
        "gpu-layers": "--gpulayers",
        "spec-draft-ngl": "--draftgpulayers",
        "threads": "--threads",
    }
    options = {"spec-draft-ngl": _OTHER_ALL, **settings.options}
    command = ["koboldcpp", "--model", str(settings.target), "--draftmodel", str(settings.draft)]
    command += ["--draftamount", str(settings.n_draft), "--contextsize", str(settings.n_ctx)]
    command += _known_options(options, known, _OTHER_ALL)
    notes = _left_out(settings, known, has_p_min=False)
    return _commands("koboldcpp", KOBOLDCPP, command, notes)


def _lm_studio(settings: Settings) -> Exported:
    if settings.draft is None or settings.drafter != "model":
        return _no_repetitions("lm-studio", LM_STUDIO)
    body = {"model": settings.target.stem, "draft_model": settings.draft.stem}
    notes = (
        "these are fields of a request's body; replace the names by the keys that lms ls lists",
        "LM Studio sets the draft length, the context and the layers in its own settings",
    )
    text = json.dumps(body, ensure_ascii=False, indent=2) + "\n"
    return Exported("lm-studio", LM_STUDIO, text, notes=notes)


def _ollama(settings: Settings) -> Exported:
    """A Modelfile of the target alone; its DRAFT is for heads that belong to a target."""
    reason = (
        "Ollama drafts with MTP and DFlash heads alone, so this runs the target without a draft"
    )
    known = {"threads": "num_thread", "gpu-layers": "num_gpu"}
    lines = [f"# checked against {OLLAMA}", f"# {reason}", f"FROM {settings.target}"]
    lines.append(f"PARAMETER num_ctx {settings.n_ctx}")
    for name, parameter in known.items():
        value = settings.options.get(name, "")
        if value.isdigit():
            lines.append(f"PARAMETER {parameter} {value}")
    if "\n" in str(settings.target):
        reason = "a Modelfile cannot hold a path with a line break"
        return Exported("ollama", OLLAMA, "", reason=reason)
    notes = (reason, *_left_out(settings, known))
    return Exported("ollama", OLLAMA, "\n".join(lines) + "\n", notes=notes)


def _vllm(settings: Settings) -> Exported:
    reason = "vLLM reads a GGUF file by a plugin, which loads no draft model"
    return Exported("vllm", VLLM, "", reason=reason)


PROGRAMS: dict[str, Callable[[Settings], Exported]] = {
    "llama-server": _llama_server,
    "llama-cli": _llama_cli,
    "preset": _preset,
    "ik_llama.cpp": _ik_llama,
    "koboldcpp": _koboldcpp,
    "lm-studio": _lm_studio,
    "ollama": _ollama,
    "vllm": _vllm,
}


def _no_repetitions(program: str, stamp: str) -> Exported:
    reason = f"qdraft knows no options of {program} that draft from repetitions in the text"
    return Exported(program, stamp, "", reason=reason)


def _arguments(options: Mapping[str, str]) -> list[str]:
    """Options by their long names as arguments."""
    return [text for name, value in options.items() for text in (f"--{name}", value) if text]


def _known_options(
    options: Mapping[str, str], known: Mapping[str, str], all_layers: str
) -> list[str]:
    """Those options that a program knows, under its own names."""
    return [
        text
        for name, own in known.items()
        if name in options
        for text in (own, all_layers if options[name] == "all" else options[name])
    ]


def _left_out(
    settings: Settings, known: Iterable[str], *, has_p_min: bool = True
) -> tuple[str, ...]:
    """A note for what a program does not get."""
    names = [name for name in settings.options if name not in known]
    if settings.template:
        names.append("chat-template-file")
    if settings.p_min and not has_p_min:
        names.append("spec-draft-p-min")
    if not names:
        return ()
    return (f"left out, because qdraft knows no option for it there: {', '.join(names)}",)


def _commands(program: str, stamp: str, command: Sequence[str], notes: tuple[str, ...]) -> Exported:
    """A command line for a POSIX shell, one option a line."""
    lines: list[str] = []
    for word in command[1:]:
        if word.startswith("-") and not _is_number(word):
            lines.append(word)
        else:
            lines[-1] += f" {shlex.quote(word)}"
    text = f"# checked against {stamp}\n" + " \\\n    ".join((command[0], *lines)) + "\n"
    return Exported(program, stamp, text, tuple(command), notes)


def _is_number(word: str) -> bool:
    return word[1:].replace(".", "", 1).isdigit()
