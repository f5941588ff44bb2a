"""A service without a model, for what a real one cannot be made to do: hold, stall, fail, or answer as a test wants.

It has no branches; that every verb crosses every front is shown with a real service (`fronts/`).

A token of its language is a number whose text is `t<number> `; what a session generates next follows from its length,
so answers can be predicted. Generation goes on in steps that tests can hold (`hold`) and watch; nothing sleeps.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, cast

from torpor.daemon.api import conversing, creating, forking, process, reading, recalling, session, store, waking
from torpor.daemon.api.causes import CausesResult, Costs, WhyResult
from torpor.daemon.api.creating import CreateRequest
from torpor.daemon.api.events import NEVER_SENT, OnEvent, ProgressEvent, SessionEvent, TokenEvent
from torpor.daemon.api.history import HistoryResult
from torpor.daemon.api.records import Request
from torpor.daemon.api.sampling import Sampling
from torpor.daemon.api.verb import Awaiting, R, Verb
from torpor.daemon.api.verbs import VERBS, Verbs
from torpor.daemon.errors import AnswerNotFound
from torpor.daemon.events.bus import Bus, Resumable, Subscription, Wanted
from torpor.daemon.events.figures import Figures
from torpor.daemon.tasks.cancellation import LeftMidway
from torpor.errors import TorporError
from torpor.memvid.answers import Action, DeleteReport, MaintenanceReport, MarkedVersion, ShownVersion, UsageReport
from torpor.memvid.uri import SessionUri, session_in
from torpor.records import Result


class FakeNotFound(TorporError):
    code = "session_not_found"


class FakeBusy(TorporError):
    code = "session_exists"


@dataclass
class FakeSession:
    info: session.SessionInfo
    tokens: list[int] = field(default_factory=list)
    versions: list[ShownVersion] = field(default_factory=list)
    tags: dict[str, int] = field(default_factory=dict)
    pinned: set[int] = field(default_factory=set)

    def now(self, **facts: Any) -> None:
        """Let other facts hold of it."""
        self.info = replace(self.info, **facts)


class FakeService(Verbs, Awaiting):
    """Sessions in memory. `calls` records what was asked, as far as it was given; `running` counts generations that
    have not ended."""

    def __init__(self) -> None:
        self.sessions: dict[str, FakeSession] = {}
        self.calls: list[tuple[str, dict[str, object]]] = []
        self.running = 0
        self.cancelled = 0
        self.closed = False
        self.open_gate = asyncio.Event()
        self.open_gate.set()
        self.prepare_gate = asyncio.Event()
        self.prepare_gate.set()
        self.close_gate = asyncio.Event()
        self.close_gate.set()
        self.fault: BaseException | None = None
        self.piece = ""  # text of each token, instead of its own
        self.fail_sleep: dict[str, str] = {}
        self.store = "/store"
        self.artifact = "{}\n"
        self.left: str | None = None  # why no session can be warmed
        self.fail_clear: dict[str, str] = {}
        self.bus = Bus()
        self.model = process.ModelInfo("fake", "/nowhere", "ab" * 32, "float32", 1, True, 8192)
        self.answers: dict[type[Request], Callable[[Any], Awaitable[Result]]] = {
            verb.request: getattr(self, f"_{name}") for name, verb in VERBS.items() if hasattr(self, f"_{name}")
        }

    @property
    def figures(self) -> Figures:
        return self.bus.figures

    def hold(self) -> None:
        """Stop all work before its next step, until `release`."""
        self.open_gate.clear()

    def release(self) -> None:
        self.open_gate.set()

    def also(self, verb: str, **facts: Any) -> None:
        """Let the answers to a verb have these facts, too."""
        request, answer = VERBS[verb].request, self.answers[VERBS[verb].request]

        async def with_facts(request: Any) -> Any:
            return replace(await answer(request), **facts)

        self.answers[request] = with_facts

    async def ask(self, verb: Verb[Any, R], request: Request) -> R:
        self._record(verb.name, given(request))
        try:
            return cast("R", await self.answers[type(request)](request))
        except BaseException:
            found = self.sessions.get(name_of(getattr(request, "session", None) or ""))
            if getattr(request, "create", False) and found is not None and not found.tokens:
                del self.sessions[found.info.name]
            raise

    async def _status(self, request: process.StatusRequest) -> process.StatusResult:
        memory = process.MemoryInfo(1 << 30, 1, 0, 0, 0, 0, 0)
        awake = sum(session.info.state == "awake" for session in self.sessions.values())
        models, asleep, queue = (self.model,), len(self.sessions) - awake, process.QueueInfo(0, 0, 512)
        return process.StatusResult("0.1.0", os.getpid(), self.store, models, awake, asleep, memory, "none", 0.5, queue)

    async def _create(self, request: creating.CreateRequest) -> session.SessionInfo:
        if request.session in self.sessions:
            raise FakeBusy(f"{request.session} exists. Choose another name.", session=request.session)
        info = session.SessionInfo(
            session=f"torpor://default/{request.session}",
            namespace="default",
            name=request.session,
            state="awake",
            model=request.model or "fake",
            token_count=0,
            version=None,
            bundle_id=None,
            resident_bytes=0,
            written_bytes=0,
            dirty=True,
            labels=tuple(request.labels),
            slept_ns=1,
            sampling=request.sampling or Sampling(),
        )
        self.sessions[request.session] = FakeSession(info)
        return info

    async def _append(self, request: reading.AppendRequest) -> reading.AppendResult:
        found, woken = await self._find_awake(request.session, request.emit, new=request)
        added = (
            list(request.tokens) if request.tokens is not None else [len(word) for word in (request.text or "").split()]
        )
        for done in range(0, len(added), 2):
            await self._step()
            request.emit(ProgressEvent("prefill", min(done + 2, len(added)), len(added)))
        found.tokens += added
        return reading.AppendResult(found.info.session, len(added), len(found.tokens), len(added), 0.25, woken)

    async def _generate(self, request: reading.GenerateRequest) -> reading.GenerateResult:
        found, woken = await self._find_awake(request.session, request.emit, new=request)
        read = list(request.tokens or ()) + [len(word) for word in (request.text or "").split()]
        found.tokens += read
        told = await self._write(
            found, request.max_tokens or 4, request.prove, request.emit, woken, was_read=bool(read)
        )
        return replace(told, prefilled_tokens=told.prefilled_tokens + len(request.tokens or ()))

    async def _chat(self, request: reading.ChatRequest) -> reading.GenerateResult:
        found, woken = await self._find_awake(request.session, request.emit, new=request)
        request.emit(ProgressEvent("prefill", 1, 1))
        found.tokens.append(len(request.message or ""))
        return await self._write(found, request.max_tokens or 4, request.prove, request.emit, woken, was_read=True)

    async def _converse(self, request: conversing.ConverseRequest) -> reading.GenerateResult:
        """The session of that name answers: this service does not search."""
        found, woken = await self._find_awake(
            request.session, request.emit, new=reading.GenerateRequest("", create=True)
        )
        request.emit(SessionEvent(found.info.session))
        request.emit(ProgressEvent("prefill", 1, 1))
        return await self._write(found, request.max_tokens or 4, False, request.emit, woken, was_read=True)

    async def _measure(self, request: conversing.MeasureRequest) -> conversing.MeasureResult:
        words = sum(len(message["content"].split()) for message in request.messages)
        return conversing.MeasureResult(words, 0, self.model.context_tokens or 0, request.model or "fake")

    async def _recall(self, request: recalling.RecallRequest) -> recalling.RecallResult:
        """This service keeps no words."""
        raise AnswerNotFound("There is no such answer.", answer_id=request.answer_id)

    async def _disown(self, request: recalling.DisownRequest) -> recalling.DisownResult:
        raise AnswerNotFound("There is no such answer.", answer_id=request.answer_id)

    async def _set(self, request: creating.SetRequest) -> session.SessionInfo:
        found, _ = await self._find_awake(request.session, request.emit)
        found.now(sampling=(found.info.sampling or Sampling()).changed(request.sampling))
        return found.info

    async def _sleep(self, request: waking.SleepRequest) -> waking.SleepResult:
        slept = await self._save(waking.SaveRequest(request.session, on_event=request.on_event))
        found = self._find(request.session)
        found.now(state="asleep")
        return slept

    async def _save(self, request: waking.SaveRequest) -> waking.SleepResult:
        found = self._find(request.session)
        await self._step()
        size = 4 * len(found.tokens)
        request.emit(ProgressEvent("sleep", size, size))
        version = len(found.versions) + 1
        parent = found.versions[-1].bundle_id if found.versions else None
        made = ShownVersion(
            session=found.info.session,
            version=version,
            bundle_id=f"{version:064x}",
            parent=parent,
            identity="11" * 32,
            token_count=len(found.tokens),
            unread_tokens=0,
            bundle_bytes=size,
            logical_bytes=size,
            created_ns=version,
            model=found.info.model,
            labels=found.info.labels,
            lossy=None,
            unnamed=False,
            used_ns=0,
            tags=(),
            pinned=False,
            stripped=False,
        )
        found.versions.append(made)
        found.now(version=version, bundle_id=made.bundle_id, dirty=False)
        return waking.SleepResult(
            found.info.session, version, made.bundle_id, parent, len(found.tokens), size, size, 1, version - 1, 0.25
        )

    async def _plan_wake(self, request: waking.PlanWakeRequest) -> waking.WakePlanResult:
        found = self._find(request.session)
        if found.info.state == "awake":
            return waking.WakePlanResult(found.info.session, 1, None, len(found.tokens), True, "fake", True)
        made = found.versions[(request.version or len(found.versions)) - 1]
        return waking.WakePlanResult(
            found.info.session,
            made.version,
            made.bundle_id,
            made.token_count,
            False,
            "fake",
            self.model.resident,
            bytes_to_read=3 << 20,
            blocks=5,
            restored_tokens=made.token_count,
            computed_tokens=1,
            memory_bytes=4 << 20,
        )

    async def _wake(self, request: waking.WakeRequest) -> waking.WakeResult:
        found = self._find(request.session)
        await self._step()
        request.emit(ProgressEvent("wake", 1, 1))
        already = found.info.state == "awake"
        found.now(state="awake")
        made = found.versions[(request.version or len(found.versions)) - 1]
        return waking.WakeResult(
            session=found.info.session,
            version=made.version,
            bundle_id=made.bundle_id,
            token_count=made.token_count,
            tokens_prefilled=0,
            bytes_read=8,
            seconds=0.25,
            already_awake=already,
            provenance=session.Provenance(),
        )

    async def _list(self, request: creating.ListRequest) -> session.ListResult:
        return session.ListResult(tuple(session.info for session in self.sessions.values()))

    async def _history(self, _: creating.HistoryRequest) -> HistoryResult:
        return HistoryResult(())

    async def _show(self, request: creating.ShowRequest) -> session.SessionDetail:
        found = self._find(session_in(request.session))
        identity, backend = {"weights": "ab"}, {"mlx": "1.2"}
        return session.SessionDetail(
            info=found.info,
            versions=tuple(found.versions),
            tail_text="…tail",
            layers=("kv 2x8x32",),
            lineage=(),
            identity=identity,
            provenance=session.Provenance(),
            backend=backend,
        )

    async def _stats(self, request: store.StatsRequest) -> store.StatsResult:
        infos = [
            each.info for each in self.sessions.values() if request.label is None or request.label in each.info.labels
        ]
        names = sorted({name for info in infos for name in info.labels}) if request.label is None else [request.label]
        return store.StatsResult(
            total=self._figures(None, infos),
            labels=tuple(self._figures(name, [info for info in infos if name in info.labels]) for name in names),
        )

    def _figures(self, label: str | None, infos: Sequence[session.SessionInfo]) -> store.LabelFigures:
        awake, tokens = sum(info.state == "awake" for info in infos), sum(info.token_count for info in infos)
        return store.LabelFigures(label, len(infos), awake, tokens, 1 << 20, 2 << 20, 7)

    async def _warm(self, request: waking.WarmRequest) -> waking.WarmResult:
        named = [self._find(name).info for name in request.sessions]
        named += [each.info for each in self.sessions.values() if request.label in each.info.labels]
        return waking.WarmResult(tuple(waking.Warmed(info, self.left is None, self.left, 3) for info in named))

    async def _clear(self, request: store.ClearRequest) -> store.ClearResult:
        infos = [each.info for each in self.sessions.values() if request.label in each.info.labels]
        kept = {f"torpor://default/{name}": reason for name, reason in self.fail_clear.items()}
        gone = [info for info in infos if info.session not in kept]
        for info in () if request.dry_run else gone:
            del self.sessions[info.name]
        uris = tuple(info.session for info in gone)
        return store.ClearResult(request.label, request.dry_run, uris, 5, 0, 4096, 0 if request.dry_run else 2048, kept)

    def subscribe(
        self, *, names: Sequence[str] | None = None, session: str | None = None, namespace: str | None = None
    ) -> Subscription:
        self._record("subscribe", {"names": names, "session": session, "namespace": namespace})
        uri = None if session is None else SessionUri("default", session)
        return self.bus.subscribe(Wanted(None if names is None else frozenset(names), uri, namespace), most_waiting=8)

    def resume(
        self, names: Sequence[str] | None, session: str | None, namespace: str | None, *, after: str | None
    ) -> Resumable:
        self._record("resume", {"names": names, "session": session, "namespace": namespace, "after": after})
        uri = None if session is None else SessionUri("default", session)
        return self.bus.resume(Wanted(None if names is None else frozenset(names), uri, namespace), after)

    async def _fold(self, request: forking.FoldRequest) -> forking.FoldResult:
        found = self._find(request.session)
        await self._step()
        origin = session.Origin(found.info.session, 1, f"{1:064x}", len(found.tokens))
        info = replace(
            found.info, session=f"torpor://default/{request.name}", name=request.name, state="awake", version=1
        )
        self.sessions[request.name] = FakeSession(info, found.tokens[len(found.tokens) - request.tail :])
        count = len(self.sessions[request.name].tokens)
        words = request.summary or "in short"
        read = count + 5
        written = waking.Written(info.session, 1, f"{2:064x}", None, read, 512, 4 * read, 1, 0, 0.25)
        return forking.FoldResult(*vars(written).values(), origin, count, words, read, 0)

    async def _why(self, request: reading.WhyRequest) -> WhyResult:
        return WhyResult(self._find(request.session).info.session, ())

    async def _causes(self, request: reading.CausesRequest) -> CausesResult:
        return CausesResult(request.by, (), Costs(""))

    async def _usage(self, request: store.UsageRequest) -> UsageReport:
        return UsageReport(*(0,) * 18, sessions=())

    async def _fork(self, request: forking.ForkRequest) -> forking.ForkResult:
        found = self._find(request.session.partition("@")[0])
        await self._step()
        tokens = len(found.tokens) if request.at_token is None else request.at_token
        origin = session.Origin(found.info.session, 1, f"{1:064x}", tokens)
        info = replace(
            found.info, session=f"torpor://default/{request.name}", name=request.name, state="asleep", version=1
        )
        self.sessions[request.name] = FakeSession(info, found.tokens[:tokens])
        return forking.ForkResult(info.session, 1, f"{2:064x}", None, tokens, 512, 4 * tokens, 0, 2, 0.25, origin, 0)

    async def reload_config(self) -> None:
        self._record("reload_config", {})

    async def _load_model(self, request: process.LoadModelRequest) -> process.ModelInfo:
        await self._step()
        return replace(self.model, name=request.model, loads=1)

    async def _unload_model(self, request: process.UnloadModelRequest) -> process.ModelInfo:
        return replace(self.model, name=request.model, resident=False)

    async def _analyze(self, request: store.AnalyzeRequest) -> store.AnalysisResult:
        name, _, at = request.session.partition("@")
        found = self._find(name)
        await self._step()
        request.emit(ProgressEvent("analyze", 1, 1))
        made = found.versions[int(at or len(found.versions)) - 1]
        awake = len(found.tokens) if found.info.state == "awake" else None
        return store.AnalysisResult(
            found.info.session, made.version, made.bundle_id, made.token_count, awake, self.artifact, 0.25
        )

    async def _delete(self, request: store.DeleteRequest) -> DeleteReport:
        name, _, at = request.session.partition("@")
        found = self._find(name)
        await self._step()
        if at:
            found.versions = [each for each in found.versions if each.version != int(at)]
            return DeleteReport(found.info.session, 1, 4)
        del self.sessions[name]
        return DeleteReport(found.info.session, len(found.versions), 4 * len(found.tokens))

    async def _maintain(self, request: store.MaintainRequest) -> MaintenanceReport:
        uri = None if request.session is None else self._find(request.session.partition("@")[0]).info.session
        await self._step()
        if request.operation == "forget" and not request.dry_run:
            del self.sessions[request.session or ""]
        action = Action("remove", f"packs/{'ab' * 32}.mvp", uri, 1 if uri else None, 2048, "unneeded")
        return MaintenanceReport(request.operation, request.dry_run, (action,), 3, 2048, 0)

    async def _mark(self, request: store.MarkRequest) -> MarkedVersion:
        name, _, at = request.session.partition("@")
        found = self._find(name)
        version = found.tags.pop(request.untag) if request.untag is not None else int(at or len(found.versions))
        if request.tag is not None:
            found.tags[request.tag] = version
        if request.pinned is not None:
            (found.pinned.add if request.pinned else found.pinned.discard)(version)
        tags = tuple(sorted(tag for tag, on in found.tags.items() if on == version))
        return MarkedVersion(found.info.session, version, f"{version:064x}", tags, version in found.pinned)

    async def _import_bundle(self, request: store.ImportRequest) -> waking.SleepResult:
        await self._step()
        name = request.session or "imported"
        return waking.SleepResult(f"torpor://default/{name}", 1, request.bundle_id, None, 3, 4096, 4096, 1, 0, 0.25)

    async def prepare_close(self) -> process.ShutdownResult:
        self._record("prepare_close", {})
        await self.prepare_gate.wait()
        return self._report()

    async def begin_close(self) -> None:
        self._record("begin_close", {})

    async def close(self) -> process.ShutdownResult:
        self.closed = True
        await self.close_gate.wait()
        return self._report()

    def _report(self) -> process.ShutdownResult:
        kept = [s for s in self.sessions.values() if s.info.name not in self.fail_sleep]
        slept = tuple(s.info.session for s in kept if s.tokens)
        return process.ShutdownResult(slept, dict(self.fail_sleep), tuple(s.info.session for s in kept if not s.tokens))

    async def _find_awake(
        self, session: str, emit: OnEvent, *, new: reading.AppendRequest | reading.WritingRequest | None = None
    ) -> tuple[FakeSession, waking.WakeResult | None]:
        """new: says whether a session is made, on which model and with which labels."""
        session = name_of(session)
        if new is not None and new.create and session not in self.sessions:
            await self._create(CreateRequest(session, model=new.model, labels=new.labels or ()))
            if self.fault is not None:
                raise self.fault
        found = self._find(session)
        if found.info.state == "awake":
            return found, None
        woken = await self.answers[waking.WakeRequest](waking.WakeRequest(session, on_event=emit))
        return found, cast("waking.WakeResult", woken)

    async def _write(
        self,
        found: FakeSession,
        max_tokens: int,
        prove: bool,
        emit: OnEvent,
        woken: waking.WakeResult | None,
        *,
        was_read: bool,
    ) -> reading.GenerateResult:
        self.running += 1
        written: list[int] = []
        texts: list[str] = []
        try:
            for _ in range(max_tokens):
                await self._step()
                token = len(found.tokens)
                found.tokens.append(token)
                written.append(token)
                texts.append(self.piece or f"t{token} ")
                emit(TokenEvent(token, texts[-1]))
        except asyncio.CancelledError:
            self.cancelled += 1
            if not (was_read or written):
                raise
            raise LeftMidway(
                was_read=was_read, tokens=tuple(written), text="".join(texts), token_count=len(found.tokens)
            ) from None
        finally:
            self.running -= 1
        return reading.GenerateResult(
            session=found.info.session,
            text="".join(texts),
            tokens=tuple(written),
            finish_reason="length",
            token_count=len(found.tokens),
            prefilled_tokens=0,
            time_to_first_token_s=0.125,
            seconds=0.25,
            logits_blake3=tuple("cd" * 32 for _ in written) if prove else None,
            final_logits_blake3="ef" * 32 if prove else None,
            woken=woken,
        )

    async def _step(self) -> None:
        if self.fault is not None:
            raise self.fault
        await asyncio.sleep(0)  # not a wait: other tasks get their turn, as between the engine's steps
        await self.open_gate.wait()

    def _find(self, session: str) -> FakeSession:
        name = name_of(session)
        if name not in self.sessions:
            raise FakeNotFound(f"There is no session {session!r}. See: torpor ls", session=session)
        return self.sessions[name]

    def _record(self, verb: str, asked: Mapping[str, object]) -> None:
        self.calls.append((verb, {name: value for name, value in asked.items() if value is not None}))


def name_of(session: str) -> str:
    """The bare name of a session."""
    return session.removeprefix("torpor://default/")


def given(request: Request) -> dict[str, object]:
    """What of a request is not as it is left out."""
    found = {each.name: (getattr(request, each.name), each.default) for each in fields(request)}
    named = {name: value for name, (value, default) in found.items() if name not in NEVER_SENT and value != default}
    return {name: value.named() if isinstance(value, Sampling) else value for name, value in named.items()}
