"""Opening a pair by its name in models.yaml, or two files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from qdraft.errors import UsageError
from qdraft.host import default_threads
from qdraft.llama.params import EngineParams
from qdraft.pairs import registry
from qdraft.pairs.packages import materialize
from qdraft.session.fitting import open_fitting
from qdraft.session.pair import Pair


def open_pair(
    name: str | None = None,
    *,
    target: Path | str | None = None,
    draft: Path | str | None = None,
    params: EngineParams | None = None,
    draft_params: EngineParams | None = None,
    servers: Sequence[str] = (),
    share_kv: str = "auto",
) -> Pair:
    """Open a pair of models.yaml by name (None: the default one), or two files.

    With ``target``, ``draft`` None is the target alone. A pair from a package is built into the
    cache on first use; its chat template of models.yaml holds, while its context, devices and
    tuned settings are defaults of the commands only. ``servers`` are RPC servers, HOST:PORT.
    Layers go where they fit, as ``qdraft plan`` shows, unless the params say how many. Raises
    QDraftError for whatever does not work.
    """
    if target is None and draft is not None:
        raise UsageError("a draft needs a target beside it")
    if target is not None and name is not None:
        raise UsageError("give either the name of a pair or a target, not both")
    if target is not None:
        files = (Path(target), Path(draft) if draft else None)
        return open_fitting(
            *files, params, draft_params=draft_params, servers=servers, share_kv=share_kv
        )
    threads = (params.n_threads if params else 0) or default_threads()
    entry = registry.load().find(name)
    files = materialize(entry, threads=threads)
    return open_fitting(
        *files,
        params,
        draft_params=draft_params,
        servers=servers,
        share_kv=share_kv,
        template=registry.read_template(entry),
    )
