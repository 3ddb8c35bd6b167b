"""`qdraft replay`: other settings tried on a record of a pair, without the models."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from qdraft.cli.options.drafting import DraftingOptions
from qdraft.cli.options.group import Defaults, Only, option, takes_options
from qdraft.cli.options.output import StudyOutputOptions
from qdraft.cli.options.sampling import SamplingOptions
from qdraft.cli.options.study import CostOptions, parse_costs
from qdraft.cli.recommendation import PENALTIES, follow
from qdraft.cli.study_view import StudyView, show_study
from qdraft.decoding.policy.model import Costs
from qdraft.errors import UsageError
from qdraft.render import tune as render
from qdraft.render.progress import ProgressBars
from qdraft.study.recording import load
from qdraft.study.replay import can_share, choose_sampling, make_synthetic, read_recommended
from qdraft.study.tune import choose_ways, conclude_replay, read_costs, replay_ways

_PANEL = "Acceptance"

Record = Annotated[
    Path | None, typer.Argument(metavar="[RECORD]", help="Record that qdraft tune --record wrote.")
]


@dataclass(frozen=True, kw_only=True)
class ReplayCostOptions(CostOptions):
    """Costs and acceptance in place of those that were recorded."""

    alpha: Annotated[
        float | None,
        option(
            _PANEL,
            "--alpha",
            help="Replay without a record: accept every token with this probability.",
        ),
    ] = None

    def costs(self, recorded: Costs | None) -> Costs:
        """Return the recorded costs, with those that were given. Raises UsageError."""
        if recorded is None and (self.c is None or not self.v):
            raise UsageError("--alpha needs --c and --v")
        c = self.c if self.c is not None else recorded.of_model if recorded else 0.0
        v = parse_costs(self.v) if self.v else recorded.v if recorded else {}
        return Costs({"model": c}, v)


@takes_options
def replay(
    costs: ReplayCostOptions,
    drafting: Annotated[
        DraftingOptions,
        Only("draft_policy", "n_draft", "p_min", "verification", "share_kv"),
        Defaults(draft_policy=None),
    ],
    sampling: Annotated[SamplingOptions, Only("temperature", "top_k", "top_p", "min_p")],
    output: StudyOutputOptions,
    record: Record = None,
) -> None:
    """Replay a recorded pair with another draft length, temperature, policy or machine.

    The decoding loop runs on the recorded distributions, so a replay takes seconds and needs no
    models. Without --c or --v, the costs are those of the record. Without --draft-policy,
    --n-draft or --p-min, qdraft replays every way to draft.
    """
    if record is None and costs.alpha is None:
        raise UsageError(
            "there is no record to replay", hint="name one, or give --alpha with --c and --v"
        )
    if record and costs.alpha is not None:
        raise UsageError("--alpha cannot be combined with a record")
    recording = load(record) if record else make_synthetic(costs.alpha or 0.0)
    chosen, recommended = follow(
        read_recommended(recording), sampling, without=PENALTIES, quiet=output.quiet
    )
    params = choose_sampling(recording, chosen)
    replayed_costs = costs.costs(read_costs(recording))
    ways = choose_ways(
        drafting.draft_policy, drafting.n_draft, drafting.p_min, drafting.verification
    )
    share_kv = can_share(recording, drafting.share_kv)
    with ProgressBars(quiet=output.quiet) as bars:
        tried = replay_ways(
            recording, replayed_costs, params, ways, share_kv=share_kv, progress=bars.report
        )
    about = {"record": record, "alpha": costs.alpha, "sampling": params, "recommended": recommended}
    view = StudyView(
        "qdraft replay",
        render.sheets(tried),
        render.charts(tried, replayed_costs),
        render.report(tried, replayed_costs, about),
        [conclude_replay(tried)],
    )
    show_study(view, output)
