"""The facts of a file, and whether two files pair, for people."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from qdraft.gguf.facts import Facts
from qdraft.gguf.pairing import INCOMPATIBLE, SAME_MODEL, SAME_VOCABULARY, Pairing
from qdraft.gguf.recommended import describe
from qdraft.render.layout import line, wrapped

_VERDICTS = {
    SAME_MODEL: "same model, other quantization: a pair that can share KV cells",
    SAME_VOCABULARY: "same vocabulary, different model: a pair, each with KV cells of its own",
    INCOMPATIBLE: "these files do not pair",
}


def facts_view(facts: Facts, renders: bool | None) -> RenderableType:
    """A few lines on one file; ``renders`` says whether its chat template works."""
    lines = wrapped("file", facts.path.name)
    if len(facts.parts) > 1:
        lines.append(line("", f"{len(facts.parts)} parts"))
    if facts.refusal:
        lines += wrapped("but", f"it {facts.refusal}")
    n_parameters = f"{_abbreviate(facts.n_parameters)} parameters"
    lines.append(line("model", facts.name, facts.architecture, n_parameters))
    if shape := _describe_shape(facts):
        lines += wrapped("shape", ", ".join(shape))
    lines += [*_vocabulary_lines(facts), *_template_lines(facts, renders)]
    lines += _sampling_lines(facts)
    size = f"{facts.n_bytes / 1e6:.0f} MB"
    if facts.n_bytes >= 1e10:
        size = f"{facts.n_bytes / 1e9:.1f} GB"
    bits = f"{facts.bits_per_weight:.2f} bits per weight"
    lines.append(line("type", facts.file_type, size, bits))
    types = ", ".join(f"{n} {kind} ({b / 1e6:.1f} MB)" for kind, (n, b) in facts.types.items())
    lines += wrapped("tensors", types or "none")
    if facts.in_name_only:
        lines += wrapped("but", facts.in_name_only)
    return Group(*lines, Text(""))


def _describe_shape(facts: Facts) -> list[str]:
    shape = {
        "layers": facts.n_layers,
        "wide": facts.n_embd,
        "feed-forward": facts.n_ff,
        "heads": facts.n_head,
        "KV heads": facts.n_head_kv,
        "trained on": facts.n_ctx_train,
        "window": facts.sliding_window,
    }
    parts = [f"{name} {n}" for name, n in shape.items() if n]
    if facts.n_experts:
        parts.append(f"{facts.n_experts_used} of {facts.n_experts} experts")
    if facts.n_recurrent_layers:
        kind = "recurrent" if facts.n_recurrent_layers == facts.n_layers else "hybrid"
        parts.append(
            f"{kind}: a state in {facts.n_recurrent_layers} of {facts.n_layers} layers, "
            f"{_abbreviate_bytes(facts.state_bytes)} for each text"
        )
    return parts


def _vocabulary_lines(facts: Facts) -> list[Text]:
    if not facts.vocabulary:
        return []
    special = ", ".join(f"{name} {token}" for name, token in facts.special.items())
    bos = {True: "BOS is added", False: "no BOS is added", None: ""}[facts.add_bos]
    eos = "EOS should be added, which qdraft never does" if facts.add_eos else ""
    parts = (facts.vocabulary, f"{facts.n_vocab} tokens", special, bos, eos)
    return wrapped("vocab", ", ".join(part for part in parts if part))


def _template_lines(facts: Facts, renders: bool | None) -> list[Text]:
    if facts.chat_template:
        state = {True: "renders", False: "does not render", None: ""}[renders]
        first = next((x for x in facts.chat_template.splitlines() if x.strip()), "")
        return wrapped("template", f"{state}: {first[:120]}")
    return [line("template", "none")] if facts.kind == "model" else []


def _sampling_lines(facts: Facts) -> list[Text]:
    """What the file recommends; nothing if it recommends nothing."""
    words = describe(facts.sampling.values)
    ignored = ", ".join(facts.sampling.ignored)
    parts = (f"recommends {words}" if words else "", f"not in qdraft: {ignored}" if ignored else "")
    return wrapped("sampling", "; ".join(filter(None, parts))) if any(parts) else []


def pairing_view(pairing: Pairing) -> RenderableType:
    """How two files relate, and every difference."""
    lines = wrapped("verdict", _VERDICTS[pairing.relation])
    if pairing.weights_error is not None:
        lines.append(line("weights", f"rows differ by up to {pairing.weights_error:.1%}"))
    for difference in pairing.differences:
        first, second = difference.first or "-", difference.second or "-"
        lines += wrapped("differ", f"{difference.what}: {first} / {second}")
    return Group(*lines)


def _abbreviate_bytes(n: int) -> str:
    return f"{n / 2**20:.1f} MiB" if n >= 2**20 else f"{n / 2**10:.1f} KiB"


def _abbreviate(n: int) -> str:
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if n >= size:
            return f"{n / size:.3g} {unit}"
    return str(n)
