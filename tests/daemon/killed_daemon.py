"""A daemon's requests with a SIGKILL at a call of theirs: the process that dies, and the one that makes it.

`killed_daemon.py MODEL DIGESTS` is a process that has imported everything and computed nothing, because a fork of one
that has would stand still in MLX. For each line on its input, `{store, point, torn}`, it forks a child, which goes
through `STEPS` in that store and kills itself at the `point`-th call that changes something (torn: after half of what
it writes). What is told of it, in one line: behind how many such calls each step was answered, whether the child was
killed, and whether it failed by itself.

`killed_daemon.py MODEL DIGESTS STORE` goes through the steps, for somebody else to kill it; a dot for each answer.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final

from torpor.daemon.api.sampling import Sampling
from torpor.daemon.sessions.transcripts import message_of
from torpor.tests.daemon.session_rig import MODEL, SAMPLED, Rigged, open_rigged, tokens_of
from torpor.tests.memvid.faults.kill import write_half
from torpor.tests.memvid.faults.shim import Call, Shim

Step = Callable[[Rigged], Awaitable[object]]


def _append(name: str, seed: int, count: int, **options: Any) -> Step:
    return lambda rig: rig.service.append(name, tokens=tokens_of(seed, count), **options)


def _write(name: str, count: int, **options: Any) -> Step:
    return lambda rig: rig.service.generate(name, max_tokens=count, **options)


def _chat(name: str, message: str) -> Step:
    return lambda rig: rig.service.chat(name, message=message, max_tokens=4, create=True)


def _converse(*said: str) -> Step:
    messages = [message_of("user" if at % 2 == 0 else "assistant", text) for at, text in enumerate(said)]
    return lambda rig: rig.service.converse("spoken", messages=messages, max_tokens=4)


STEPS: Final[dict[str, Step]] = {
    "append makes a session": _append("new", 1, 70, create=True),
    "generate": _write("new", 5, sampling=SAMPLED),
    "set": lambda rig: rig.service.set("new", sampling=Sampling(temperature=0.3)),
    "append wakes a session": _append("slept", 3, 40),
    "chat makes a session": _chat("talk", "Who are you?"),
    "chat": _chat("talk", "And I?"),
    "converse": _converse("Hello."),
    "converse forks": _converse("Hello.", "It leaves its way.", "And now?"),
    "save": lambda rig: rig.service.save("new"),
    "generate behind a save": _write("new", 4),
    "sleep": lambda rig: rig.sleep("slept"),
    "wake at a token": lambda rig: rig.wake("slept", at_token=300),
    "go on from there": _append("slept", 4, 12),
    "fork": lambda rig: rig.service.fork("new", name="copy"),
    "generate in the fork": _write("copy", 3),
    "fold": lambda rig: rig.service.fold("talk", name="folded", summary="Two.", tail=8),
    "generate in the fold": _write("folded", 3),
    "delete": lambda rig: rig.service.delete("copy"),
    "append at the end": _append("new", 5, 9),
}
"""Each kind of request that acknowledges turns, by what it does; one after the other, in one daemon."""


async def prepare(store: Path, model: str, digests: Path) -> None:
    async with open_rigged(store, {MODEL: model}, digests) as rig:
        await rig.read("slept", tokens_of(2, 300), sampling=SAMPLED)
        await rig.sleep("slept")


async def go_through(rig: Rigged, answered: Callable[[str], Awaitable[object]]) -> None:
    for name, step in STEPS.items():
        await step(rig)
        await answered(name)


class _Killer:
    """Handler of a shim: counts the calls that change something, from when it is `on`, and dies before one of them."""

    def __init__(self, point: int, *, torn: bool) -> None:
        self.on, self.seen = False, 0
        self._point, self._torn = point, torn
        self._lock = threading.Lock()

    def __call__(self, call: Call) -> Any:
        if self.on and call.changes_state:
            with self._lock:
                self.seen += 1
                if self.seen == self._point:
                    if self._torn:
                        write_half(call)
                    os.kill(os.getpid(), signal.SIGKILL)
        return call.run()


async def _go(store: Path, model: str, digests: Path) -> None:
    async def answered(_name: str) -> None:
        os.write(sys.stdout.fileno(), b".")

    async with open_rigged(store, {MODEL: model}, digests, close=False) as rig:
        await go_through(rig, answered)


async def _go_and_die(order: dict[str, Any], model: str, digests: Path, answers: int) -> None:
    killer, write = _Killer(order["point"], torn=order["torn"]), os.write

    async def answered(_name: str) -> None:
        write(answers, f"{killer.seen}\n".encode())

    with Shim(killer):
        async with open_rigged(Path(order["store"]), {MODEL: model}, digests, close=False) as rig:
            killer.on = True
            await go_through(rig, answered)


def main(model: str, digests: Path) -> None:
    for line in sys.stdin:
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            status = 1
            try:
                asyncio.run(_go_and_die(json.loads(line), model, digests, writer))
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        os.close(writer)
        with os.fdopen(reader) as pipe:
            calls = [int(seen) for seen in pipe]
        _, status = os.waitpid(child, 0)
        print(
            json.dumps(
                {"calls": calls, "died": os.WIFSIGNALED(status), "failed": bool(os.waitstatus_to_exitcode(status) > 0)}
            ),
            flush=True,
        )


if __name__ == "__main__":
    if len(sys.argv) == 4:
        asyncio.run(_go(Path(sys.argv[3]), sys.argv[1], Path(sys.argv[2])))
        os._exit(0)
    main(sys.argv[1], Path(sys.argv[2]))
