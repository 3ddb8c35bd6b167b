"""The newest llama.cpp that installs as a wheel: loads a model, and writes texts on demand.

Runs with the Python of an environment of its own, which newest_rival.py makes: two builds of
llama.cpp cannot share a process. The first line of stdin is a JSON object with the files and how to
draft, each further line one with a text. Each line is answered by one JSON object on stdout.
llama.cpp's log goes to stderr.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import xllamacpp


def load(asked: dict[str, Any]) -> xllamacpp.Server:
    """Start the in-process server on the same terms as llama.cpp's tools in rivals.py."""
    params = xllamacpp.CommonParams()
    params.model.path = asked["target"]
    params.n_ctx = asked["n_ctx"]
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_ENABLED
    params.no_extra_bufts = not asked["repack"]
    params.n_gpu_layers = 0
    params.fit_params = False
    params.cache_ram_mib = 0  # it would keep the prompts of earlier texts
    params.ui = False
    cpus = [params.cpuparams, params.cpuparams_batch]
    if asked["draft"]:
        params.speculative.types = [
            xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE
        ]
        draft = params.speculative.draft
        draft.mparams.path = asked["draft"]
        draft.n_gpu_layers = 0
        draft.n_max = asked["n_max"]
        draft.p_min = 0.0
        draft.probabilistic = asked["probabilistic"]
        cpus += [draft.cpuparams, draft.cpuparams_batch]
    for cpu in cpus:
        cpu.n_threads = asked["threads"]
    return xllamacpp.Server(params)


def write(server: xllamacpp.Server, asked: dict[str, Any]) -> dict[str, Any]:
    """Write a text without truncation or an end; count its tokens after the first one."""
    reply = server.handle_completions(
        {
            "prompt": asked["prompt"],
            "n_predict": asked["n_predict"],
            "temperature": asked["temperature"],
            "top_k": 0,
            "top_p": 1.0,
            "min_p": 0.0,
            "seed": asked["seed"],
            "ignore_eos": True,
            "cache_prompt": False,
        }
    )
    timings = reply["timings"]
    return {
        "n_tokens": timings["predicted_n"] - 1,
        "seconds": timings["predicted_ms"] / 1000,
        "n_drafted": timings.get("draft_n", 0),
        "n_accepted": timings.get("draft_n_accepted", 0),
    }


def main() -> None:
    # llama.cpp must not write between the answers.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def answer(content: dict[str, Any]) -> None:
        print(json.dumps(content), file=answers, flush=True)

    server = load(json.loads(sys.stdin.readline()))
    answer({"version": xllamacpp.__version__})
    for line in sys.stdin:
        answer(write(server, json.loads(line)))


if __name__ == "__main__":
    main()
