"""Whether a recurrent state goes back to where it was: tried once, when a pair is loaded."""

from __future__ import annotations

from contextlib import closing

import numpy as np
from numpy.typing import NDArray

from qdraft.errors import EngineError, PairError, ServerError
from qdraft.llama.context import LlamaContext

# The largest difference of two rows, in standard deviations of a row, that batches of other shapes
# may make. A state that has read one token more or less differs by about one of them.
NOISE = 0.1


def require_way_back(context: LlamaContext) -> None:
    """Raise PairError if rows after a rejection differ from those of the same tokens alone.

    Rejects two tokens and one, in an empty sequence of its own. Does nothing for a model without a
    recurrent state.
    """
    if not context.model.has_state:
        return
    try:
        worst = _worst_difference(context)
        if worst > NOISE:
            raise EngineError(f"rows then differ by {worst:.1f} standard deviations")
    except ServerError:
        raise
    except EngineError as error:
        raise PairError(
            f"{context.model.path.name} cannot verify drafts: its recurrent state does not come "
            f"back after a rejection ({error})",
            hint="run it without drafts (--no-draft --n-draft 0)",
        ) from error


def _worst_difference(context: LlamaContext) -> float:
    """Return the largest difference of rows around rejections from rows of one batch."""
    tokens = [i % context.vocab.n_tokens for i in range(8)]
    with closing(context.sequence()) as sequence:
        sequence.eval(tokens[:2], 0)
        rows = []
        for place, n_wrong in ((2, 2), (3, 1)):
            sequence.checkpoint(n_wrong)
            part = [*tokens[sequence.n_past : place + 1], *tokens[6 : 6 + n_wrong]]
            rows.append(sequence.eval(part, n_wrong + 1)[0].copy())
            sequence.truncate(place + 1)
        rows.append(sequence.eval(tokens[sequence.n_past : 5], 1)[0].copy())
        sequence.truncate(0)
        alone = sequence.eval(tokens[:5], 3)
        return max(difference(row, other) for row, other in zip(rows, alone, strict=True))


def difference(row: NDArray[np.float32], other: NDArray[np.float32]) -> float:
    """Return the largest difference of two rows, in standard deviations of the second."""
    return float(np.abs(row - other).max() / max(float(other.std()), 1e-9))
