"""A quantization ladder with figures that tests can choose."""

from __future__ import annotations

from pathlib import Path

from qdraft.decoding.intervals import Mean, Ratio
from qdraft.study.perplexity import Divergence, Perplexity
from qdraft.study.ranking import QuantFile, Reference, Rung
from qdraft.study.rung_result import AsDraft, ReferenceResult, RungResult

DAY = {"date": "2026-11-30"}


def rung(name: str, size: int, kld: float, alone: float, as_draft: Ratio | None) -> Rung:
    mean = Mean(0.9, 0.01)
    quality = Divergence(
        n=90,
        ppl=mean,
        ppl_base=mean,
        ppl_ratio=mean,
        ln_ratio=mean,
        correlation=1.0,
        kld=Mean(kld, 0.001),
        kld_median=kld,
        kld_99=kld,
        kld_max=kld,
        dp=mean,
        rms_dp=mean,
        same_top=mean,
    )
    draft = AsDraft(
        temperature=0.0,
        alpha_own=mean,
        alpha_shared=mean,
        n_draft=3,
        predicted=1.2,
        measured=as_draft,
        alpha_live=0.9,
    )
    result = RungResult(
        quality=quality,
        prompt_per_second=99.0,
        per_second=alone * 10,
        memory=10**6,
        c=0.5,
        v={2: 1.1},
        target_per_second=10.0,
        shares_kv=True,
        no_sharing="",
        as_draft=(draft,),
        doubts=(),
        measured=DAY,
    )
    return Rung(QuantFile(f"m-{name}.gguf", Path(f"m-{name}.gguf"), name, size, 4.0), result)


REFERENCE = Reference(
    QuantFile("m-F16.gguf", Path("m-F16.gguf"), "F16", 900, 16.0),
    ReferenceResult(Perplexity(90, Mean(9.0, 0.1)), 50.0, None, DAY),
)
