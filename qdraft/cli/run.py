"""`qdraft run`: one prompt, one text, one summary."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

import typer

from qdraft.cli import options as opt
from qdraft.cli.machine_options import Machine, takes_machine
from qdraft.cli.opening import Models, open_models
from qdraft.decoding.records import DecodeParams, SamplingParams
from qdraft.errors import QDraftError, UsageError
from qdraft.render.console import TextStream, show_json, talk_console
from qdraft.render.placed import placed_view
from qdraft.render.report import run_report
from qdraft.render.summary import check_view, summary_view
from qdraft.session.check import Check
from qdraft.session.generation import Generation
from qdraft.session.pair import Pair

INTERRUPTED = 130


@takes_machine
def run(
    target: opt.Target = None,
    draft: opt.DraftFile = None,
    pair: opt.PairName = None,
    models_file: opt.ModelsFile = None,
    no_draft: opt.NoDraft = False,
    prompt: opt.Prompt = None,
    file: opt.PromptFile = None,
    system: opt.System = None,
    raw: opt.Raw = False,
    n_predict: opt.NPredict = -1,
    stop: opt.Stop = None,
    temperature: opt.Temperature = 0.8,
    top_k: opt.TopK = 40,
    top_p: opt.TopP = 0.95,
    min_p: opt.MinP = 0.05,
    typical_p: opt.TypicalP = 1.0,
    repeat_penalty: opt.RepeatPenalty = 1.0,
    repeat_last_n: opt.RepeatLastN = 64,
    presence_penalty: opt.PresencePenalty = 0.0,
    frequency_penalty: opt.FrequencyPenalty = 0.0,
    logit_bias: opt.LogitBias = None,
    seed: opt.Seed = -1,
    drafter: opt.DrafterName = "model",
    draft_policy: opt.DraftPolicy = "auto",
    n_draft: opt.NDraft = None,
    p_min: opt.PMin = None,
    verify: opt.Verify = "block",
    share_kv: opt.ShareKv = "auto",
    exact: opt.Exact = False,
    ctx_size: opt.CtxSize = None,
    ctx_size_draft: opt.CtxSizeDraft = None,
    machine: Machine = Machine(),  # noqa: B008 (frozen)
    batch_size: opt.BatchSize = 2048,
    ubatch_size: opt.UbatchSize = None,
    as_json: opt.Json = False,
    quiet: opt.Quiet = False,
    verbose: opt.Verbose = False,
    color: opt.Color = False,
    check: opt.CheckOption = False,
) -> None:
    """Generate text: the draft proposes, the target verifies, the text is exactly the target's.

    Text goes to stdout as it is made, everything else to stderr.

    Without a model the default pair of models.yaml runs, built into your cache on first use.
    """
    sampling = SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        typical_p=typical_p,
        repeat_penalty=repeat_penalty,
        repeat_last_n=repeat_last_n,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        logit_bias=opt.parse_logit_bias(logit_bias),
    )
    params = DecodeParams(
        n_predict=n_predict,
        drafter=drafter,
        n_draft=n_draft,
        draft_policy=draft_policy,
        p_min=p_min,
        verification=verify,
        exact=exact,
        stop=tuple(stop or ()),
        seed=seed,
    )
    output = Output(as_json=as_json, quiet=quiet, verbose=verbose, color=color, check=check)
    models = Models(target, draft, pair, models_file, no_draft, drafter == "ngram", share_kv)
    of_draft = (ctx_size_draft, machine.of_draft, share_kv)
    if drafter == "ngram" and of_draft != (None, False, "auto"):
        raise UsageError("--drafter ngram and options of a draft model do not go together")
    drafting = (*of_draft, n_draft, p_min, verify, draft_policy, drafter, exact)
    plain = (None, False, "auto", None, None, "block", "auto", "model", False)
    if no_draft and drafting != plain:
        raise UsageError("--no-draft and options of the draft do not go together")
    engines = machine.engines(ctx_size, ctx_size_draft, batch_size, ubatch_size)
    text = opt.read_prompt(prompt, file)
    hybrid = drafter == "hybrid"
    with open_models(models, *engines, machine.servers, keep_draft=hybrid, quiet=quiet) as opened:
        if opened.draft is None and opened.can_draft and not no_draft and drafter == "model":
            params = replace(params, drafter="ngram")  # better than nothing, and it costs nothing
        generation = opened.generate(text, sampling, params, system=system, raw=raw)
        raise typer.Exit(_show(opened, generation, output, greedy=sampling.temperature == 0))


@dataclass(frozen=True, slots=True)
class Output:
    """What is shown, and where."""

    as_json: bool
    quiet: bool
    verbose: bool
    color: bool
    check: bool

    def __post_init__(self) -> None:
        if self.as_json and self.color:
            raise UsageError("--json and --color do not go together: JSON is never coloured")
        if self.quiet and self.verbose:
            raise UsageError("--quiet and --verbose do not go together")
        if self.verbose:
            logging.getLogger("qdraft.llama.cpp").setLevel(logging.DEBUG)
        if self.quiet:
            logging.getLogger("qdraft").setLevel(logging.ERROR)


def _show(pair: Pair, generation: Generation, output: Output, *, greedy: bool) -> int:
    """Stream the text, then show the figures, whatever ended it; the exit code."""
    stream = None if output.as_json else TextStream(color=output.color)
    checked = None
    try:
        for chunk in generation:
            if stream:
                stream.write(chunk)
        if output.check:
            checked = generation.check()
        status = 0
    except KeyboardInterrupt:
        status = INTERRUPTED
    except QDraftError:
        _show_figures(pair, generation, output, None, stream, greedy=greedy)
        raise
    _show_figures(pair, generation, output, checked, stream, greedy=greedy)
    return status


def _show_figures(
    pair: Pair,
    generation: Generation,
    output: Output,
    checked: Check | None,
    stream: TextStream | None,
    *,
    greedy: bool,
) -> None:
    if stream is None:
        show_json(run_report(pair, generation, checked))
        return
    stream.end(generation.text)
    if not output.quiet and (where := placed_view(pair)):
        talk_console().print(where)
    if not output.quiet and generation.rounds:
        seed = None if greedy else generation.seed
        talk_console().print(
            summary_view(
                generation.summary, generation.finish_reason, seed, generation.bit_identity
            )
        )
    if checked:
        talk_console().print(check_view(checked, greedy=greedy))
