"""The demo itself: its requests to each daemon, in order, and the evidence.

A session reads a document and writes, sleeps, and loses its daemon to SIGKILL. A second daemon wakes it, and it goes
on. A control reads and writes the same in the first daemon, and never sleeps. In the second daemon a cold session reads
everything again.

Both times to the first token are taken in the same daemon, with the model loaded and warmed up: from the moment the
first request is sent until the event with the first token arrives.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ...daemon.api.events import OnEvent, ProgressEvent, TokenEvent, WorkEvent
from ...daemon.api.sampling import Sampling
from ...memvid.store import Store
from ...memvid.units import format_bytes, format_count
from ...socket_api.client.client import Client
from ..errors import DemoUnfit
from ..view.formatting import format_id, format_seconds
from ..view.output import OnProgress, Output, plain
from .daemon import DemoDaemon
from .report import Evidence, Writing

READER, CONTROL, COLD, WARM_UP = "reader", "control", "cold", "warm-up"
WARM_UP_TOKENS = 8  # written before any measurement, so that none pays for a first time
ROOM_TOKENS = 64  # left free in the context, for nudges and estimates
MAX_NUDGES = 64  # times that an ending model is told to go on before the demo gives up
NUDGE = "\n"
EXCERPT_CHARS = 48  # of a written text, in a line
# Drawn from a seed, so that the seed must survive too; a greedy text would repeat itself.
SAMPLING = Sampling(temperature=0.7, top_p=0.95, seed=2026)


@dataclass(frozen=True, slots=True)
class Settings:
    """The demo's settings. text, name: of the document. tokens: written before the sleep, and again after it."""

    folder: Path
    name: str
    text: str
    tokens: int = 64
    target_document_tokens: int = 6900
    minimum_document_tokens: int = 6000
    models: Mapping[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class _Step:
    """One step of the demo. outcome: its line at the end. seconds: if not the time it took."""

    on_progress: OnProgress
    outcome: str = ""
    seconds: float | None = None

    def on_event(self, event: WorkEvent) -> None:
        if isinstance(event, ProgressEvent):
            self.on_progress(event.done, event.total)


@dataclass(slots=True)
class _Session:
    """A session as its client knows it. history: all that it read and wrote, for another session to read."""

    client: Client
    name: str
    history: list[dict[str, Any]] = field(default_factory=list)

    def read(self, on_event: OnEvent | None = None, **content: Any) -> int:
        """Append a text or tokens; give the number of tokens."""
        self.history.append(content)
        return self.client.append(self.name, on_event=on_event, **content).prefilled_tokens

    def write(self, count: int) -> Writing:
        """Write until there are `count` tokens; a model that ends is told to go on. Raises DemoUnfit if it ends too
        often."""
        tokens: list[int] = []
        logits: list[str] = []
        text, prefilled, first = "", 0, 0.0

        def on_event(event: WorkEvent) -> None:
            nonlocal first
            if isinstance(event, TokenEvent) and event.token is not None:
                first = first or time.perf_counter()

        for _ in range(MAX_NUDGES):
            result = self.client.generate(self.name, max_tokens=count - len(tokens), prove=True, on_event=on_event)
            self.history.append({"tokens": result.tokens})
            tokens += result.tokens
            logits += result.logits_blake3 or ()
            text += result.text
            prefilled += result.prefilled_tokens
            if len(tokens) == count:
                logits.append(result.final_logits_blake3 or "")
                return Writing(tuple(tokens), text, tuple(logits), prefilled, first)
            self.read(text=NUDGE)
        raise DemoUnfit(f"The model ended its text {MAX_NUDGES} times. Choose another --document.")


class Demo:
    """One run. Call `tell` once; daemons are ended in every case."""

    def __init__(self, settings: Settings, output: Output) -> None:
        self._settings = settings
        self._output = output
        self._store = settings.folder / "store"
        self._daemons = 0

    def tell(self) -> Evidence:
        """Run the whole story. Raises DaemonStartFailed, DaemonStillRunning, DemoDaemonFailed, DemoUnfit, and the
        daemon's refusals."""
        with ExitStack() as processes:
            return Evidence(**self._tell(processes))

    def _tell(self, processes: ExitStack) -> dict[str, Any]:
        tokens = self._settings.tokens
        seen: dict[str, Any] = {}
        self._output.remark(
            "\n[bold]A session reads, writes and falls asleep; a control does the same and never sleeps[/]"
        )
        daemon = self._start(processes)
        with Client(daemon.socket_path) as client:
            status = client.status()
            seen |= {"model": asdict(status.models[0]), "blas": status.blas}
            text = self._settings.text[: self._chars_to_read(client, status.models[0].context_tokens or 0)]
            reader, control = self._session(client, READER), self._session(client, CONTROL)
            seen |= self._read(reader, text)
            seen["before_sleep"] = self._write(reader, tokens)
            self._read(control, text)
            seen["control_before"], seen["control_after"] = self._write(control, tokens), self._write(control, tokens)
            seen |= self._sleep(client)
        seen["death"] = self._kill(daemon)
        self._output.remark(
            "\n[bold]Another process: wake and go on; beside it, a cold session reads everything again[/]"
        )
        daemon = self._start(processes)
        cold = list(reader.history)
        with Client(daemon.socket_path) as client:
            self._warm_up(client)
            seen |= self._wake(client)
            seen |= self._run_cold(client, cold)
        with self._step(f"stop {daemon.pid}") as step:
            daemon.stop()
            step.outcome = f"daemon {daemon.pid} stopped when asked to"
        return seen | self._verify()

    @contextmanager
    def _step(self, what: str, unit: str = "") -> Iterator[_Step]:
        """Run one step; its line appears at its end. unit: of its progress."""
        started = time.perf_counter()
        with self._output.progress(what, unit=unit) as on_progress:
            step = _Step(on_progress)
            yield step
        seconds = time.perf_counter() - started if step.seconds is None else step.seconds
        self._output.remark(f"[green]✓[/] {step.outcome}  [cyan]{format_seconds(seconds)}[/]")

    def _start(self, processes: ExitStack) -> DemoDaemon:
        folder = self._settings.folder
        self._daemons += 1
        with self._step("start a daemon") as step:
            daemon = DemoDaemon(
                store=self._store,
                socket_path=folder / "run" / "torpor.sock",
                models=self._settings.models,
                log=folder / f"daemon-{self._daemons}.log",
            )
            processes.callback(daemon.discard)
            step.outcome = f"daemon started, pid {daemon.pid}: Python, MLX and the model are loaded"
        return daemon

    def _kill(self, daemon: DemoDaemon) -> Any:
        with self._step(f"kill -9 {daemon.pid}") as step:
            death = daemon.kill()
            socket = "its socket is stale, no process answers" if death.socket_refuses else "its socket still answers"
            step.outcome = f"[red]kill -9 {daemon.pid}[/]: ended by signal {death.exit_signal}; {socket}"
        return death

    def _session(self, client: Client, name: str) -> _Session:
        client.create(name, sampling=SAMPLING)
        return _Session(client, name)

    def _warm_up(self, client: Client) -> float:
        """Let the daemon compute something; gives the document's characters per token."""
        lines = self._settings.text.splitlines(keepends=True)
        most = self._settings.target_document_tokens * 2 // 3  # from all over the document: enough to estimate
        sample = "".join(lines[:: 1 + len(self._settings.text) // most])[:most]
        with self._step("warm the model up") as step:
            session = self._session(client, WARM_UP)
            tokens = session.read(step.on_event, text=sample)
            session.write(WARM_UP_TOKENS)
            client.delete(WARM_UP)
            step.outcome = f"model warmed up on another text of {format_count(tokens)} tokens, which is then deleted"
        return len(sample) / tokens

    def _chars_to_read(self, client: Client, context_tokens: int) -> int:
        settings = self._settings
        target = min(settings.target_document_tokens, context_tokens - 2 * settings.tokens - ROOM_TOKENS)
        if target < settings.minimum_document_tokens:
            raise DemoUnfit(
                f"A document of {settings.minimum_document_tokens:,} tokens and {2 * settings.tokens} written ones do"
                f" not fit into this model's context of {context_tokens:,}. Lower --max-tokens.",
                context_tokens=context_tokens,
            )
        chars = round(target * self._warm_up(client))
        return settings.text.rfind("\n", 0, chars) + 1 or chars  # whole lines

    def _read(self, session: _Session, text: str) -> dict[str, Any]:
        name, minimum = self._settings.name, self._settings.minimum_document_tokens
        with self._step(f"{session.name} reads {name}") as step:
            started = time.perf_counter()
            tokens = session.read(step.on_event, text=text)
            seconds = time.perf_counter() - started
            step.outcome = f"session [bold]{session.name}[/] read {format_count(tokens)} tokens of {plain(name)}"
        if tokens < minimum:
            raise DemoUnfit(
                f"{name} has {tokens:,} tokens for this model; the demo needs at least {minimum:,}. Choose a longer"
                " --document.",
                tokens=tokens,
            )
        return {"document": name, "document_tokens": tokens, "seconds_to_read": seconds}

    def _write(self, session: _Session, count: int) -> Writing:
        with self._step(f"{session.name} writes") as step:
            written = session.write(count)
            words = " ".join(written.text.split())
            excerpt = words if len(words) <= EXCERPT_CHARS else words[: EXCERPT_CHARS - 1] + "…"
            step.outcome = f"session [bold]{session.name}[/] wrote {count} tokens: [italic]{plain(excerpt)}[/]"
        return written

    def _sleep(self, client: Client) -> dict[str, Any]:
        with self._step(f"{READER} goes to sleep") as step:
            started = time.perf_counter()
            receipt = client.sleep(READER, on_event=step.on_event)
            seconds = time.perf_counter() - started
            step.outcome = (
                f"session [bold]{READER}[/] sleeps: {format_bytes(receipt.bytes_written)} in"
                f" {receipt.blocks_new} blocks, bundle {format_id(receipt.bundle_id)}, durable"
            )
        return {"receipt": receipt, "seconds_to_sleep": seconds}

    def _wake(self, client: Client) -> dict[str, Any]:
        """Wake and write at once; the first token's time includes the wake."""
        with self._step(f"wake {READER}") as step:
            started = time.perf_counter()
            woken = client.wake(READER)
            seconds = time.perf_counter() - started
            written = _Session(client, READER).write(self._settings.tokens)
            step.seconds = written.first_token_at - started
            step.outcome = (
                f"session [bold]{READER}[/] woke in [bold]{format_seconds(seconds)}[/]"
                f" ({format_bytes(woken.bytes_read)} read, {woken.tokens_prefilled} tokens prefilled) and wrote on:"
                " [bold]first token[/] after"
            )
        return {"wake": woken, "seconds_to_wake": seconds, "woken_first_token_s": step.seconds, "after_wake": written}

    def _run_cold(self, client: Client, history: list[dict[str, Any]]) -> dict[str, Any]:
        """Read all that the reader had at its sleep, then write one token."""
        session = self._session(client, COLD)
        with self._step("read everything again") as step:
            started = time.perf_counter()
            tokens = sum(session.read(step.on_event, **content) for content in history)
            step.seconds = session.write(1).first_token_at - started
            step.outcome = (
                f"session [bold]{COLD}[/] read the same {format_count(tokens)} tokens again and wrote on:"
                " [bold]first token[/] after"
            )
        client.delete(COLD)
        return {"cold_tokens": tokens, "cold_first_token_s": step.seconds}

    def _verify(self) -> dict[str, Any]:
        with self._step("verify the store", "bytes") as step, Store.open(self._store, writable=False) as store:
            report = store.verify(deep=True, on_progress=step.on_progress)
            step.outcome = (
                f"store verified, every byte: {report.bundles_checked} bundles, {report.blocks_checked} blocks,"
                f" {format_bytes(report.bytes_checked)}, {len(report.findings)} findings"
            )
        return {
            "store_bytes_checked": report.bytes_checked,
            "store_findings": tuple(str(asdict(finding)) for finding in report.findings),
        }
