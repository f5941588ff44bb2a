"""The table of verbs: one row for each request that the daemon accepts.

Both clients, the service and its double take their methods from here; the server and the documents read the rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ...memvid import answers
from ...spellings import EARLIER
from . import (
    blocks,
    branching,
    conversing,
    creating,
    forking,
    process,
    reading,
    recalling,
    remote,
    session,
    store,
    waking,
)
from .causes import CausesResult, WhyResult
from .contents import Contents
from .difference import Difference
from .history import HistoryResult
from .verb import Verb


class Verbs:
    """The verbs of a service."""

    status = Verb(process.StatusRequest, process.StatusResult, always=True)
    create = Verb(creating.CreateRequest, session.SessionInfo)
    append = Verb(reading.AppendRequest, reading.AppendResult, leaves="Nothing of it was read.")
    generate = Verb(reading.GenerateRequest, reading.GenerateResult, leaves="Nothing of it was read or written.")
    chat = Verb(reading.ChatRequest, reading.GenerateResult, leaves="Nothing of it was read or written.")
    converse = Verb(conversing.ConverseRequest, reading.GenerateResult, leaves="Nothing of it was read or written.")
    measure = Verb(conversing.MeasureRequest, conversing.MeasureResult)
    recall = Verb(recalling.RecallRequest, recalling.RecallResult)
    disown = Verb(recalling.DisownRequest, recalling.DisownResult)
    set = Verb(creating.SetRequest, session.SessionInfo)
    sleep = Verb(waking.SleepRequest, waking.SleepResult)
    save = Verb(waking.SaveRequest, waking.SleepResult)
    wake = Verb(waking.WakeRequest, waking.WakeResult, leaves="Nothing was woken.")
    plan_wake = Verb(waking.PlanWakeRequest, waking.WakePlanResult)
    fork = Verb(forking.ForkRequest, forking.ForkResult)
    fold = Verb(forking.FoldRequest, forking.FoldResult, leaves="There is no new session.")
    warm = Verb(waking.WarmRequest, waking.WarmResult, leaves="What it had woken stays awake.")
    usage = Verb(store.UsageRequest, answers.UsageReport)
    stats = Verb(store.StatsRequest, store.StatsResult)
    clear = Verb(store.ClearRequest, store.ClearResult)
    list_sessions = Verb(creating.ListRequest, session.ListResult, name="list")
    show = Verb(creating.ShowRequest, session.SessionDetail)
    history = Verb(creating.HistoryRequest, HistoryResult)
    why = Verb(reading.WhyRequest, WhyResult)
    causes = Verb(reading.CausesRequest, CausesResult)
    analyze = Verb(store.AnalyzeRequest, store.AnalysisResult, leaves="Nothing has changed.")
    blocks = Verb(store.BlocksRequest, blocks.BlocksResult, leaves="Nothing has changed.")
    contents = Verb(store.ContentsRequest, Contents)
    difference = Verb(store.DifferenceRequest, Difference)
    delete = Verb(store.DeleteRequest, answers.DeleteReport)
    maintain = Verb(store.MaintainRequest, answers.MaintenanceReport)
    mark = Verb(store.MarkRequest, answers.MarkedVersion)
    push = Verb(remote.PushRequest, remote.PushResult)
    pull = Verb(remote.PullRequest, remote.PullResult)
    remote = Verb(remote.RemoteRequest, remote.RemoteSessionsResult)
    import_bundle = Verb(store.ImportRequest, waking.SleepResult)
    load_model = Verb(process.LoadModelRequest, process.ModelInfo, leaves="The model was not loaded.")
    unload_model = Verb(process.UnloadModelRequest, process.ModelInfo)
    tree = Verb(branching.TreeRequest, branching.BranchInfo, leaves="There is no tree.")
    branch = Verb(branching.BranchRequest, branching.BranchesResult, leaves="There is no new branch.")
    prefill = Verb(branching.PrefillRequest, branching.BranchesResult, leaves="Nothing of it was read.")
    produce = Verb(branching.ProduceRequest, branching.ProduceResult, leaves="Nothing has changed.")
    commit = Verb(branching.CommitRequest, branching.BranchesResult)
    advance = Verb(branching.AdvanceRequest, branching.AdvanceResult, leaves="The branches have what events told of.")
    diverge = Verb(branching.DivergeRequest, branching.DivergeResult, leaves="There is no new branch.")
    guide = Verb(branching.GuideRequest, branching.BranchesResult)
    prune = Verb(branching.PruneRequest, branching.PruneResult)
    retain = Verb(branching.RetainRequest, branching.BranchInfo)
    keep = Verb(branching.KeepRequest, session.SessionInfo)
    branches = Verb(branching.BranchesRequest, branching.BranchesResult)

    if not TYPE_CHECKING:  # else a type checker would accept any name

        def __getattr__(self, name):
            """A verb by the earlier spelling of its name."""
            if name not in EARLIER:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            return getattr(self, EARLIER[name])


class DaemonVerbs(Verbs):
    """The verbs of a client: those of the service, and the stop of its process."""

    shutdown = Verb(process.ShutdownRequest, process.ShutdownResult, always=True)


SUBSCRIBE = Verb(
    process.SubscribeRequest, process.SubscribeResult, name="subscribe", leaves="No more is told.", watches=True
)
"""No method, as its answer is the end of the daemon: clients open it and read the events before that."""

VERBS: Mapping[str, Verb[Any, Any]] = MappingProxyType(
    {row.name: row for row in [*vars(Verbs).values(), *vars(DaemonVerbs).values(), SUBSCRIBE] if isinstance(row, Verb)}
)
"""By their names on the wire, in the order of their declaration."""
