"""The facts of a file, and how two files go together, for people."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from qdraft.gguf.facts import KINDS, Facts
from qdraft.gguf.pairing import INCOMPATIBLE, SAME_MODEL, SAME_VOCABULARY, Pairing
from qdraft.render.layout import line, wrapped

_VERDICTS = {
    SAME_MODEL: "same model, other quantization: a pair that can share its KV cells",
    SAME_VOCABULARY: "same vocabulary, different model: a pair, each with KV cells of its own",
    INCOMPATIBLE: "cannot pair",
}


def facts_view(facts: Facts, renders: bool | None) -> RenderableType:
    """A few lines; ``renders`` tells whether the chat template works."""
    lines = wrapped("file", facts.path.name)
    if len(facts.parts) > 1:
        lines.append(line("", f"{len(facts.parts)} parts"))
    if facts.kind in KINDS:
        lines.append(line("kind", KINDS[facts.kind], "not a language model"))
    lines.append(
        line("model", facts.name, facts.architecture, f"{_big(facts.n_parameters)} parameters")
    )
    shape = {
        "layers": facts.n_layers, "wide": facts.n_embd, "feed-forward": facts.n_ff,
        "heads": facts.n_head, "KV heads": facts.n_head_kv, "trained on": facts.n_ctx_train,
        "window": facts.sliding_window,
    }  # fmt: skip
    told = [f"{name} {n}" for name, n in shape.items() if n]
    if facts.n_experts:
        told.append(f"{facts.n_experts_used} of {facts.n_experts} experts")
    if facts.recurrent:
        told.append("recurrent or hybrid: no drafting")
    if told:
        lines += wrapped("shape", ", ".join(told))
    special = ", ".join(f"{name} {token}" for name, token in facts.special.items())
    bos = {True: "BOS is added", False: "no BOS is added", None: ""}[facts.add_bos]
    if facts.vocabulary:
        parts = (facts.vocabulary, f"{facts.n_vocab} tokens", special, bos)
        lines += wrapped("vocab", ", ".join(p for p in parts if p))
    if facts.chat_template:
        known = {True: "renders", False: "does not render", None: ""}[renders]
        first = next((x for x in facts.chat_template.splitlines() if x.strip()), "")
        lines += wrapped("template", f"{known}: {first[:120]}")
    elif facts.kind == "model":
        lines.append(line("template", "none"))
    size = (
        f"{facts.n_bytes / 1e6:.0f} MB" if facts.n_bytes < 1e10 else f"{facts.n_bytes / 1e9:.1f} GB"
    )
    lines.append(line("type", facts.file_type, size, f"{facts.bits_per_weight:.2f} bits a weight"))
    types = ", ".join(f"{n} {kind} ({b / 1e6:.1f} MB)" for kind, (n, b) in facts.types.items())
    lines += wrapped("tensors", types or "none")
    if facts.in_name_only:
        lines += wrapped("but", facts.in_name_only)
    return Group(*lines, Text(""))


def pairing_view(pairing: Pairing) -> RenderableType:
    """The verdict, and every difference."""
    lines = wrapped("verdict", _VERDICTS[pairing.verdict])
    if pairing.weights_error is not None:
        lines.append(line("weights", f"rows differ by up to {pairing.weights_error:.1%}"))
    for difference in pairing.differences:
        told = f"{difference.what}: {difference.first or '-'} / {difference.second or '-'}"
        lines += wrapped("differ", told)
    return Group(*lines)


def _big(n: int) -> str:
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if n >= size:
            return f"{n / size:.3g} {unit}"
    return str(n)
