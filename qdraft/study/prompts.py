"""The kinds of tasks to measure a pair on, and prompts for them: built-in ones, or a file's."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qdraft.errors import UsageError
from qdraft.text_file import read_text, require_unicode


@dataclass(frozen=True, slots=True)
class Task:
    """One prompt, and the kind of task that it is."""

    kind: str
    prompt: str


TASK_KINDS: dict[str, tuple[str, ...]] = {
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
WARM_UP = "Explain in a few sentences how rain forms, and name three kinds of clouds."

# Keys under which files of prompts name the kind and the prompt; Spec-Bench has category and turns.
_KIND_KEYS = ("kind", "category", "task")
_PROMPT_KEYS = ("prompt", "turns", "question", "instruction")


def built_in(kinds: Iterable[str] | None = None, n_each: int = 1) -> list[Task]:
    """``n_each`` of our own prompts for each kind (None: all kinds). Raises UsageError."""
    wanted = list(kinds) if kinds is not None else list(TASK_KINDS)
    unknown = [kind for kind in wanted if kind not in TASK_KINDS]
    if unknown:
        raise UsageError(
            f"unknown kind of task {unknown[0]}", hint=f"use one of {', '.join(TASK_KINDS)}"
        )
    return [Task(kind, prompt) for kind in wanted for prompt in TASK_KINDS[kind][:n_each]]


def read_tasks(path: Path, kinds: Sequence[str] | None = None) -> list[Task]:
    """Tasks from a JSONL file: one object a line, with ``prompt`` and, if it is known, ``kind``.

    Spec-Bench's question file works too (``category``, and the first of ``turns``). ``kinds``
    keeps only the tasks of these kinds. Raises UsageError with the number of a line that is wrong.
    """
    # Only newlines end a line: JSON text may hold other separators, such as U+2028.
    lines = read_text(path).replace("\r\n", "\n").split("\n")
    tasks = [
        _read_task(line, f"{path}, line {n}")
        for n, line in enumerate(lines, start=1)
        if line.strip()
    ]
    if kinds is not None:
        present = {task.kind for task in tasks}
        unknown = [kind for kind in kinds if kind not in present]
        if unknown:
            known = ", ".join(sorted(present))
            raise UsageError(
                f"{path} has no prompt of kind {unknown[0]}", hint=f"use one of {known}"
            )
        tasks = [task for task in tasks if task.kind in kinds]
    if not tasks:
        raise UsageError(f"{path} has no prompts")
    return tasks


def _read_task(line: str, where: str) -> Task:
    try:
        data = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where}: not a JSON object: {error}") from error
    if not isinstance(data, dict):
        raise UsageError(f"{where}: not a JSON object")
    prompt = _first(data, _PROMPT_KEYS)
    if isinstance(prompt, list):  # turns of a conversation
        prompt = prompt[0] if prompt else None
    if not isinstance(prompt, str) or not prompt.strip():
        raise UsageError(
            f"{where}: no prompt", hint='write a line like {"kind": "...", "prompt": "..."}'
        )
    require_unicode(prompt, f"{where}: the prompt")
    kind = _first(data, _KIND_KEYS)
    if kind is not None and not isinstance(kind, str):
        raise UsageError(f"{where}: the kind must be text, not {json.dumps(kind)[:80]}")
    require_unicode(kind or "", f"{where}: the kind")
    return Task(kind or "prompts", prompt)


def _first(data: dict[str, Any], keys: Sequence[str]) -> Any:
    return next((data[key] for key in keys if key in data), None)
