"""How studies sample: as the options say, else as the target's file recommends."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from qdraft.cli.options.sampling import SamplingOptions
from qdraft.decoding.records import SamplingParams
from qdraft.gguf.recommended import describe

log = logging.getLogger(__name__)

PENALTIES = ("repeat_penalty", "repeat_last_n")  # which a recording cannot answer


def follow(
    values: Mapping[str, float],
    options: SamplingOptions,
    *,
    without: tuple[str, ...] = (),
    quiet: bool = False,
) -> tuple[SamplingParams, dict[str, float]]:
    """Return how to sample, and the recommended ``values`` that count, which one line says.

    Those of ``without`` never count. Raises UsageError.
    """
    values = {name: value for name, value in values.items() if name not in without}
    params = options.params(values)
    used = {name: value for name, value in values.items() if name not in options.given}
    if used and not quiet:
        log.info("sampling as the target's file recommends: %s", describe(used))
    return params, used
