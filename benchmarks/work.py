"""The kinds of work that the benchmarks measure: prompts of our own."""

from __future__ import annotations

KINDS: dict[str, tuple[str, ...]] = {
    "code": (
        "Write a Python function that sorts a list using quicksort.",
        "Write a C program that reads numbers and prints their mean.",
    ),
    "translation": (
        "Translate to French: I would like a cup of tea and two rolls with butter, please.",
        "Translate to Spanish: The museum opens at nine and closes when the last visitor has left.",
    ),
    "question": (
        "What is the capital of France and what is it famous for?",
        "How does a refrigerator keep food cold?",
    ),
    "summary": (
        "Summarize in two sentences: The village had one well, and it stood in the square. In dry "
        "summers people queued from dawn, and the miller's wife kept a list, so that nobody drew "
        "twice before all had drawn once. When the pipes came, the well was covered. The list "
        "hangs in the town hall now, beside the names of the mayors, and visitors ask who these "
        "people were. They were thirsty, says the clerk, and fair.",
        "Summarize in two sentences: Honey bees dance to tell others where food is. The angle of "
        "the dance to the vertical gives the direction from the sun, its length the distance. "
        "Bees that follow the dance in the dark hive fly out and find the place, even behind a "
        "hill.",
    ),
    "mathematics": (
        "A train travels 180 km in 2.5 hours. What is its average speed? Explain each step.",
        "What is 15 % of 240, and how do you work it out without a calculator?",
    ),
    "story": (
        "Tell me a short story about a dragon who is afraid of fire.",
        "Tell me a short story about two clocks that disagree.",
    ),
}
WARM = "Explain in a few sentences how rain forms, and name three kinds of clouds."
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
