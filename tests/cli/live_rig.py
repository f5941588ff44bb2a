"""What the tests of `torpor top` are told by a daemon: sessions, events, a status, requests that read again."""

from __future__ import annotations

from typing import Any

from torpor.cli.commands.top_screen import Top
from torpor.daemon.api.causes import RequestCost, Reuse
from torpor.daemon.api.events import NoticeEvent
from torpor.daemon.api.process import DiskInfo, MemoryInfo, ModelInfo, QueueInfo, StatusResult
from torpor.daemon.api.session import SessionInfo

A, B = "torpor://default/a", "torpor://default/b"
GIB = 1 << 30


def info(name: str, **facts: Any) -> SessionInfo:
    plain: dict[str, Any] = {
        "state": "awake",
        "model": "demo",
        "token_count": 100,
        "version": None,
        "bundle_id": None,
        "resident_bytes": 4096,
        "written_bytes": 0,
        "dirty": True,
        "labels": (),
        "slept_ns": None,
        "sampling": None,
    }
    return SessionInfo(session=f"torpor://default/{name}", namespace="default", name=name, **{**plain, **facts})


def event(name: str, session: str | None = "a", at_ns: int = 1, **facts: Any) -> NoticeEvent:
    return NoticeEvent(name, 1, 1.0, at_ns, 7, session and f"torpor://default/{session}", facts)


def status(**facts: Any) -> StatusResult:
    model = ModelInfo("demo", "/m", "id", "float32", 10, True, 2048, weights_bytes=GIB, sessions_awake=2)
    memory = MemoryInfo(8 * GIB, GIB, 2 * GIB, GIB // 2, 1, 0, 0)
    disk = DiskInfo(50 * GIB, 100 * GIB, 10 * GIB, None, GIB, 9 * GIB)
    plain: dict[str, Any] = {
        "version": "1.2.3",
        "pid": 42,
        "store": "/home/me/store",
        "models": (model,),
        "sessions_awake": 2,
        "sessions_asleep": 3,
        "memory": memory,
        "blas": "x",
        "uptime_s": 61.0,
        "queue": QueueInfo(4, 1, 512),
    }
    return StatusResult(**{**plain, "disk": disk, **facts})


def screen_of(app: Top) -> list[str]:
    """The lines of the screen."""
    return ["".join(segment.text for segment in strip) for strip in app.screen._compositor.render_strips()]


def reuse(at_ns: int, cause: str | None, **facts: Any) -> Reuse:
    again = 0 if cause is None else 30
    cost = RequestCost(1, "chat", at_ns, cause=cause or "hit", read_tokens=50, read_again_tokens=again)
    outcome = "hit" if cause is None else "diverged"
    return Reuse("chat", at_ns, outcome, A, 10, 40, position=10, cause=cause, cost=cost, **facts)
