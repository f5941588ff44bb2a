"""The table of verbs: what the daemon can be asked, a row each.

Both clients, the service and its double have their methods from here; the server and the documents read the rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from .forking import FoldRequest, FoldResult, ForkRequest, ForkResult
from .process import (
    LoadModelRequest,
    ModelInfo,
    ShutdownRequest,
    ShutdownResult,
    StatusRequest,
    StatusResult,
    SubscribeRequest,
    SubscribeResult,
    UnloadModelRequest,
)
from .reading import (
    AppendRequest,
    AppendResult,
    ChatRequest,
    GenerateRequest,
    GenerateResult,
    WhyRequest,
    WhyResult,
)
from .session import (
    CreateRequest,
    ListRequest,
    ListResult,
    SessionDetail,
    SessionInfo,
    SetRequest,
    ShowRequest,
)
from .store import (
    AnalyseRequest,
    AnalysisResult,
    ClearRequest,
    ClearResult,
    DeleteRequest,
    DeleteResult,
    ImportRequest,
    MaintainRequest,
    MaintenanceResult,
    MarkRequest,
    MarksResult,
    StatsRequest,
    StatsResult,
)
from .verb import Verb
from .waking import (
    PlanWakeRequest,
    SleepRequest,
    SleepResult,
    WakePlanResult,
    WakeRequest,
    WakeResult,
    WarmRequest,
    WarmResult,
)


class Verbs:
    """What a service answers."""

    status = Verb(StatusRequest, StatusResult, always=True)
    create = Verb(CreateRequest, SessionInfo)
    append = Verb(AppendRequest, AppendResult, leaves="Nothing of it was read.")
    generate = Verb(GenerateRequest, GenerateResult, leaves="Nothing of it was read or written.")
    chat = Verb(ChatRequest, GenerateResult, leaves="Nothing of it was read or written.")
    set = Verb(SetRequest, SessionInfo)
    sleep = Verb(SleepRequest, SleepResult)
    wake = Verb(WakeRequest, WakeResult, leaves="Nothing was woken.")
    plan_wake = Verb(PlanWakeRequest, WakePlanResult)
    fork = Verb(ForkRequest, ForkResult)
    fold = Verb(FoldRequest, FoldResult, leaves="There is no new session.")
    warm = Verb(WarmRequest, WarmResult, leaves="What it had woken stays awake.")
    stats = Verb(StatsRequest, StatsResult)
    clear = Verb(ClearRequest, ClearResult)
    list_sessions = Verb(ListRequest, ListResult, name="list")
    show = Verb(ShowRequest, SessionDetail)
    why = Verb(WhyRequest, WhyResult)
    analyse = Verb(AnalyseRequest, AnalysisResult, leaves="Nothing has changed.")
    delete = Verb(DeleteRequest, DeleteResult)
    maintain = Verb(MaintainRequest, MaintenanceResult)
    mark = Verb(MarkRequest, MarksResult)
    import_bundle = Verb(ImportRequest, SleepResult)
    load_model = Verb(LoadModelRequest, ModelInfo, leaves="The model was not loaded.")
    unload_model = Verb(UnloadModelRequest, ModelInfo)


class DaemonVerbs(Verbs):
    """What a client may ask: of the service, and beside that for the end of the process around it."""

    shutdown = Verb(ShutdownRequest, ShutdownResult, always=True)


SUBSCRIBE = Verb(SubscribeRequest, SubscribeResult, name="subscribe", leaves="No more is told.", watches=True)
"""No method, for its answer is the end of the daemon: clients open it and read what comes before."""

VERBS: Mapping[str, Verb[Any, Any]] = MappingProxyType(
    {row.name: row for row in [*vars(Verbs).values(), *vars(DaemonVerbs).values(), SUBSCRIBE] if isinstance(row, Verb)}
)
"""By their names on the wire, in the order in which they are declared."""
