"""The demo itself: what it asks each daemon, in order, and what it writes down.

The experiment: one session reads a document and writes, sleeps, and loses its daemon to SIGKILL. A second daemon wakes
it, and it goes on. Beside it stands a control that read and wrote the same straight through in the first daemon and
never slept. In each later daemon, next to the wake, a cold session reads everything again.

Both times to first token are taken the same way, in the same daemon, with the model loaded and warmed up: from the
moment the first request is sent until the event with the first token is here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ...daemon.api.events import ProgressEvent, TokenEvent
from ...daemon.api.process import StatusResult
from ...daemon.api.sampling import Sampling
from ...memvid.store import Store
from ...memvid.units import format_bytes, format_count
from ...socket_api.client.client import Client
from ..errors import DemoUnfit
from ..view.formatting import format_id, format_rate, format_seconds
from ..view.output import plain
from .daemon import DemoDaemon
from .document import Document
from .narrator import Narrator, Step
from .report import ColdRun, DemoReport, Evidence, Reading, Sleep, Waking, Writing, check_evidence

READER, CONTROL, COLD, WARM_UP = "reader", "control", "cold", "warm-up"
WARM_UP_TOKENS = 8  # written before anything is measured, so that no measurement pays for a first time
ROOM_TOKENS = 64  # of the context left free beside the document and what is written, for nudges and estimates
MAX_NUDGES = 64  # times that a model which wants to end is told to go on, before the demo gives up
QUICK_REPEATS = 3  # pairs of wake and cold run, where reading is quick
SLOW_READING_S = 12.0  # from here on one pair is enough: every pair reads the document again
NUDGE = "\n"
# Drawn at random from a seed, so that the random key has to survive, too; a greedy text would repeat itself.
SAMPLING = Sampling(temperature=0.7, top_p=0.95, seed=2026)


@dataclass(frozen=True, slots=True)
class Settings:
    """How the demo is told."""

    folder: Path
    document: Document
    tokens_before: int = 64
    tokens_after: int = 64
    repeats: int | None = None  # None: as many as are quick enough, an odd number
    target_document_tokens: int = 6900
    minimum_document_tokens: int = 6000
    models: Mapping[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class _Session:
    """A session as the client knows it: what it read and wrote, in order, so that another can read the same."""

    client: Client
    name: str
    history: list[tuple[str, Any]] = field(default_factory=list)

    def read(self, text: str, step: Step | None = None) -> int:
        """Append a text; give its tokens."""
        result = self.client.append(self.name, text=text, on_event=_progress_of(step))
        self.history.append(("text", text))
        return result.prefilled_tokens

    def write(self, count: int, step: Step | None = None, on_token: Callable[[], None] = lambda: None) -> _Written:
        """Go on writing until there are `count` tokens; a model that wants to end is told to go on.

        Raises:
            DemoUnfit: it would not.
        """
        written = _Written()
        started = time.perf_counter()

        def on_event(event: ProgressEvent | TokenEvent) -> None:
            if isinstance(event, TokenEvent) and event.token is not None:
                on_token()
                written.pieces.append(event.text)
                if step is not None:
                    step.on_progress(len(written.pieces), count)

        for _ in range(MAX_NUDGES):
            left = count - len(written.tokens)
            result = self.client.generate(self.name, max_tokens=left, prove=True, on_event=on_event)
            written.add(result)
            self.history.append(("tokens", result.tokens))
            if len(written.tokens) == count:
                written.seconds = time.perf_counter() - started
                return written
            self.read(NUDGE)
        raise DemoUnfit(f"The model ended its text {MAX_NUDGES} times. Choose another --document.")


@dataclass(slots=True)
class _Written:
    """What came of one or more generations in a row. `pieces` has a text for each token."""

    tokens: list[int] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    text: str = ""
    logits: list[str] = field(default_factory=list)
    final: str = ""
    prefilled: int = 0
    seconds: float = 0.0

    def add(self, result: Any) -> None:
        """Take one generation's result."""
        self.tokens += result.tokens
        self.text += result.text
        self.logits += result.logits_blake3 or ()
        self.final = result.final_logits_blake3 or ""
        self.prefilled += result.prefilled_tokens

    def as_writing(self) -> Writing:
        """The same as a value."""
        return Writing(tuple(self.tokens), self.text, tuple(self.logits), self.final, self.seconds, self.prefilled)


class Demo:
    """One telling. Make it, call `tell` once; daemons are ended whatever happens."""

    def __init__(self, settings: Settings, narrator: Narrator, machine: dict[str, Any]) -> None:
        self._settings = settings
        self._narrator = narrator
        self._machine = machine
        self._daemons = 0

    def tell(self) -> DemoReport:
        """Run the whole story and give its report, checks included.

        Raises:
            DemoDaemonFailed, DemoUnfit, and what the daemon refuses.
        """
        started = time.perf_counter()
        with ExitStack() as processes:
            evidence, status = self._tell(processes)
        return DemoReport(
            machine=self._machine,
            status=asdict(status),
            evidence=evidence,
            steps=[{"step": step.what, "seconds": step.seconds} for step in self._narrator.steps],
            seconds=time.perf_counter() - started,
            folder=None,
            checks=check_evidence(evidence),
        )

    def _tell(self, processes: ExitStack) -> tuple[Evidence, StatusResult]:
        narrator, settings = self._narrator, self._settings
        narrator.chapter("A session reads, writes and falls asleep; a control does the same and never sleeps")
        daemon = self._start(processes)
        with self._connect(daemon) as client:
            status = client.status()
            chars_per_token = self._warm_up(client)
            reader, reading = self._read_document(client, status, chars_per_token)
            before = self._write(reader, settings.tokens_before, "writes")
            control = self._run_control(client, reader)
            sleep = self._sleep(client)
        deaths = [self._kill(daemon)]
        wakings, cold_runs = [], []
        repeats = settings.repeats or (QUICK_REPEATS if reading.seconds < SLOW_READING_S else 1)
        for number in range(1, repeats + 1):
            which = f" ({number} of {repeats})" if repeats > 1 else ""
            narrator.chapter(
                f"Another process{which}: wake and go on; beside it, a cold session reads everything again"
            )
            daemon = self._start(processes)
            with self._connect(daemon) as client:
                self._warm_up(client)
                wakings.append(self._wake(client, daemon))
                cold_runs.append(self._run_cold(client, daemon, reader))
            if number < repeats:
                deaths.append(self._kill(daemon))
        self._stop(daemon)
        bytes_checked, findings = self._verify()
        evidence = Evidence(
            reading=reading,
            before_sleep=before.as_writing(),
            control=control.as_writing(),
            control_pieces=tuple(control.pieces),
            sleep=sleep,
            deaths=tuple(deaths),
            wakings=tuple(wakings),
            cold_runs=tuple(cold_runs),
            store_findings=findings,
            store_bytes_checked=bytes_checked,
            minimum_document_tokens=settings.minimum_document_tokens,
        )
        return evidence, status

    # --- daemons

    @property
    def store_path(self) -> Path:
        """The store of this telling."""
        return self._settings.folder / "store"

    def _start(self, processes: ExitStack) -> DemoDaemon:
        folder = self._settings.folder
        self._daemons += 1
        with self._narrator.step("start a daemon") as step:
            daemon = DemoDaemon(
                store=self.store_path,
                socket_path=folder / "run" / "torpor.sock",
                models=self._settings.models,
                log=folder / f"daemon-{self._daemons}.log",
            )
            processes.callback(daemon.discard)
            step.outcome = f"daemon started, pid {daemon.pid}: Python, MLX and the model are loaded"
        return daemon

    def _connect(self, daemon: DemoDaemon) -> Client:
        return Client(daemon.socket_path)

    def _kill(self, daemon: DemoDaemon) -> Any:
        with self._narrator.step(f"kill -9 {daemon.pid}") as step:
            death = daemon.kill()
            socket = "its socket is stale, no process answers" if death.socket_refuses else "its socket still answers"
            step.outcome = f"[red]kill -9 {daemon.pid}[/]: ended by signal {death.exit_signal}; {socket}"
            step.seconds = death.seconds
        return death

    def _stop(self, daemon: DemoDaemon) -> None:
        with self._narrator.step(f"stop {daemon.pid}") as step:
            slept = daemon.stop()
            step.outcome = f"daemon {daemon.pid} stopped when asked to, and put {len(slept)} session to sleep first"

    # --- sessions

    def _session(self, client: Client, name: str) -> _Session:
        client.create(name, sampling=SAMPLING)
        return _Session(client, name)

    def _warm_up(self, client: Client) -> float:
        """Let the daemon compute something first; gives the characters per token of the document's like."""
        sample = self._settings.document.sample(4 * self._settings.target_document_tokens)
        with self._narrator.step("warm the model up") as step:
            session = self._session(client, WARM_UP)
            tokens = session.read(sample, step)
            session.write(WARM_UP_TOKENS)
            client.delete(WARM_UP)
            step.outcome = f"model warmed up on another text of {format_count(tokens)} tokens, which is then deleted"
        return len(sample) / tokens

    def _read_document(self, client: Client, status: StatusResult, chars_per_token: float) -> tuple[_Session, Reading]:
        settings = self._settings
        to_write = settings.tokens_before + settings.tokens_after
        context_tokens = status.models[0].context_tokens
        assert context_tokens is not None, "the demo's model is loaded at the start"
        room = context_tokens - to_write - ROOM_TOKENS
        target = min(settings.target_document_tokens, room)
        if target < settings.minimum_document_tokens:
            raise DemoUnfit(
                f"A document of {settings.minimum_document_tokens:,} tokens and {to_write} written ones do not fit"
                f" into this model's context of {context_tokens:,}. Lower --max-tokens.",
                context_tokens=context_tokens,
            )
        document = settings.document.cut(round(target * chars_per_token))
        with self._narrator.step(f"read {document.name}") as step:
            session = self._session(client, READER)
            started = time.perf_counter()
            tokens = session.read(document.text, step)
            seconds = time.perf_counter() - started
            step.outcome = (
                f"session [bold]{READER}[/] read [bold]{format_count(tokens)} tokens[/] of {plain(document.name)}"
                f" ({format_rate(tokens, seconds)})"
            )
        if tokens < settings.minimum_document_tokens:
            raise DemoUnfit(
                f"{document.name} has {tokens:,} tokens for this model; the demo needs at least"
                f" {settings.minimum_document_tokens:,}. Choose a longer --document.",
                tokens=tokens,
            )
        return session, Reading(document.name, document.path, len(document.text), tokens, seconds)

    def _write(self, session: _Session, count: int, verb: str) -> _Written:
        with self._narrator.step(f"{session.name} {verb}") as step:
            written = session.write(count, step)
            step.outcome = (
                f"session [bold]{session.name}[/] wrote {count} tokens ({format_rate(count, written.seconds)}):"
                f" [italic]{plain(_excerpt(written.text))}[/]"
            )
        return written

    def _run_control(self, client: Client, reader: _Session) -> _Written:
        """Read what the reader read, and write straight through what it writes before and after its sleep."""
        control = self._session(client, CONTROL)
        kind, text = reader.history[0]
        assert kind == "text"
        with self._narrator.step("the control reads the same") as step:
            tokens = control.read(text, step)
            step.outcome = f"session [bold]{CONTROL}[/] read the same {format_count(tokens)} tokens"
        return self._write(control, self._settings.tokens_before + self._settings.tokens_after, "writes")

    def _sleep(self, client: Client) -> Sleep:
        with self._narrator.step(f"{READER} goes to sleep") as step:
            started = time.perf_counter()
            receipt = client.sleep(READER, on_event=_progress_of(step))
            seconds = time.perf_counter() - started
            step.outcome = (
                f"session [bold]{READER}[/] sleeps: {format_bytes(receipt.bytes_written)} in"
                f" {receipt.blocks_new} blocks, bundle {format_id(receipt.bundle_id)}, durable"
            )
        return Sleep(
            bundle_id=receipt.bundle_id,
            version=receipt.version,
            token_count=receipt.token_count,
            bytes_written=receipt.bytes_written,
            logical_bytes=receipt.logical_bytes,
            blocks=receipt.blocks_new,
            seconds=seconds,
        )

    def _wake(self, client: Client, daemon: DemoDaemon) -> Waking:
        """Wake and go on at once; the first token's time includes the wake."""
        session = _Session(client, READER)
        clock = _Stopwatch()
        with self._narrator.step(f"wake {READER}") as step:
            clock.start()
            woken = client.wake(READER)
            seconds_to_wake = clock.elapsed()
            written = session.write(self._settings.tokens_after, step, clock.note_first)
            step.outcome = (
                f"session [bold]{READER}[/] woke in [bold]{format_seconds(seconds_to_wake)}[/]"
                f" ({format_bytes(woken.bytes_read)} read, {woken.tokens_prefilled} tokens prefilled) and wrote on:"
                " [bold]first token[/] after"
            )
            step.seconds = clock.first
        return Waking(
            daemon_pid=daemon.pid,
            seconds_to_wake=seconds_to_wake,
            seconds_to_first_token=clock.first,
            tokens_prefilled=woken.tokens_prefilled,
            bytes_read=woken.bytes_read,
            token_count=woken.token_count,
            bundle_id=woken.bundle_id,
            writing=written.as_writing(),
        )

    def _run_cold(self, client: Client, daemon: DemoDaemon, reader: _Session) -> ColdRun:
        """Read all that the reader had read and written when it fell asleep, then write one token."""
        session = self._session(client, COLD)
        clock = _Stopwatch()
        with self._narrator.step("read everything again") as step:
            clock.start()
            tokens = 0
            for kind, content in reader.history:
                handed = {"text": content} if kind == "text" else {"tokens": content}
                tokens += client.append(COLD, on_event=_progress_of(step), **handed).prefilled_tokens
            seconds_to_read = clock.elapsed()
            written = session.write(1, None, clock.note_first)
            step.outcome = (
                f"session [bold]{COLD}[/] read the same {format_count(tokens)} tokens again and wrote on:"
                " [bold]first token[/] after"
            )
            step.seconds = clock.first
        client.delete(COLD)
        return ColdRun(daemon.pid, tokens, seconds_to_read, clock.first, written.tokens[0])

    def _verify(self) -> tuple[int, tuple[str, ...]]:
        with self._narrator.step("verify the store") as step, Store.open(self.store_path, writable=False) as store:
            report = store.verify(deep=True, on_progress=step.on_progress)
            step.outcome = (
                f"store verified, every byte: {report.bundles_checked} bundles, {report.blocks_checked} blocks,"
                f" {format_bytes(report.bytes_checked)}, {len(report.findings)} findings"
            )
        return report.bytes_checked, tuple(str(asdict(finding)) for finding in report.findings)


class _Stopwatch:
    """Time since the first request was sent, and when the first token was here."""

    def __init__(self) -> None:
        self._started = 0.0
        self.first = 0.0

    def start(self) -> None:
        """Begin; call it right before the first request."""
        self._started = time.perf_counter()

    def elapsed(self) -> float:
        """Seconds since then."""
        return time.perf_counter() - self._started

    def note_first(self) -> None:
        """Take the time of the first token; later ones change nothing."""
        self.first = self.first or self.elapsed()


def _progress_of(step: Step | None) -> Callable[[ProgressEvent | TokenEvent], None] | None:
    if step is None:
        return None

    def on_event(event: ProgressEvent | TokenEvent) -> None:
        if isinstance(event, ProgressEvent):
            step.on_progress(event.done, event.total)

    return on_event


def _excerpt(text: str) -> str:
    one_line = " ".join(text.split())
    return one_line if len(one_line) <= 48 else one_line[:47] + "…"
