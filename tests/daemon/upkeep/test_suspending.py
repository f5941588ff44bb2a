"""Before the system suspends, sessions sleep: against a bus of D-Bus's own daemon, on which the test is logind."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from dbus_fast import Message, MessageType, Variant
from dbus_fast.aio import MessageBus
from torpor.daemon.upkeep import suspending
from torpor.daemon.upkeep.suspending import why_not
from torpor.memvid.uri import SessionUri
from torpor.tests.daemon.session_rig import Rigged, listening, tokens_of, until

pytestmark = pytest.mark.skipif(shutil.which("dbus-daemon") is None, reason="there is no D-Bus here")

MANAGER = "org.freedesktop.login1.Manager"


class Logind:
    """Gives locks: one is held until the other end of its pipe is closed."""

    def __init__(self, bus: MessageBus, delay_s: float) -> None:
        self._bus, self._delay_s = bus, delay_s
        self._ends: list[int] = []
        self.asked: list[list[str]] = []
        bus.add_message_handler(self._answer)

    def _answer(self, message: Message) -> Message | bool:
        if message.message_type is not MessageType.METHOD_CALL:
            return False
        if message.member == "Get":
            return Message.new_method_return(message, "v", [Variant("t", int(self._delay_s * 1e6))])
        self.asked.append(message.body)
        self._client = message.sender
        end, given = os.pipe()
        os.set_blocking(end, False)
        self._ends.append(end)
        sent = self._bus.send(Message.new_method_return(message, "h", [0], [given]))
        sent.add_done_callback(lambda _: os.close(given))
        return True

    def locks(self) -> int:
        """How many are held."""
        return sum(not self._has_ended(end) for end in self._ends)

    def _has_ended(self, end: int) -> bool:
        try:
            return os.read(end, 1) == b""
        except BlockingIOError:
            return False

    async def tell_alone(self) -> None:
        """Tell the daemon of a suspend as anybody may."""
        path, kind = "/org/freedesktop/login1", MessageType.SIGNAL
        signal = Message(self._client, path, MANAGER, "PrepareForSleep", kind, signature="b", body=[True])
        await self._bus.send(signal)

    async def tell(self, *, begins: bool) -> None:
        await self._bus.send(Message.new_signal("/org/freedesktop/login1", MANAGER, "PrepareForSleep", "b", [begins]))

    def close(self) -> None:
        for end in self._ends:
            os.close(end)


@asynccontextmanager
async def system_bus(folder: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[asyncio.subprocess.Process]:
    address = f"unix:path={folder}/bus"
    daemon = await asyncio.create_subprocess_exec(
        "dbus-daemon", "--session", "--nofork", f"--address={address}", "--print-address=1",
        stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert daemon.stdout is not None
    await daemon.stdout.readline()
    monkeypatch.setenv("DBUS_SYSTEM_BUS_ADDRESS", address)
    try:
        yield daemon
    finally:
        if daemon.returncode is None:
            daemon.terminate()
        await daemon.wait()


@asynccontextmanager
async def logind_on(folder: Path, monkeypatch: pytest.MonkeyPatch, delay_s: float = 5.0) -> Any:
    async with system_bus(folder, monkeypatch) as daemon:
        bus = await MessageBus(f"unix:path={folder}/bus", negotiate_unix_fd=True).connect()
        logind = Logind(bus, delay_s)
        await bus.request_name("org.freedesktop.login1")
        try:
            yield logind, daemon
        finally:
            bus.disconnect()
            logind.close()


async def test_sessions_sleep_before_each_suspend_and_the_system_waits_for_that(
    open_rig: Any, short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with logind_on(short_path, monkeypatch) as (logind, _):
        async with open_rig() as rig, listening(rig) as heard:
            await until(lambda: logind.locks() == 1)
            assert [each[0::3] for each in logind.asked] == [["sleep", "delay"]]
            for time in (1, 2):
                for name in "ab":
                    await rig.service.append(name, tokens=tokens_of(time, 30), create=True)
                await logind.tell(begins=True)
                await until(lambda: logind.locks() == 0)
                assert not rig.service._parts.sessions.awake
                assert [each["cause"] for each in heard.of("sleep_ended")] == ["suspend"] * 2 * time
                await logind.tell(begins=False)
                await until(lambda: logind.locks() == 1)
            assert (await rig.wake("a")).token_count == 60
            assert await why_not() is None
        await until(lambda: logind.locks() == 0)


async def test_what_does_not_fit_does_not_hold_the_system_up(
    open_rig: Any, short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with logind_on(short_path, monkeypatch, delay_s=0.1) as (logind, _), open_rig() as rig:
        await until(lambda: logind.locks() == 1)
        for name in "ab":
            await rig.read(name, tokens_of(1, 30))
        async with rig.service._parts.sessions.residency.turn(SessionUri("default", "a")):
            await logind.tell(begins=True)
            await until(lambda: logind.locks() == 0)
            assert list(rig.service._parts.sessions.awake) == [SessionUri("default", "a")], "it is in use"
        await rig.write("a", 2)


async def test_a_session_that_cannot_sleep_holds_up_neither_the_others_nor_the_system(
    open_rig: Any, short_path: Path, monkeypatch: pytest.MonkeyPatch, full_disk: Any
) -> None:
    async with logind_on(short_path, monkeypatch) as (logind, _), open_rig() as rig:
        await until(lambda: logind.locks() == 1)
        for name in "ab":
            await rig.read(name, tokens_of(1, 30))
        disk = full_disk("a")
        await logind.tell(begins=True)
        await until(lambda: logind.locks() == 0)
        assert [rig.is_awake(name) for name in "ab"] == [True, False]
        disk.free()


async def test_only_logind_is_believed(open_rig: Any, short_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with logind_on(short_path, monkeypatch) as (logind, _), open_rig() as rig:
        await until(lambda: logind.locks() == 1)
        await rig.read("a", tokens_of(1, 30))
        await logind.tell_alone()
        await logind.tell(begins=False)  # behind that: the next lock
        await until(lambda: len(logind.asked) == 2)
        assert rig.is_awake("a")


async def test_where_the_bus_goes_the_daemon_goes_on(
    open_rig: Any, short_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with logind_on(short_path, monkeypatch) as (logind, daemon), open_rig() as rig:
        await until(lambda: logind.locks() == 1)
        daemon.terminate()
        await until(lambda: logind.locks() == 0)
        await rig.read("a", tokens_of(1, 30))
    assert "sessions do not sleep before the system suspends: the bus of the system is gone" in caplog.text


async def test_without_a_bus_logind_or_the_extra_nothing_sleeps_and_it_is_said_why(
    rig: Rigged, short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with system_bus(short_path, monkeypatch):
        assert "Inhibit" in str(await why_not()) or "ServiceUnknown" in str(await why_not())
    assert "the bus of the system does not help" in str(await why_not())
    monkeypatch.setattr(suspending, "find_spec", lambda _: None)
    assert await why_not() == "Torpor's extra `suspend` is not installed"
    monkeypatch.delenv("DBUS_SYSTEM_BUS_ADDRESS")
    assert await why_not() == "systemd does not run here"
    assert rig.service._parts.upkeep.suspending._following is None
