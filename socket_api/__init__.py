"""The wire of Torpor and its clients. What is exported here imports without MLX and without the daemon; the server
half (`server`, `serving`, `main`) is imported by name.
"""

from .aclient import AsyncClient, AsyncTextStream
from .address import default_socket_path
from .client import Client, TextStream
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
from .results import (
    AppendResult,
    DeleteResult,
    ForkResult,
    GenerateResult,
    MaintenanceAction,
    MaintenanceProblem,
    MaintenanceResult,
    MarksResult,
    ModelInfo,
    ProgressEvent,
    Sampling,
    SessionDetail,
    SessionInfo,
    ShutdownResult,
    SleepResult,
    StatusResult,
    TokenEvent,
    VersionInfo,
    WakeResult,
)

__all__ = [
    "ApiError",
    "AppendResult",
    "AsyncClient",
    "AsyncTextStream",
    "Client",
    "ClientClosed",
    "ConnectionLost",
    "DaemonUnreachable",
    "DeleteResult",
    "ForkResult",
    "GenerateResult",
    "InvalidRequest",
    "MaintenanceAction",
    "MaintenanceProblem",
    "MaintenanceResult",
    "MarksResult",
    "ModelInfo",
    "ProgressEvent",
    "ProtocolError",
    "RemoteError",
    "RequestTimeout",
    "Sampling",
    "SessionDetail",
    "SessionInfo",
    "ShutdownResult",
    "SleepResult",
    "StatusResult",
    "TextStream",
    "TokenEvent",
    "VersionInfo",
    "WakeResult",
    "default_socket_path",
]
