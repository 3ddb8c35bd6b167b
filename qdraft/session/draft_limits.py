"""What the settings of a draft cost it, compared with those of its target, in words."""

from __future__ import annotations

from collections.abc import Iterator

from qdraft.llama.context import LlamaContext
from qdraft.llama.kv_copy import KvSharing
from qdraft.llama.spec import Both, ModelSpec


def describe_limits(
    models: Both[ModelSpec], contexts: Both[LlamaContext], kv: KvSharing
) -> Iterator[str]:
    """Give a sentence for a smaller context, and for a KV cache of other types."""
    target, draft = contexts.target, contexts.draft
    if draft is None or models.draft is None:
        return
    if draft.n_ctx < target.n_ctx:
        yield (
            f"the draft's context has {draft.n_ctx} tokens and the target's {target.n_ctx}: longer "
            "texts go on without drafts"
        )
    own, others = (_cache_types(model) for model in (models.draft, models.target))
    if own != others and not kv.shared:
        yield (
            f"the draft's KV cache is {own} and the target's {others}, so they cannot share cells, "
            "and the draft reads the prompt itself"
        )


def _cache_types(model: ModelSpec) -> str:
    params = model.params
    return " and ".join(dict.fromkeys((params.cache_type_k, params.cache_type_v)))
