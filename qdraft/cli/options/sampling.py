"""How tokens are chosen, under llama.cpp's names and with its defaults."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from qdraft.cli.escapes import process_escapes
from qdraft.cli.options.group import Group, Sets, option
from qdraft.decoding.records import SamplingParams
from qdraft.errors import UsageError
from qdraft.gguf.recommended import apply

_PANEL = "Sampling"


@dataclass(frozen=True, kw_only=True)
class SamplingOptions(Group):
    """How tokens are chosen from the target's logits."""

    temperature: Annotated[
        float,
        option(
            _PANEL,
            "--temp",
            "--temperature",
            help="Sampling temperature; 0 always takes the likeliest token.",
        ),
    ] = 0.8
    top_k: Annotated[
        int,
        option(_PANEL, "--top-k", help="Sample from the k likeliest tokens; 0 turns this off."),
    ] = 40
    top_p: Annotated[
        float,
        option(
            _PANEL,
            "--top-p",
            help="Sample from the likeliest tokens that together have this probability; "
            "1 turns this off.",
        ),
    ] = 0.95
    min_p: Annotated[
        float,
        option(
            _PANEL,
            "--min-p",
            help="Drop tokens below this share of the likeliest token's probability; "
            "0 turns this off.",
        ),
    ] = 0.05
    typical_p: Annotated[
        float,
        option(
            _PANEL,
            "--typical-p",
            "--typical",
            help="Sample from the most typical tokens that together have this probability; "
            "1 turns this off.",
        ),
    ] = 1.0
    repeat_penalty: Annotated[
        float,
        option(
            _PANEL,
            "--repeat-penalty",
            help="Penalize tokens that are already in the text; 1 turns this off.",
        ),
    ] = 1.0
    repeat_last_n: Annotated[
        int,
        option(
            _PANEL,
            "--repeat-last-n",
            help="Number of last tokens that the penalties look at; -1 is the whole text.",
        ),
    ] = 64
    presence_penalty: Annotated[
        float,
        option(
            _PANEL,
            "--presence-penalty",
            help="Lower the logit of each token in the text by this; 0 turns this off.",
        ),
    ] = 0.0
    frequency_penalty: Annotated[
        float,
        option(
            _PANEL,
            "--frequency-penalty",
            help="Lower a token's logit by this for each time it is in the text; 0 turns this off.",
        ),
    ] = 0.0
    top_n_sigma: Annotated[
        float,
        option(
            _PANEL,
            "--top-nsigma",
            "--top-n-sigma",
            help="Drop tokens more than this many standard deviations below the largest logit; "
            "-1 turns this off.",
        ),
    ] = -1.0
    xtc_probability: Annotated[
        float,
        option(
            _PANEL,
            "--xtc-probability",
            help="Chance that XTC drops the likeliest of several likely tokens; 0 turns this off.",
        ),
    ] = 0.0
    xtc_threshold: Annotated[
        float,
        option(
            _PANEL,
            "--xtc-threshold",
            help="Probability from which XTC counts a token as likely; above 0.5 turns XTC off.",
        ),
    ] = 0.1
    dynatemp_range: Annotated[
        float,
        option(
            _PANEL,
            "--dynatemp-range",
            help="Range of the dynamic temperature around --temp, by entropy; 0 turns this off.",
        ),
    ] = 0.0
    dynatemp_exp: Annotated[
        float,
        option(
            _PANEL,
            "--dynatemp-exp",
            help="Exponent of the entropy in the dynamic temperature.",
        ),
    ] = 1.0
    dry_multiplier: Annotated[
        float,
        option(
            _PANEL,
            "--dry-multiplier",
            help="Weight of DRY, which penalizes tokens that prolong a repetition; "
            "0 turns this off.",
        ),
    ] = 0.0
    dry_base: Annotated[
        float,
        option(
            _PANEL,
            "--dry-base",
            help="Factor by which each repeated token raises the penalty of DRY.",
        ),
    ] = 1.75
    dry_allowed_length: Annotated[
        int,
        option(
            _PANEL,
            "--dry-allowed-length",
            help="Repeated tokens from which on DRY penalizes.",
        ),
    ] = 2
    dry_penalty_last_n: Annotated[
        int,
        option(
            _PANEL,
            "--dry-penalty-last-n",
            help="Number of last tokens in which DRY looks for repetitions; -1 is the whole text.",
        ),
    ] = 64
    dry_sequence_breaker: Annotated[
        list[str] | None,
        option(
            _PANEL,
            "--dry-sequence-breaker",
            help="Text that no repetition of DRY goes beyond (repeatable); none uses no breaker.",
            default='\\n : " *',
        ),
        Sets("dry_sequence_breakers"),
    ] = None
    logit_bias: Annotated[
        list[str] | None,
        option(
            _PANEL,
            "-l",
            "--logit-bias",
            help="Add to the logit of a token: TOKEN_ID+BIAS or TOKEN_ID-BIAS; -inf bans the "
            "token (repeatable).",
        ),
    ] = None
    seed: Annotated[
        int,
        option(
            _PANEL,
            "-s",
            "--seed",
            help="Random seed; -1 draws one. A seed repeats a text under --verification coupled, "
            "or under --draft-policy fixed.",
        ),
    ] = -1

    def params(self, recommended: Mapping[str, float] | None = None) -> SamplingParams:
        """How to choose tokens; the seed belongs to ``DecodeParams``. Raises UsageError.

        ``recommended`` are values by the names of ``SamplingParams``, in the place of defaults.
        """
        values = {k: v for k, v in (recommended or {}).items() if k not in self.given}
        sampling = SamplingParams(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            typical_p=self.typical_p,
            repeat_penalty=self.repeat_penalty,
            repeat_last_n=self.repeat_last_n,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=parse_logit_bias(self.logit_bias),
            top_n_sigma=self.top_n_sigma,
            xtc_probability=self.xtc_probability,
            xtc_threshold=self.xtc_threshold,
            dynatemp_range=self.dynatemp_range,
            dynatemp_exp=self.dynatemp_exp,
            dry_multiplier=self.dry_multiplier,
            dry_base=self.dry_base,
            dry_allowed_length=self.dry_allowed_length,
            dry_penalty_last_n=self.dry_penalty_last_n,
            dry_sequence_breakers=self._breakers(),
        )
        return apply(sampling, values)

    def _breakers(self) -> tuple[str, ...]:
        """The sequence breakers of DRY; those that are given replace the default ones."""
        name = "--dry-sequence-breaker"
        if self.dry_sequence_breaker is None:
            return SamplingParams().dry_sequence_breakers
        texts = self.dry_sequence_breaker
        return tuple(process_escapes(text, name) for text in texts if text != "none")


@dataclass(frozen=True, kw_only=True)
class TemperatureOptions(Group):
    """The temperatures of a study."""

    temperatures: Annotated[
        str,
        option(
            _PANEL,
            "--temp",
            "--temperature",
            help="Sampling temperatures, for example 0,0.7,1; 0 always takes the likeliest token.",
        ),
        Sets("temperature"),
    ] = "0,1"

    def parse_temperatures(self) -> tuple[float, ...]:
        """Return the temperatures, each once. Raises UsageError."""
        text = self.temperatures
        try:
            temperatures = tuple(dict.fromkeys(float(part) for part in text.split(",")))
        except ValueError:
            temperatures = (-1.0,)
        if any(not 0 <= t < float("inf") for t in temperatures):
            raise UsageError(
                f"--temp is {text} but must be numbers of at least 0",
                hint="give, for example, --temp 0,0.7,1",
            )
        return temperatures


def parse_logit_bias(items: list[str] | None) -> dict[int, float]:
    """Return the bias of each token of llama.cpp's TOKEN_ID(+/-)BIAS. Raises UsageError."""
    biases: dict[int, float] = {}
    for item in items or []:
        match = re.fullmatch(r"(\d+)([+-](?:\d+(?:\.\d*)?|\.\d+|inf))", item)
        if not match:
            raise UsageError(
                f"--logit-bias is {item} but must be a token id and a signed number",
                hint="give, for example, 15043+1, 15043-0.5 or 15043-inf",
            )
        token = int(match[1])
        biases[token] = biases.get(token, 0.0) + float(match[2])
    return biases
