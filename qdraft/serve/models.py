"""The pairs that a server offers: loaded at their first request, unloaded for others."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass

from qdraft.decoding.records import DecodeParams, SamplingParams
from qdraft.host import free_memory
from qdraft.llama.chat_template import NO_OPTIONS, TemplateOptions
from qdraft.llama.placed import chosen_devices
from qdraft.llama.progress import Progress
from qdraft.llama.spec import PairSpec
from qdraft.placement.buffers import buffers_on_host
from qdraft.serve.errors import ApiError
from qdraft.serve.kept import KeptSessions
from qdraft.session.opening import open_spec
from qdraft.session.pair import Pair

log = logging.getLogger(__name__)

OpenPair = Callable[[PairSpec, Progress], Pair]

_MARGIN = 0.9  # of the free memory: what another pair may take beside those that are loaded


@dataclass(frozen=True, slots=True)
class Defaults:
    """How a pair writes unless a request says otherwise.

    ``split_reasoning`` keeps the reasoning apart from the content of a chat.
    """

    sampling: SamplingParams
    decode: DecodeParams
    template: TemplateOptions = NO_OPTIONS
    split_reasoning: bool = True


@dataclass(frozen=True, slots=True)
class Offer:
    """A pair that a client can ask for by ``name``.

    ``describe`` says what to load, and builds what is not built yet; ``defaults`` says how the
    loaded pair writes.
    """

    name: str
    describe: Callable[[], PairSpec]
    defaults: Callable[[Pair], Defaults]


class Loaded:
    """A loaded pair with the sessions that it keeps."""

    def __init__(self, offer: Offer, pair: Pair, n_kept: int) -> None:
        self.name = offer.name
        self.pair = pair
        self.defaults = offer.defaults(pair)
        self.kept = KeptSessions(pair, n_kept)
        self.created = int(time.time())

    @property
    def n_ctx(self) -> int:
        """The tokens of a prompt and its text together."""
        return self.pair.contexts.target.n_ctx

    @property
    def n_bytes(self) -> int:
        """The size of its files."""
        return sum({each.path: each.n_bytes for each in self.pair.models}.values())

    def close(self) -> None:
        self.kept.close()
        self.pair.close()


class Models:
    """The offers, and those that are loaded, the last used last.

    Only the worker's thread loads, unloads and decodes. Whoever reads a vocabulary elsewhere holds
    ``lock``, so that the pair does not go meanwhile.
    """

    def __init__(
        self, offers: Sequence[Offer], n_kept: int, open_pair: OpenPair = open_spec
    ) -> None:
        self.lock = threading.RLock()
        self._open_pair = open_pair
        self._offers = {offer.name: offer for offer in offers}
        self._n_kept = n_kept
        self._loaded: dict[str, Loaded] = {}

    @property
    def names(self) -> list[str]:
        return list(self._offers)

    def find(self, name: str | None) -> str:
        """Return the name of the pair that a request means; a server of one pair has any name.

        Raises ApiError for an unknown name if there are several.
        """
        names = self.names
        if name in self._offers:
            assert name is not None
            return name
        if name is None or len(names) == 1:
            return names[0]
        raise ApiError(
            404,
            "not_found_error",
            f"no model is called {name[:80]}; there are {', '.join(names)}",
            param="model",
            code="model_not_found",
        )

    def loaded(self, name: str) -> Loaded | None:
        """Return a pair if it is loaded."""
        return self._loaded.get(name)

    def load(self, name: str, progress: Progress) -> Loaded:
        """Return a pair, and load it if it is not; others go unless both fit in memory.

        Raises what ``open_spec`` raises, and what ``progress`` raises to end the loading.
        """
        if name in self._loaded:
            with self.lock:
                loaded = self._loaded[name] = self._loaded.pop(name)  # the last one now
            return loaded
        offer = self._offers[name]
        spec = offer.describe()
        self._make_room(spec)
        pair = self._open_pair(spec, progress)
        try:
            loaded = Loaded(offer, pair, self._n_kept)
        except BaseException:
            pair.close()
            raise
        with self.lock:
            self._loaded[name] = loaded
        return loaded

    def close(self) -> None:
        """Unload everything."""
        while self._loaded:
            self._unload(next(iter(self._loaded)))

    def _make_room(self, spec: PairSpec) -> None:
        while self._loaded and not fits_beside(spec, list(self._loaded.values())):
            name = next(iter(self._loaded))
            log.info("unloading %s", name)
            self._unload(name)

    def _unload(self, name: str) -> None:
        with self.lock, closing(self._loaded.pop(name)):
            pass


def fits_beside(spec: PairSpec, others: Sequence[Loaded]) -> bool:
    """Tell whether a pair fits in this machine's memory beside loaded ones.

    With layers on devices it counts as one that does not: qdraft plans with their free memory, and
    a pair that has the devices to itself gets more layers on them.
    """
    if any(chosen_devices(model.params) for model in spec.models):
        return False
    free = free_memory()
    if free is None:
        return False
    weights = sum({model.path: model.path.stat().st_size for model in spec.models}.values())
    mapped = sum(each.n_bytes for each in others)  # counts as free, because it can be dropped
    return weights + buffers_on_host(spec.models) < _MARGIN * (free - mapped)
