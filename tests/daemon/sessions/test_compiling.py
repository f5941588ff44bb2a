"""Grammars of several requests are compiled in turns. A request that is given up, and a stop, wait for none."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from torpor.daemon.api.constraints import Constraint
from torpor.daemon.errors import ServiceClosed
from torpor.daemon.models import grammars
from torpor.daemon.sessions.compiling import GrammarThread
from torpor.tests.daemon.session_rig import Gate, Rigged, hold_calls, tokens_of, until

PET = Constraint(json_schema=json.dumps({"enum": ["cat", "dog"]}))


@pytest.fixture(name="thread")
def _thread() -> Iterator[GrammarThread]:
    thread = GrammarThread()
    yield thread
    thread.close()


def steps_of(name: str, done: list[str], count: int, gate: Gate | None = None) -> Any:
    for _ in range(count):
        yield
        done.append(name)
        if gate is not None:
            gate.pass_through()
    return name


async def first_and_second(
    thread: GrammarThread, done: list[str], names: tuple[str, str], count: int
) -> tuple[Gate, asyncio.Task[str], asyncio.Task[str]]:
    """Two requests, the first of 100 steps and in the midst of one, which ends as the gate opens."""
    gate = Gate()
    first = asyncio.ensure_future(thread.run(steps_of(names[0], done, 100, gate)))
    await gate.reached()
    second = asyncio.ensure_future(thread.run(steps_of(names[1], done, count)))
    await asyncio.sleep(0)
    return gate, first, second


async def test_work_of_several_requests_takes_turns(thread: GrammarThread) -> None:
    done: list[str] = []
    gate, long, short = await first_and_second(thread, done, ("long", "short"), 2)
    gate.open()
    assert await short == "short"
    assert done.index("short") <= 2
    assert len(done) < 20
    assert await long == "long"
    assert done.count("long") == 100


async def test_a_request_that_is_given_up_leaves_at_once_and_its_next_step_is_not_begun(thread: GrammarThread) -> None:
    done: list[str] = []
    gate, leaving, waiting = await first_and_second(thread, done, ("left", "waiting"), 1)
    for each in (leaving, waiting):
        each.cancel()
    await asyncio.wait([leaving, waiting], timeout=10)
    assert leaving.cancelled()
    assert waiting.cancelled()
    gate.open()
    assert await thread.run(steps_of("next", done, 1)) == "next"
    assert done == ["left", "next"]


async def test_an_error_of_work_is_its_callers(thread: GrammarThread) -> None:
    def failing() -> Any:
        yield
        raise KeyError("its own")

    with pytest.raises(KeyError, match="its own"):
        await thread.run(failing())
    assert await thread.run(steps_of("next", [], 1)) == "next"


async def test_a_closed_thread_takes_no_work_and_ends() -> None:
    thread, seen = GrammarThread(), []

    def noting() -> Any:
        yield
        seen.append(threading.current_thread())

    await thread.run(noting())
    thread.close()
    with pytest.raises(ServiceClosed):
        await thread.run(noting())
    await until(lambda: not seen[0].is_alive())


def test_a_thread_without_work_has_ended_once_it_is_closed() -> None:
    thread, interval = GrammarThread(), sys.getswitchinterval()
    sys.setswitchinterval(60)  # so that it does not end by chance before it is looked at
    try:
        thread.close()
        assert not thread._thread.is_alive()
    finally:
        sys.setswitchinterval(interval)


async def test_a_stop_does_not_wait_for_a_grammar(open_rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, before = hold_calls(monkeypatch, grammars, "_compiled"), set(threading.enumerate())
    try:
        async with open_rig() as rig:
            await rig.read("a", tokens_of(1, 20))
            asking = asyncio.ensure_future(rig.service.generate("a", constraint=PET, max_tokens=1))
            await gate.reached()
            asking.cancel()
            await asyncio.wait([asking], timeout=10)
            assert asking.cancelled()
            await asyncio.wait_for(rig.service.close(), 10)
        (compiling,) = (each for each in {*threading.enumerate()} - before if each.name == "torpor-grammar")
        assert compiling.daemon  # so the end of the process does not wait for it, either
    finally:
        gate.open()
    await until(lambda: not compiling.is_alive())


async def test_a_session_goes_on_while_a_grammar_that_it_gave_up_is_compiled(
    rig: Rigged, monkeypatch: pytest.MonkeyPatch
) -> None:
    await rig.read("a", tokens_of(1, 20))
    gate = hold_calls(monkeypatch, grammars, "_compiled")
    asking = asyncio.ensure_future(rig.service.generate("a", constraint=PET, max_tokens=1))
    await gate.reached()
    asking.cancel()
    await asyncio.wait([asking], timeout=10)
    assert asking.cancelled()
    assert len((await rig.service.generate("a", max_tokens=4)).tokens) == 4
    gate.open()
