"""Open the default pair, stream a text, read the summary."""

import qdraft

with qdraft.open_pair("smollm2") as pair:
    text = pair.generate(
        "Give me three names for a grey cat.",
        qdraft.SamplingParams(temperature=0.7),
        qdraft.DecodeParams(n_predict=60, seed=1),
    )
    for chunk in text:
        print(chunk.text, end="", flush=True)
    print()

    summary = text.summary
    print(f"{summary.n_tokens} tokens in {summary.n_rounds} rounds, {text.finish_reason.value}")
    print(summary.conclusion)
