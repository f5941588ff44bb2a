"""A service without a model, true to the contract of `torpor.daemon.service.Service`.

A token of its language is a number whose text is `t<number> `; what a session generates next follows from its length,
so answers can be predicted. Generation goes on in steps that tests can hold (`hold`) and watch; nothing sleeps.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from torpor.daemon.api.origin import Origin
from torpor.daemon.api.recomputed import Recomputed
from torpor.daemon.api.results import (
    AnalysisResult,
    AppendResult,
    ClearResult,
    CloseReport,
    DeleteResult,
    Emit,
    FoldResult,
    ForkResult,
    GenerateResult,
    LabelFigures,
    Lossy,
    MaintenanceAction,
    MaintenanceProblem,
    MaintenanceResult,
    MarksResult,
    MeasuredRate,
    MemoryInfo,
    ModelInfo,
    PartDiffers,
    PlannedFile,
    Progress,
    QueueInfo,
    Reuse,
    SessionDetail,
    SessionInfo,
    SleepResult,
    StatsResult,
    Status,
    Token,
    VersionInfo,
    WakePlanResult,
    WakeResult,
    Warmed,
    WarmResult,
    WhyResult,
)
from torpor.daemon.api.sampling import Sampling
from torpor.daemon.engine.admission import Priority
from torpor.daemon.engine.cancellation import LeftMidway
from torpor.daemon.events.bus import Bus, Subscription, Wanted
from torpor.errors import TorporError
from torpor.memvid.uri import SessionUri


class FakeNotFound(TorporError):
    code = "session_not_found"


class FakeBusy(TorporError):
    code = "session_exists"


@dataclass
class FakeSession:
    info: SessionInfo
    tokens: list[int] = field(default_factory=list)
    versions: list[VersionInfo] = field(default_factory=list)
    tags: dict[str, int] = field(default_factory=dict)
    pinned: set[int] = field(default_factory=set)


class FakeService:
    """Sessions in memory. `calls` records what was asked; `running` counts generations that have not ended."""

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
        self.differs: tuple[PartDiffers, ...] = ()
        self.artifact = "{}\n"
        self.lossy: Lossy | None = None
        self.recomputed: Recomputed | None = None
        self.left: str | None = None  # why no session can be warmed
        self.fail_clear: dict[str, str] = {}
        self.prefilled_by_wakes = 0
        self.verified = True
        self.forked_from: Origin | None = None
        self.folded_from: Origin | None = None
        self.bus = Bus()
        self.model = ModelInfo("fake", "/nowhere", "ab" * 32, "float32", 1, True, 8192)
        self.reuses: tuple[Reuse, ...] = ()
        self.problems: tuple[MaintenanceProblem, ...] = ()  # what each operation on the store leaves behind

    def hold(self) -> None:
        """Stop all work before its next step, until `release`."""
        self.open_gate.clear()

    def release(self) -> None:
        self.open_gate.set()

    async def status(self) -> Status:
        self._record("status")
        memory = MemoryInfo(1 << 30, 1, 0, 0, 0, 0, 0)
        awake = sum(session.info.state == "awake" for session in self.sessions.values())
        models, asleep, queue = (self.model,), len(self.sessions) - awake, QueueInfo(0, 0, 512)
        return Status("0.1.0", os.getpid(), self.store, models, awake, asleep, memory, "none", 0.5, queue)

    async def create(
        self,
        *,
        session: str,
        model: str | None = None,
        labels: Sequence[str] = (),
        sampling: Sampling | None = None,
        system: str | None = None,
    ) -> SessionInfo:
        self._record("create", session=session, model=model, labels=labels, sampling=sampling, system=system)
        if session in self.sessions:
            raise FakeBusy(f"{session} exists. Choose another name.", session=session)
        info = SessionInfo(
            session=f"torpor://default/{session}",
            namespace="default",
            name=session,
            state="awake",
            model=model or "fake",
            token_count=0,
            version=None,
            bundle_id=None,
            resident_bytes=0,
            stored_bytes=0,
            dirty=True,
            labels=tuple(labels),
            slept_ns=1,
            sampling=sampling or Sampling(),
        )
        self.sessions[session] = FakeSession(info)
        return info

    async def append(
        self,
        *,
        session: str,
        text: str | None = None,
        tokens: Sequence[int] | None = None,
        create: bool = False,
        priority: Priority = "normal",
        emit: Emit,
    ) -> AppendResult:
        self._record("append", session=session, text=text, tokens=tokens, **_unless_normal(priority))
        found, woken = await self._find_awake(session, emit, create=create)
        added = list(tokens) if tokens is not None else [len(word) for word in (text or "").split()]
        for done in range(0, len(added), 2):
            await self._step()
            emit(Progress("prefill", min(done + 2, len(added)), len(added)))
        found.tokens += added
        return AppendResult(found.info.session, len(added), len(found.tokens), len(added), 0.25, woken)

    async def generate(
        self,
        *,
        session: str,
        max_tokens: int | None = None,
        text: str | None = None,
        sampling: Mapping[str, float | int] | None = None,
        stop: Sequence[str] = (),
        prove: bool = False,
        create: bool = False,
        priority: Priority = "normal",
        emit: Emit,
    ) -> GenerateResult:
        asked = {"text": text, "sampling": sampling, "stop": stop, "prove": prove, **_unless_normal(priority)}
        self._record("generate", session=session, max_tokens=max_tokens, **asked)
        found, woken = await self._find_awake(session, emit, create=create)
        if text is not None:
            found.tokens += [len(word) for word in text.split()]
        return await self._write(found, max_tokens or 4, prove, emit, woken, was_read=text is not None)

    async def chat(
        self,
        *,
        session: str,
        message: str | None = None,
        role: str = "user",
        messages: Sequence[Mapping[str, str]] | None = None,
        on_divergence: str = "refuse",
        max_tokens: int | None = None,
        sampling: Mapping[str, float | int] | None = None,
        stop: Sequence[str] = (),
        prove: bool = False,
        create: bool = False,
        priority: Priority = "normal",
        emit: Emit,
    ) -> GenerateResult:
        asked = (
            (
                {"message": message, "role": role}
                if messages is None
                else {"messages": messages, "on_divergence": on_divergence}
            )
            | ({"stop": stop} if stop else {})
            | _unless_normal(priority)
        )
        self._record("chat", session=session, max_tokens=max_tokens, sampling=sampling, prove=prove, **asked)
        found, woken = await self._find_awake(session, emit, create=create)
        emit(Progress("prefill", 1, 1))
        found.tokens.append(len(message or ""))
        return await self._write(found, max_tokens or 4, prove, emit, woken, was_read=True)

    async def set(self, *, session: str, sampling: Mapping[str, float | int], emit: Emit) -> SessionInfo:
        self._record("set", session=session, sampling=sampling)
        found, _ = await self._find_awake(session, emit)
        found.info = replace(found.info, sampling=(found.info.sampling or Sampling()).changed(sampling))
        return found.info

    async def sleep(self, *, session: str, emit: Emit) -> SleepResult:
        self._record("sleep", session=session)
        found = self._find(session)
        await self._step()
        size = 4 * len(found.tokens)
        emit(Progress("sleep", size, size))
        version = len(found.versions) + 1
        parent = found.versions[-1].bundle_id if found.versions else None
        made = VersionInfo(version, f"{version:064x}", parent, len(found.tokens), size, size, version)
        found.versions.append(made)
        found.info = replace(found.info, state="asleep", version=version, bundle_id=made.bundle_id, dirty=False)
        return SleepResult(
            found.info.session, version, made.bundle_id, parent, len(found.tokens), size, size, 1, version - 1, 0.25
        )

    async def wake(
        self,
        *,
        session: str,
        version: int | None = None,
        at_token: int | None = None,
        strict: bool = False,
        emit: Emit,
    ) -> WakeResult:
        self._record("wake", session=session, version=version, at_token=at_token, strict=strict)
        return await self._wake(self._find(session), version, emit)

    async def plan_wake(
        self, *, session: str, version: int | None = None, at_token: int | None = None, strict: bool = False
    ) -> WakePlanResult:
        self._record("plan_wake", session=session, version=version, at_token=at_token, strict=strict)
        found = self._find(session)
        made = found.versions[(version or len(found.versions)) - 1]
        if found.info.state == "awake":
            return WakePlanResult(
                found.info.session, 1, made.bundle_id, made.token_count, True, "fake", True, None, "It is awake."
            )
        return WakePlanResult(
            found.info.session,
            made.version,
            made.bundle_id,
            made.token_count,
            False,
            "fake",
            self.model.resident,
            "restore",
            "Restoring is the faster way.",
            bytes_to_read=3 << 20,
            blocks=5,
            files=tuple(PlannedFile(f"{number:064x}", 1, 1 << 20) for number in range(1, 7)),
            files_left_out=2,
            restored_tokens=made.token_count,
            computed_tokens=1,
            verified=self.verified,
            memory_bytes=4 << 20,
            restore_seconds=0.0125,
            recompute_seconds=None,
            rates=(MeasuredRate("restore_bytes_per_s", 1e9, 3), MeasuredRate("decode_tokens_per_s", None, 0)),
            differs=self.differs,
        )

    async def _wake(self, found: FakeSession, version: int | None, emit: Emit) -> WakeResult:
        await self._step()
        emit(Progress("wake", 1, 1))
        already = found.info.state == "awake"
        found.info = replace(found.info, state="awake")
        made = found.versions[(version or len(found.versions)) - 1]
        return WakeResult(
            found.info.session,
            made.version,
            made.bundle_id,
            made.token_count,
            self.prefilled_by_wakes,
            8,
            0.25,
            already,
            self.differs,
            verified=self.verified,
            lossy=self.lossy,
            salvaged=found.info.salvaged,
            recomputed=self.recomputed,
        )

    async def list_sessions(self, *, namespace: str | None = None) -> list[SessionInfo]:
        self._record("list", namespace=namespace)
        return [session.info for session in self.sessions.values()]

    async def show(self, *, session: str) -> SessionDetail:
        self._record("show", session=session)
        found = self._find(session)
        identity, backend = {"weights": "ab"}, {"mlx": "1.2"}
        return SessionDetail(
            info=found.info,
            versions=tuple(found.versions),
            tail_text="…tail",
            layers=("kv 2x8x32",),
            lineage=(),
            identity=identity,
            backend=backend,
            lossy=self.lossy,
            forked_from=self.forked_from,
            folded_from=self.folded_from,
        )

    async def stats(self, *, label: str | None = None, namespace: str | None = None) -> StatsResult:
        self._record("stats", label=label, namespace=namespace)
        infos = [each.info for each in self.sessions.values() if label is None or label in each.info.labels]
        names = sorted({name for info in infos for name in info.labels}) if label is None else [label]
        return StatsResult(
            total=self._figures(None, infos),
            labels=tuple(self._figures(name, [info for info in infos if name in info.labels]) for name in names),
        )

    def _figures(self, label: str | None, infos: Sequence[SessionInfo]) -> LabelFigures:
        awake, tokens = sum(info.state == "awake" for info in infos), sum(info.token_count for info in infos)
        return LabelFigures(label, len(infos), awake, tokens, 1 << 20, 2 << 20, 7)

    async def warm(
        self, *, sessions: Sequence[str] = (), label: str | None = None, namespace: str | None = None, emit: Emit
    ) -> WarmResult:
        self._record("warm", sessions=sessions, label=label, namespace=namespace)
        named = [self._find(name).info for name in sessions]
        named += [each.info for each in self.sessions.values() if label in each.info.labels]
        return WarmResult(tuple(Warmed(info, self.left is None, self.left, 3) for info in named))

    async def clear(self, *, label: str, namespace: str | None = None, dry_run: bool = False) -> ClearResult:
        self._record("clear", label=label, namespace=namespace, dry_run=dry_run)
        infos = [each.info for each in self.sessions.values() if label in each.info.labels]
        kept = {f"torpor://default/{name}": reason for name, reason in self.fail_clear.items()}
        gone = [info for info in infos if info.session not in kept]
        for info in () if dry_run else gone:
            del self.sessions[info.name]
        uris = tuple(info.session for info in gone)
        return ClearResult(label, dry_run, uris, 5, 0, 4096, 0 if dry_run else 2048, kept, self.problems)

    def subscribe(
        self, *, names: Sequence[str] | None = None, session: str | None = None, namespace: str | None = None
    ) -> Subscription:
        self._record("subscribe", names=names, session=session, namespace=namespace)
        uri = None if session is None else SessionUri("default", session)
        return self.bus.subscribe(Wanted(None if names is None else frozenset(names), uri, namespace), most_waiting=8)

    async def fold(
        self,
        *,
        session: str,
        name: str,
        summary: str | None = None,
        summarise: int | None = None,
        tail: int = 0,
        labels: Sequence[str] | None = None,
        priority: Priority = "normal",
        emit: Emit,
    ) -> FoldResult:
        asked = {"summary": summary, "summarise": summarise, "tail": tail, "labels": labels}
        self._record("fold", session=session, name=name, **asked, **_unless_normal(priority))
        found = self._find(session)
        await self._step()
        origin = Origin(found.info.session, 1, f"{1:064x}", len(found.tokens))
        info = replace(found.info, session=f"torpor://default/{name}", name=name, state="awake", version=1)
        self.sessions[name] = FakeSession(info, found.tokens[len(found.tokens) - tail :])
        count = len(self.sessions[name].tokens)
        words = summary or "in short"
        return FoldResult(info.session, origin, 1, f"{2:064x}", count + 5, count, words, count + 5, 0, 512, 0.25)

    async def why(self, *, session: str) -> WhyResult:
        self._record("why", session=session)
        return WhyResult(self._find(session).info.session, self.reuses)

    async def fork(
        self,
        *,
        session: str,
        name: str,
        at_token: int | None = None,
        labels: Sequence[str] | None = None,
        emit: Emit,
    ) -> ForkResult:
        self._record("fork", session=session, name=name, at_token=at_token, labels=labels)
        found = self._find(session.partition("@")[0])
        await self._step()
        tokens = len(found.tokens) if at_token is None else at_token
        origin = Origin(found.info.session, 1, f"{1:064x}", tokens)
        info = replace(found.info, session=f"torpor://default/{name}", name=name, state="asleep", version=1)
        self.sessions[name] = FakeSession(info, found.tokens[:tokens])
        return ForkResult(info.session, origin, 1, f"{2:064x}", tokens, 0, 512, 4 * tokens, 0, 2, 0.25)

    async def reload_config(self) -> None:
        self._record("reload_config")

    async def load_model(self, *, model: str) -> ModelInfo:
        self._record("load_model", model=model)
        await self._step()
        return replace(self.model, name=model, loads=1)

    async def unload_model(self, *, model: str) -> ModelInfo:
        self._record("unload_model", model=model)
        return replace(self.model, name=model, resident=False)

    async def analyse(
        self, *, session: str, kind: str | None = None, labels: Sequence[str] | None = None, emit: Emit
    ) -> AnalysisResult:
        self._record("analyse", session=session, kind=kind, labels=labels)
        name, _, at = session.partition("@")
        found = self._find(name)
        await self._step()
        emit(Progress("analyse", 1, 1))
        made = found.versions[int(at or len(found.versions)) - 1]
        awake = len(found.tokens) if found.info.state == "awake" else None
        return AnalysisResult(
            found.info.session, made.version, made.bundle_id, made.token_count, awake, self.artifact, 0.25
        )

    async def delete(self, *, session: str) -> DeleteResult:
        self._record("delete", session=session)
        found = self._find(session)
        await self._step()
        del self.sessions[session]
        return DeleteResult(found.info.session, len(found.versions), len(found.versions), 4 * len(found.tokens))

    async def maintain(
        self,
        *,
        operation: str,
        session: str | None = None,
        dry_run: bool = False,
        keep_last: int | None = None,
        keep_days: float | None = None,
        cold_after_days: float | None = None,
        bits: int | None = None,
        after_days: float | None = None,
    ) -> MaintenanceResult:
        more = {name: value for name, value in (("bits", bits), ("after_days", after_days)) if value is not None}
        self._record(
            "maintain",
            operation=operation,
            session=session,
            dry_run=dry_run,
            keep_last=keep_last,
            keep_days=keep_days,
            cold_after_days=cold_after_days,
            **more,
        )
        uri = None if session is None else self._find(session).info.session
        await self._step()
        if operation == "forget" and not dry_run:
            del self.sessions[session or ""]
        action = MaintenanceAction("remove", f"bundles/ab/{'ab' * 32}.mvr", uri, 1 if uri else None, 2048, "unneeded")
        return MaintenanceResult(operation, dry_run, (action,), 3, 2048, 0, self.problems, 0)

    async def mark(
        self,
        *,
        session: str,
        tag: str | None = None,
        untag: str | None = None,
        pinned: bool | None = None,
        move: bool = False,
    ) -> MarksResult:
        self._record("mark", session=session, tag=tag, untag=untag, pinned=pinned, move=move)
        name, _, at = session.partition("@")
        found = self._find(name)
        version = found.tags.pop(untag) if untag is not None else int(at or len(found.versions))
        if tag is not None:
            found.tags[tag] = version
        if pinned is not None:
            (found.pinned.add if pinned else found.pinned.discard)(version)
        tags = tuple(sorted(tag for tag, on in found.tags.items() if on == version))
        return MarksResult(found.info.session, version, f"{version:064x}", tags, version in found.pinned)

    async def import_bundle(self, *, bundle_id: str, session: str | None = None) -> SleepResult:
        self._record("import_bundle", bundle_id=bundle_id, session=session)
        await self._step()
        name = session or "imported"
        return SleepResult(f"torpor://default/{name}", 1, bundle_id, None, 3, 4096, 4096, 1, 0, 0.25)

    async def prepare_close(self) -> CloseReport:
        self._record("prepare_close")
        await self.prepare_gate.wait()
        return self._report()

    async def begin_close(self) -> None:
        self._record("begin_close")

    async def close(self) -> CloseReport:
        self.closed = True
        await self.close_gate.wait()
        return self._report()

    def _report(self) -> CloseReport:
        kept = [s for s in self.sessions.values() if s.info.name not in self.fail_sleep]
        slept = tuple(s.info.session for s in kept if s.tokens)
        return CloseReport(slept, dict(self.fail_sleep), tuple(s.info.session for s in kept if not s.tokens))

    async def _find_awake(
        self, session: str, emit: Emit, *, create: bool = False
    ) -> tuple[FakeSession, WakeResult | None]:
        if create and session not in self.sessions:
            await self.create(session=session)
        found = self._find(session)
        return found, await self._wake(found, None, emit) if found.info.state == "asleep" else None

    async def _write(
        self,
        found: FakeSession,
        max_tokens: int,
        prove: bool,
        emit: Emit,
        woken: WakeResult | None,
        *,
        was_read: bool,
    ) -> GenerateResult:
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
                emit(Token(token, texts[-1]))
        except asyncio.CancelledError:
            self.cancelled += 1
            if not (was_read or written):
                raise
            raise LeftMidway(
                was_read=was_read, tokens=tuple(written), text="".join(texts), token_count=len(found.tokens)
            ) from None
        finally:
            self.running -= 1
        return GenerateResult(
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
        if session not in self.sessions:
            raise FakeNotFound(f"There is no session {session!r}. See: torpor ls", session=session)
        return self.sessions[session]

    def _record(self, method: str, **arguments: object) -> None:
        self.calls.append((method, arguments))


def _unless_normal(priority: Priority) -> dict[str, object]:
    return {} if priority == "normal" else {"priority": priority}
