"""What the inspector's page shows, for a file of it: the answers of HTTP's routes, by the paths that the page asks for.

They come from the daemon that runs, else of the store's files. Owns what is left out: each answer that is text alone,
unless it is wanted, and what is beyond the bounds of a file.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, get_args
from urllib.parse import quote

from ...daemon.api.blocks import BlocksResult
from ...daemon.api.causes import REMEDIES, By, WhyResult
from ...daemon.api.session import SessionDetail, SessionInfo
from ...errors import TorporError
from ...memvid.errors import SessionNotFound
from ...memvid.units import format_count, format_plural
from ...memvid.uri import SCHEME
from ...records import as_map
from ...socket_api.wire.common_store import without_others
from .files import Files

if TYPE_CHECKING:
    from ...socket_api.client.client import Client

MOST_LISTED: Final = 10_000
MOST_TOLD: Final = 100
"""Sessions that are told in full: those with the most tokens."""

MOST_BYTES: Final = 32 << 20
"""Of the answers about single sessions; the last one may go beyond."""

_VERSIONS: Final = 500
_PATH: Final = "/v1/sessions"
_UNCODED: Final = "!*'()"
"""What `encodeURIComponent` leaves as it is, beside what `quote` does."""


@dataclass
class _Answers:
    """answers: by path. size: of those about single sessions, as JSON."""

    namespace: str | None
    answers: dict[str, Any] = field(default_factory=dict)
    size: int = 0

    def keep(self, path: str, record: Any) -> None:
        told = as_map(record)
        self.answers[path] = told if self.namespace is None else without_others(told, self.namespace)

    def keep_of_one(self, path: str, asked: Callable[[], Any]) -> Any:
        """Keep an answer about one session, or its refusal. The record, or None."""
        record = None
        try:
            record = asked()
            self.keep(path, record)
        except TorporError as error:
            self.answers[path] = {"refused": error.message}
        self.size += len(json.dumps(self.answers[path]))
        return record


def kept_of(
    source: Client | Files,
    *,
    namespace: str | None,
    with_text: bool,
    on_progress: Callable[[int, int], None],
) -> dict[str, Any]:
    """What a file is to have, as `page_file.page_with` takes it. on_progress: told (sessions told, sessions to tell).
    Raises SessionNotFound: there is none in the namespace; and the errors of the source. What cannot be told of one
    session is told so in its place."""
    sessions = source.list_sessions(namespace).sessions
    if namespace is not None and not sessions:
        message = f"No sessions in namespace {namespace}. List what there is with `torpor ls`."
        raise SessionNotFound(message, session=namespace, suggestions=[])
    ordered = sorted(sessions, key=lambda info: (-info.token_count, info.session))
    listed, kept = ordered[:MOST_LISTED], _Answers(namespace)
    kept.keep(_PATH, {"sessions": listed})
    kept.keep(f"/v1/history?limit={_VERSIONS}", source.history(namespace=namespace, limit=_VERSIONS))
    for by in get_args(By):
        kept.keep(f"/v1/why?by={by}", source.causes(by=by, namespace=namespace))
    if namespace is None:
        kept.keep("/v1/usage", source.usage())
    if not isinstance(source, Files):
        kept.answers |= _of_daemon_alone(source, namespace)
    to_tell = listed[:MOST_TOLD]
    told = 0
    for info in to_tell:
        if kept.size > MOST_BYTES:
            break
        _keep_session(kept, source, info, with_text=with_text)
        told += 1
        on_progress(told, len(to_tell))
    return {
        "written_ns": time.time_ns(),
        "with_text": with_text,
        "left_out": list(_left_out(source, len(sessions), len(listed), told, with_text=with_text)),
        "answers": kept.answers,
    }


def _of_daemon_alone(client: Client, namespace: str | None) -> dict[str, Any]:
    """What files do not tell."""
    status = client.status()
    models = [{"id": each.name, "context_length": each.context_tokens} for each in status.models]
    return {"/v1/models": {"data": models}} | ({} if namespace else {"/v1/status": as_map(status)})


def _keep_session(kept: _Answers, source: Client | Files, info: SessionInfo, *, with_text: bool) -> None:
    path = _path_of(info.session)
    kept.keep_of_one(path, lambda: _shown(source.show(info.session), with_text=with_text))
    kept.keep_of_one(f"{path}/why", lambda: _explained(source.why(info.session), with_text=with_text))
    if info.version is None:
        return
    blocks: BlocksResult | None = kept.keep_of_one(f"{path}/blocks", lambda: source.blocks(info.session))
    for start, end in _stretches_of(blocks) if with_text and blocks else ():
        kept.keep_of_one(
            f"{path}/contents?start={start}&end={end}", partial(source.contents, info.session, start=start, end=end)
        )


def _shown(told: SessionDetail, *, with_text: bool) -> SessionDetail:
    return told if with_text else replace(told, tail_text="")


def _explained(told: WhyResult, *, with_text: bool) -> WhyResult:
    if with_text:
        return told
    requests = (
        replace(
            each,
            expected_text=None,
            found_text=None,
            volatile=(),
            remedy=REMEDIES.get(each.cause),  # type: ignore[call-overload]
        )
        for each in told.requests
    )
    return replace(told, requests=tuple(requests))


def _stretches_of(found: BlocksResult) -> Iterator[tuple[int, int]]:
    """The stretches of the ribbon, as `ribbon.js` asks for their texts."""
    for block in found.blocks:
        if block.tokens:
            yield block.start, min(block.start + block.tokens, found.common_tokens)
    for each in found.rest:
        yield each.start, each.end


def _path_of(reference: str) -> str:
    return f"{_PATH}/{quote(reference.removeprefix(SCHEME), safe=_UNCODED)}"


def _left_out(source: Client | Files, there: int, listed: int, told: int, *, with_text: bool) -> Iterator[str]:
    """In sentences, what the file does not have."""
    if isinstance(source, Files):
        yield "It is of the store's files: what is in memory is not known."
    if not with_text:
        yield "No text is in it: --with-text adds what the sessions say."
    if listed < there:
        yield f"It lists the {format_count(listed)} sessions with the most tokens, of {format_count(there)}."
    if told < listed:
        yield f"It tells {format_plural(told, 'session')} in full, those with the most tokens, and lists the others."
