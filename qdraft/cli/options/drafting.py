"""What drafts, how many tokens, and how the target verifies them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from qdraft.cli.options.group import Formerly, Group, option
from qdraft.decoding.drafters.kinds import KINDS, DrafterKind
from qdraft.decoding.records import DecodeParams
from qdraft.errors import require
from qdraft.llama.spec import SHARE_KV

_PANEL = "Drafting"


@dataclass(frozen=True, kw_only=True)
class DraftingOptions(Group):
    """What drafts, how many tokens, and how the target verifies them."""

    drafter: Annotated[
        str,
        option(
            _PANEL,
            "--drafter",
            help="What drafts: the draft model (model), repetitions in the text (ngram), or both "
            "(hybrid).",
        ),
    ] = "model"
    draft_policy: Annotated[
        str,
        option(
            _PANEL,
            "--draft-policy",
            help="How many tokens to draft: auto goes by measured costs, fixed drafts --n-draft "
            "tokens, confidence stops below --p-min.",
        ),
    ] = "auto"
    n_draft: Annotated[
        int | None,
        option(
            _PANEL,
            "--n-draft",
            help="Tokens to draft per round at most.",
            default="63 under auto, else 4",
        ),
    ] = None
    p_min: Annotated[
        float | None,
        option(
            _PANEL,
            "--p-min",
            help="Stop drafting if the draft's top probability falls below this.",
            default="0.5 under confidence, else 0",
        ),
    ] = None
    verification: Annotated[
        str,
        option(
            _PANEL,
            "--verification",
            help="How the target accepts sampled drafts: as a whole (block), token by token "
            "(token), or if it chooses the same token (coupled). Under coupled, a seed gives the "
            "same text whatever is drafted.",
        ),
        Formerly("--verify"),
    ] = "block"
    share_kv: Annotated[
        str,
        option(
            _PANEL,
            "--share-kv",
            help="Whether the draft reads the target's KV cells: auto, on or off.",
        ),
    ] = "auto"
    exact: Annotated[
        bool,
        option(
            _PANEL,
            "--exact",
            help="Draft only if the target's rows stay bit-identical to decoding one token at a "
            "time.",
        ),
    ] = False

    def __post_init__(self) -> None:
        require(self.drafter in KINDS, "drafter", self.drafter, f"one of {', '.join(KINDS)}")
        require(
            self.share_kv in SHARE_KV, "share_kv", self.share_kv, f"one of {', '.join(SHARE_KV)}"
        )

    @property
    def kind(self) -> DrafterKind:
        """What the drafter needs."""
        return KINDS[self.drafter]

    def params(
        self,
        *,
        n_predict: int = -1,
        seed: int = -1,
        stop: tuple[str, ...] = (),
        special: bool = False,
    ) -> DecodeParams:
        """How to decode a text. Raises UsageError."""
        return DecodeParams(
            n_predict=n_predict,
            drafter=self.drafter,
            n_draft=self.n_draft,
            draft_policy=self.draft_policy,
            p_min=self.p_min,
            verification=self.verification,
            exact=self.exact,
            stop=stop,
            special=special,
            seed=seed,
        )
