"""`qdraft run`: one prompt, one text, one summary."""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterable
from contextlib import closing
from dataclasses import replace
from itertools import islice

import typer

from qdraft.cli.opening import open_described
from qdraft.cli.options.constraint import ConstraintOptions
from qdraft.cli.options.devices import DeviceOptions
from qdraft.cli.options.drafting import DraftingOptions
from qdraft.cli.options.group import takes_options
from qdraft.cli.options.models import ModelOptions
from qdraft.cli.options.output import RunOutputOptions
from qdraft.cli.options.prompt_cache import PromptCacheOptions
from qdraft.cli.options.sampling import SamplingOptions
from qdraft.cli.options.template import ChatTemplateOptions
from qdraft.cli.options.text import TextOptions
from qdraft.decoding.records import Chunk, FinishReason
from qdraft.errors import QDraftError, UsageError
from qdraft.llama.progress import no_progress
from qdraft.render.console import TextStream, show_json, talk_console
from qdraft.render.placed import placed_view
from qdraft.render.progress import ProgressBars
from qdraft.render.run import check_view, run_report, summary_view
from qdraft.session.check import Check
from qdraft.session.endless import ban_ends
from qdraft.session.generation import Generation
from qdraft.session.pair import Pair
from qdraft.session.session import Session

log = logging.getLogger(__name__)

INTERRUPTED = 130


@takes_options
def run(  # noqa: PLR0913 (one group each)
    models: ModelOptions,
    text: TextOptions,
    template: ChatTemplateOptions,
    sampling: SamplingOptions,
    constraints: ConstraintOptions,
    drafting: DraftingOptions,
    devices: DeviceOptions,
    prompt_cache: PromptCacheOptions,
    output: RunOutputOptions,
) -> None:
    """Generate text from a prompt.

    The draft proposes tokens and the target verifies them, so the text is exactly the target's.
    The text goes to stdout as qdraft generates it, everything else to stderr.

    If the target's file recommends how to sample, that replaces the defaults of the sampling
    options.

    Without --model or --pair, qdraft runs the default pair of models.yaml. It builds the default
    pair in your cache on first use.
    """
    params = drafting.params(
        n_predict=text.n_predict, seed=sampling.seed, stop=text.stops(), special=text.special
    )
    constraint = constraints.read(ignores_eos=text.ignore_eos)
    params = replace(params, logprobs=output.logprobs, constraint=constraint)
    sampling.params()  # raises before anything is loaded
    refuse_combinations(models, drafting, devices)
    output.set_log_levels()
    devices.engines()  # raises before the prompt is read
    if text.raw:
        template.refuse_raw()
    if output.as_json and template.hide_reasoning:
        raise UsageError("--hide-reasoning cannot be combined with --json")
    template_text = template.template_text()
    prompt_cache.require_readable()
    prompt = text.read_prompt()
    keep_draft = drafting.kind.requires_draft
    with open_described(
        models,
        devices,
        drafting,
        keep_draft=keep_draft,
        quiet=output.quiet,
        template=template_text,
    ) as pair:
        if not models.no_draft:
            params = pair.choose_drafter(params)
        sampling_params = sampling.params(pair.recommended.values)
        if text.ignore_eos:
            sampling_params = ban_ends(sampling_params, pair.vocab)
        cache = prompt_cache.of_pair(pair)
        session = Session(pair, keep=cache is not None)
        generation = session.generate(
            prompt,
            sampling_params,
            params,
            system=text.system_message(),
            raw=text.raw,
            parse_special=text.parse_special,
            template=template.for_model(pair.vocab),
            split_reasoning=template.splits and not text.raw,
        )
        chunks: Iterable[Chunk] = generation
        if cache:
            cache.restore(session, generation.prompt)
            cache.require_space(len(generation.prompt), params.n_predict)
            chunks = cache.saving(session, generation)
        stream = None
        if not output.as_json:
            shows = not (output.quiet or template.hide_reasoning)
            stream = TextStream(color=output.color, raw=output.raw_output, reasoning=shows)
        raise typer.Exit(show_text(pair, generation, output, stream, chunks))


def refuse_combinations(
    models: ModelOptions, drafting: DraftingOptions, devices: DeviceOptions
) -> None:
    """Raise UsageError for options of a draft that is not there."""
    of_draft = devices.first_given_of_draft()
    if models.no_draft and (option := drafting.first_given() or of_draft):
        raise UsageError(f"{option} cannot be combined with --no-draft")
    of_model = drafting.first_given("share_kv") or of_draft
    if of_model and not drafting.kind.needs_draft:
        raise UsageError(f"{of_model} cannot be combined with --drafter {drafting.drafter}")


def show_text(
    pair: Pair,
    generation: Generation,
    output: RunOutputOptions,
    stream: TextStream | None,
    chunks: Iterable[Chunk],
) -> int:
    """Stream the text, then show the figures, whatever ended the text; return the exit code."""
    check = None
    try:
        with closing(with_progress(pair, chunks, quiet=output.quiet)) as shown:
            for chunk in shown:
                if stream:
                    stream.write(chunk)
        if output.check:
            check = generation.check()
        status = 0
    except KeyboardInterrupt:
        status = INTERRUPTED
    except QDraftError:
        _show_figures(pair, generation, output, None, stream)
        raise
    _show_figures(pair, generation, output, check, stream)
    if generation.finish_reason is FinishReason.CONTEXT_FULL:
        log.warning(
            "the context of %d tokens is full (prompt %d, text %d), so the text ends here: raise "
            "--ctx-size, or shorten the prompt",
            pair.contexts.target.n_ctx,
            len(generation.prompt),
            len(generation.tokens),
        )
    return status


def with_progress(
    pair: Pair, text: Iterable[Chunk], *, quiet: bool
) -> Generator[Chunk, None, None]:
    """Give the chunks of a text; if reading the prompt takes long, show how far that is."""
    chunks = iter(text)
    with ProgressBars(quiet=quiet) as bars:
        pair.show_progress(bars.report)
        try:
            first = list(islice(chunks, 1))
        finally:
            pair.show_progress(no_progress)
    try:
        yield from first
        yield from chunks
    finally:
        if isinstance(chunks, Generator):
            chunks.close()


def _show_figures(
    pair: Pair,
    generation: Generation,
    output: RunOutputOptions,
    check: Check | None,
    stream: TextStream | None,
) -> None:
    if stream is None:
        show_json(run_report(pair, generation, check))
        return
    stream.end(generation.text)
    greedy = generation.sampling.greedy
    if not output.quiet and (placed := placed_view(pair)):
        talk_console().print(placed)
    if not output.quiet and generation.rounds:
        seed = None if greedy else generation.seed
        talk_console().print(
            summary_view(
                generation.summary,
                generation.finish_reason,
                seed,
                generation.bit_identity,
                pair.recommended.used_in(generation.sampling),
            )
        )
    if check:
        talk_console().print(check_view(check))
