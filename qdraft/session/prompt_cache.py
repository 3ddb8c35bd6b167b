"""A prompt cache: what the target has read, in a file that a later run of it goes on from."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from qdraft.decoding.engine import n_common
from qdraft.decoding.records import Chunk
from qdraft.disk import require_space
from qdraft.errors import EngineError, PairError, UsageError
from qdraft.gguf.facts import read_facts
from qdraft.llama.native import build_id
from qdraft.llama.params import EngineParams
from qdraft.paths import new_file
from qdraft.session.generation import Generation
from qdraft.session.pair import Pair
from qdraft.session.session import Session

log = logging.getLogger(__name__)

# A file is the magic, the length of the head, the head (JSON), the tokens (int32), the cells as
# llama.cpp writes them, and the SHA-256 of all that.
_MAGIC = b"qdraft prompt cache 1\n"
_N_LENGTH, _N_SUM, _LONGEST_HEAD = 8, 32, 1 << 20
_PART = 1 << 26  # bytes that are read or written at once
_N_SAMPLES, _SAMPLE = 64, 1 << 14  # of a model file: how many places, and bytes at each
_OTHER = "delete it, or name another file"


@dataclass(frozen=True, slots=True)
class _Head:
    """What a file says of itself before its tokens and cells."""

    identity: Mapping[str, str]
    n_tokens: int
    n_cell_bytes: int
    n_before: int  # bytes of the file before the tokens


def require_readable(path: Path, *, must_exist: bool = False) -> None:
    """Raise UsageError if the file is there but not a whole prompt cache, or cannot be made."""
    if not path.exists():
        if must_exist:
            raise UsageError(f"{path} does not exist")
        if not path.absolute().parent.is_dir():
            raise UsageError(f"{path.parent} is not a folder")
        return
    try:
        with path.open("rb") as file:
            _read_head(file, path)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}") from error


class PromptCache:
    """The prompt cache of a pair in one file; the file need not exist yet.

    It holds the tokens that the target has read and their KV cells, and what they belong to: the
    model, its chat template, this build of llama.cpp, and the types of the cache. The draft gets
    its cells from the target, or reads the tokens itself.
    """

    def __init__(
        self, pair: Pair, path: Path, *, read_only: bool = False, with_text: bool = False
    ) -> None:
        """``read_only`` never writes the file; ``with_text`` saves the generated text too.

        Raises PairError if the target has a recurrent state, and UsageError as
        ``require_readable``.
        """
        if pair.contexts.target.model.has_state:
            raise PairError(
                f"{pair.target.path.name} is recurrent or hybrid: a prompt cache cannot hold its "
                "state"
            )
        require_readable(path, must_exist=read_only)
        self._pair = pair
        self._path = path
        self._read_only = read_only
        self._with_text = with_text
        self._identity = _identify(pair)
        self._stored: list[int] = []  # the tokens in the file

    def restore(self, session: Session, prompt: Sequence[int]) -> int:
        """Put the cells of the file into a session that holds none; return how many are useful.

        Raises UsageError if the file is damaged, or belongs to something else.
        """
        if not self._path.exists():
            return 0
        try:
            with self._path.open("rb") as file:
                head = _read_head(file, self._path)
                self._require_own(head)
                tokens, cells = _read_body(file, head, self._path)
        except OSError as error:
            raise UsageError(f"{self._path} cannot be read: {error.strerror or error}") from error
        self._stored = tokens
        n_useful = n_common(tokens, prompt)
        n_ctx = self._pair.contexts.target.n_ctx
        if n_useful and len(tokens) > n_ctx:
            raise UsageError(
                f"{self._path} holds {len(tokens)} tokens, but the context holds {n_ctx}",
                hint="raise -c, or name another file",
            )
        if n_useful:
            with self._pair.lock:
                target = session.open().target
                try:
                    target.write_cells(cells, tokens)
                except EngineError as error:
                    raise UsageError(
                        f"llama.cpp does not take the cells in {self._path}: {error}", hint=_OTHER
                    ) from error
                target.truncate(n_useful)
        log.info("%d of %d tokens of the prompt are in %s", n_useful, len(prompt), self._path)
        return n_useful

    def require_space(self, n_prompt: int, n_predict: int) -> None:
        """Raise DiskSpaceError if the cells of a text will not fit on the disk of the file."""
        if self._read_only:
            return
        n_ctx = self._pair.contexts.target.n_ctx
        n_tokens = n_prompt
        if self._with_text:
            n_tokens = n_ctx if n_predict < 0 else min(n_ctx, n_prompt + n_predict)
        n_bytes = sum(share.kv for share in self._pair.placed.target.shares.values())
        require_space(
            self._path.absolute().parent,
            n_bytes * n_tokens // n_ctx,
            f"{self._path.name} for {n_tokens} tokens",
            "name a file on another disk, or leave the prompt cache out",
        )

    def saving(self, session: Session, text: Generation) -> Iterator[Chunk]:
        """Give the chunks of a text of a session, and save it.

        The prompt is saved once the target has read it, or as far as it has when it is interrupted.
        The session is closed at the end.
        """
        is_read = False
        try:
            for chunk in text:
                yield chunk
                if not is_read:
                    is_read = True
                    self._save(session)
        finally:
            text.close()
            if self._with_text or not is_read:
                self._save(session)
            session.close()

    def _save(self, session: Session) -> None:
        """Save what the target's cache holds, unless the file has it already."""
        with self._pair.lock:
            if self._read_only or session.sequences is None:
                return
            target = session.sequences.target
            tokens = list(target.tokens)
            if not tokens or n_common(tokens, self._stored) == len(tokens):
                return
            cells = target.read_cells()
            try:
                with new_file(self._path) as part, part.open("wb") as file:
                    _write(file, self._identity, tokens, cells)
            except OSError as error:
                if error.filename is None:
                    error.filename = str(self._path)
                raise
            self._stored = tokens

    def _require_own(self, head: _Head) -> None:
        for what, own in self._identity.items():
            if head.identity.get(what) != own:
                raise UsageError(f"{self._path} was made with another {what}", hint=_OTHER)


def _identify(pair: Pair) -> dict[str, str]:
    """Return what cells depend on, each by its name."""
    spec = pair.spec.models.target
    facts = read_facts(spec.path)
    params, context = spec.params, pair.contexts.target
    template = pair.vocab.chat_template.encode("utf-8", "replace")
    is_scaled = any("scaling" in key for key in facts.rope)  # the scale may follow the context
    return {
        "model": _digest_files(facts.parts or (facts.path,)),
        "chat template": hashlib.sha256(template).hexdigest(),
        "build of llama.cpp": build_id(),
        "cache type": f"{params.cache_type_k} {params.cache_type_v}",
        "setting of flash attention": params.flash_attn,
        "set of LoRA adapters": _digest_adapters(params),
        "context size": str(context.n_ctx) if is_scaled else "any",
    }


def _digest_adapters(params: EngineParams) -> str:
    adapters = params.lora
    return " ".join(f"{_digest_files([Path(path)])} {scale}" for path, scale in adapters)


def _digest_files(paths: Iterable[Path]) -> str:
    """Return a digest of files: their sizes, and samples from beginning to end."""
    digest = hashlib.sha256()
    for path in paths:
        n_bytes = path.stat().st_size
        digest.update(f"{n_bytes} ".encode())
        with path.open("rb") as file:
            for i in range(_N_SAMPLES):
                file.seek(i * n_bytes // _N_SAMPLES)
                digest.update(file.read(_SAMPLE))
    return digest.hexdigest()


def _write(
    file: IO[bytes], identity: Mapping[str, str], tokens: Sequence[int], cells: NDArray[np.uint8]
) -> None:
    head = json.dumps(
        {"identity": dict(identity), "n_tokens": len(tokens), "n_cell_bytes": cells.nbytes}
    ).encode()
    digest = hashlib.sha256()
    ids = np.array(tokens, dtype="<i4").view(np.uint8)
    before = np.frombuffer(_MAGIC + len(head).to_bytes(_N_LENGTH, "little") + head, dtype=np.uint8)
    for data in (before, ids, cells):
        for start in range(0, data.nbytes, _PART):
            part = data[start : start + _PART].data
            digest.update(part)
            file.write(part)
    file.write(digest.digest())


def _read_head(file: IO[bytes], path: Path) -> _Head:
    """Read the head. Raises UsageError if the file is something else, or not whole."""
    start = file.read(len(_MAGIC) + _N_LENGTH)
    if not start.startswith(_MAGIC):
        raise UsageError(f"{path} is not a prompt cache of this version of qdraft", hint=_OTHER)
    length = int.from_bytes(start[len(_MAGIC) :], "little")
    try:
        fields: dict[str, Any] = json.loads(file.read(min(length, _LONGEST_HEAD)))
        head = _Head(
            dict(fields["identity"]),
            int(fields["n_tokens"]),
            int(fields["n_cell_bytes"]),
            len(_MAGIC) + _N_LENGTH + length,
        )
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise _damaged(path) from error
    if path.stat().st_size != head.n_before + 4 * head.n_tokens + head.n_cell_bytes + _N_SUM:
        raise _damaged(path)
    return head


def _read_body(file: IO[bytes], head: _Head, path: Path) -> tuple[list[int], NDArray[np.uint8]]:
    """Return the tokens and the cells. Raises UsageError unless the sum over all is right."""
    file.seek(0)
    digest = hashlib.sha256(file.read(head.n_before))
    data = np.empty(4 * head.n_tokens + head.n_cell_bytes, dtype=np.uint8)
    for start in range(0, data.nbytes, _PART):
        part = data[start : start + _PART]
        if file.readinto(part.data) != part.nbytes:  # type: ignore[attr-defined]
            raise _damaged(path)
        digest.update(part.data)
    if file.read(_N_SUM) != digest.digest():
        raise _damaged(path)
    n = 4 * head.n_tokens
    return data[:n].view("<i4").tolist(), data[n:]


def _damaged(path: Path) -> UsageError:
    return UsageError(f"{path} is damaged", hint=_OTHER)
