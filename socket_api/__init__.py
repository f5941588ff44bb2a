"""The wire of Torpor and its clients. The exports import no MLX: of the daemon only the records of its verbs, of the
store those of its answers. The server half (`server`, `serving`, `main`) is imported by name.

Modules are imported at the first use of their names here: an import of `errors` or `wire.address` alone does not wait
for the whole protocol.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..daemon.api.events import NoticeEvent, ProgressEvent, SessionEvent, TokenEvent
    from ..daemon.api.forking import ForkResult
    from ..daemon.api.process import ModelInfo, ShutdownResult, StatusResult, SubscribeResult
    from ..daemon.api.reading import AppendResult, GenerateResult
    from ..daemon.api.sampling import Sampling
    from ..daemon.api.session import SessionDetail, SessionInfo
    from ..daemon.api.store import ClearResult, StatsResult
    from ..daemon.api.waking import SleepResult, WakeResult, WarmResult
    from ..memvid.answers import (
        Action,
        DeleteReport,
        Finding,
        MaintenanceReport,
        MarkedVersion,
        ShownVersion,
        VersionInfo,
    )
    from .client.aclient import AsyncClient, AsyncSubscription, AsyncTextStream
    from .client.client import Client, Subscription, TextStream
    from .errors import (
        ApiError,
        ClientClosed,
        ConnectionLost,
        DaemonUnreachable,
        InvalidRequest,
        ProtocolError,
        RemoteError,
        RequestTimeout,
    )
    from .wire.address import default_socket_path

__all__ = [
    "Action",
    "ApiError",
    "AppendResult",
    "AsyncClient",
    "AsyncSubscription",
    "AsyncTextStream",
    "ClearResult",
    "Client",
    "ClientClosed",
    "ConnectionLost",
    "DaemonUnreachable",
    "DeleteReport",
    "Finding",
    "ForkResult",
    "GenerateResult",
    "InvalidRequest",
    "MaintenanceReport",
    "MarkedVersion",
    "ModelInfo",
    "NoticeEvent",
    "ProgressEvent",
    "ProtocolError",
    "RemoteError",
    "RequestTimeout",
    "Sampling",
    "SessionDetail",
    "SessionEvent",
    "SessionInfo",
    "ShownVersion",
    "ShutdownResult",
    "SleepResult",
    "StatsResult",
    "StatusResult",
    "SubscribeResult",
    "Subscription",
    "TextStream",
    "TokenEvent",
    "VersionInfo",
    "WakeResult",
    "WarmResult",
    "default_socket_path",
]

if not TYPE_CHECKING:  # else a type checker would accept any name

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from ..daemon.api import events, forking, process, reading, sampling, session, store, waking
        from ..memvid import answers
        from . import errors
        from .client import aclient, client
        from .wire import address

        records = (answers, events, forking, process, reading, sampling, session, store, waking)
        modules = (errors, address, *records, client, aclient)
        return next(getattr(module, name) for module in modules if hasattr(module, name))
