"""Operations on all sessions of a label at once: figures, warming (wakes before use), and clearing.

Each session is held in its own turn, so no request sees one half cleared. A clear removes a session everywhere: memory,
disk, the prefixes for new sessions, and counters (GM8).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from ...errors import TorporError
from ...memvid.answers import DeleteReport
from ...memvid.errors import SessionNotFound
from ...memvid.uri import SessionUri
from ..api.events import OnEvent
from ..api.session import SessionInfo
from ..api.store import ClearResult, LabelFigures, StatsResult
from ..api.waking import Warmed, WarmResult
from ..disk.maintenance import MAX_PROBLEMS_TOLD
from ..tasks.cancellation import to_the_end
from ..tasks.pieces import SESSIONS_AT_ONCE, Pieces, in_pieces
from .listing import Roll
from .residency import Residency


@dataclass(eq=False, repr=False)
class Labels:
    """Carries these operations out. hits: since the daemon began. delete: deletes a session in its turn."""

    _residency: Residency
    _hits: Counter[SessionUri]
    _roll: Roll
    _delete: Callable[[SessionUri], Awaitable[DeleteReport]]

    async def stats(self, label: str | None, namespace: str | None) -> StatsResult:
        """Figures of all sessions, and of those of each label."""
        infos = await in_pieces(self._roll.infos(namespace))
        return await in_pieces(self._stats(infos, label))

    async def warm(
        self, uris: Sequence[SessionUri], label: str | None, namespace: str | None, emit: OnEvent
    ) -> WarmResult:
        """Wake sessions as far as memory is free: the named ones, and those of a label, the last used first."""
        if label is not None:
            latest = sorted(
                await self._of(label, namespace), key=lambda info: (info.state != "awake", -(info.slept_ns or 0))
            )
            uris = [*uris, *(SessionUri.parse(info.session) for info in latest)]
        warmed = []
        for uri in dict.fromkeys(uris):
            warmed.append(await self._warm_one(uri, emit))
            await asyncio.sleep(0)  # an awake session waits for nothing
        infos = await in_pieces(self._roll.of(uri for uri, _, _ in warmed))
        return WarmResult(
            tuple(
                Warmed(info=infos[uri], hit=hit, left=left, hits=self._hits[uri])
                for uri, hit, left in warmed
                if uri in infos  # else it was deleted meanwhile
            )
        )

    async def _warm_one(self, uri: SessionUri, emit: OnEvent) -> tuple[SessionUri, bool, str | None]:
        try:
            async with self._residency.turn(uri) as use:
                if uri in self._residency.awake:
                    self._hits[uri] += 1
                    return uri, True, None
                return uri, False, await self._residency.warm(use, emit)
        except TorporError as error:
            return uri, False, error.code

    async def clear(self, label: str, namespace: str | None, *, dry_run: bool) -> ClearResult:
        """Delete every session of a label, even one that gets it meanwhile."""
        taken: dict[str, SessionInfo] = {}
        reports: list[DeleteReport] = []
        failed: dict[str, str] = {}
        while left := [info for info in await self._of(label, namespace) if info.session not in taken]:
            for info in left:
                taken[info.session] = info
                if not dry_run:
                    await self._clear_one(SessionUri.parse(info.session), label, reports, failed)
        cleared = taken.values() if dry_run else [taken[report.session] for report in reports]
        problems = [problem for report in reports for problem in report.problems]
        return ClearResult(
            label=label,
            dry_run=dry_run,
            sessions=tuple(info.session for info in cleared),
            tokens=sum(info.token_count for info in cleared),
            resident_bytes=sum(info.resident_bytes for info in cleared),
            written_bytes=sum(info.written_bytes for info in cleared),
            bytes_freed=sum(report.bytes_freed for report in reports),
            failed=failed,
            problems=tuple(problems[:MAX_PROBLEMS_TOLD]),
            problems_left_out=max(0, len(problems) - MAX_PROBLEMS_TOLD)
            + sum(report.problems_left_out for report in reports),
        )

    async def _clear_one(
        self, uri: SessionUri, label: str, reports: list[DeleteReport], failed: dict[str, str]
    ) -> None:
        try:
            async with self._residency.turn(uri):
                info = self._roll.find(uri)
                if info is not None and label in info.labels:
                    reports.append(await to_the_end(self._delete(uri)))
        except SessionNotFound:
            return  # deleted meanwhile
        except TorporError as error:
            failed[str(uri)] = f"{error.code}: {error.message}"

    async def _of(self, label: str, namespace: str | None) -> list[SessionInfo]:
        return [info for info in await in_pieces(self._roll.infos(namespace)) if label in info.labels]

    def _stats(self, infos: Sequence[SessionInfo], label: str | None) -> Pieces[StatsResult]:
        """Figures of all sessions by label; or only of one label."""
        total = LabelFigures(None, 0, 0, 0, 0, 0, 0)
        by_label = {} if label is None else {label: replace(total, label=label)}
        for looked_at, info in enumerate(infos, 1):
            if label is None or label in info.labels:
                total = self._with(total, info)
                for name in dict.fromkeys(info.labels) if label is None else (label,):
                    by_label[name] = self._with(by_label.get(name) or LabelFigures(name, 0, 0, 0, 0, 0, 0), info)
            if not looked_at % SESSIONS_AT_ONCE:
                yield
        return StatsResult(total=total, labels=tuple(by_label[name] for name in sorted(by_label)))

    def _with(self, figures: LabelFigures, info: SessionInfo) -> LabelFigures:
        return LabelFigures(
            label=figures.label,
            sessions=figures.sessions + 1,
            awake=figures.awake + (info.state == "awake"),
            tokens=figures.tokens + info.token_count,
            resident_bytes=figures.resident_bytes + info.resident_bytes,
            written_bytes=figures.written_bytes + info.written_bytes,
            hits=figures.hits + self._hits[SessionUri(info.namespace, info.name)],
        )
