"""Prompts of the benchmark besides those of `qdraft bench` (qdraft/study/prompts.py)."""

from __future__ import annotations

TUNING = (
    "Write a JavaScript function that removes duplicates from an array.",
    "Tell me a short story about a lighthouse keeper.",
)
_FACTS = (
    "The bridge was built in 1872 and carries two tracks and a footpath. Its arches stand on rock. "
    "In the flood of 1913 the water reached the rail, and the signalman stopped the night train by "
    "lantern. Since 1960 the line is electric; the masts were painted green to please the town. "
)
LONG = "Answer in one sentence what happened in 1913.\n\n" + _FACTS * 7
