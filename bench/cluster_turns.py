"""Many turns through a cluster while its replicas are killed, for `bench/cluster.py`: each answered turn is to be in
its session once, and each answer that of one daemon that nobody kills.
"""

from __future__ import annotations

import asyncio
import json
import random
import secrets
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx2
from torpor.socket_api.cluster.passing import REPLICA_HEADER
from torpor.tests.socket_api.http.replay import Replay, Shape, shapes_in

SHAPES = Path(__file__).parents[1] / "tests" / "socket_api" / "http" / "shapes"
PATH = "/v1/chat/completions"
_MOST_WAITED_S = 600.0
_TOKENS = 12


@dataclass(frozen=True)
class Told:
    """What was told of a turn. asked: how often, as a replica may die meanwhile. at_s: when it was told whole."""

    text: str
    total: int
    cached: int
    replica: str
    asked: int
    at_s: float


@dataclass
class Talk:
    """A dialogue of a client that sends all of it again."""

    name: str
    messages: list[dict[str, str]] = field(default_factory=list)
    turns: list[Told] = field(default_factory=list)

    async def say(self, client: httpx2.AsyncClient, words: str, *, streamed: bool) -> Told:
        """One turn, asked until it is answered whole."""
        asked, begun = 0, time.monotonic()
        said = [*self.messages, {"role": "user", "content": words}]
        body = {"model": "demo", "messages": said, "max_tokens": _TOKENS, "temperature": 0}
        while True:
            asked += 1
            try:
                text, usage, replica = await (_stream if streamed else _whole)(client, self.name, body)
                break
            except (httpx2.HTTPError, _NotAnswered) as error:
                if time.monotonic() - begun > _MOST_WAITED_S:
                    told = (await client.get("/v1/cluster")).text
                    raise RuntimeError(
                        f"{self.name} was not answered in {_MOST_WAITED_S} s: {error!r}; {told}"
                    ) from error
                await asyncio.sleep(0.2)
        told = Told(
            text,
            usage["total_tokens"],
            usage["prompt_tokens_details"]["cached_tokens"],
            replica,
            asked,
            time.monotonic(),
        )
        self.messages = [*said, {"role": "assistant", "content": text}]
        self.turns.append(told)
        return told


class _NotAnswered(Exception):
    """Another status than 200, or a stream that ends early."""


async def _whole(client: httpx2.AsyncClient, name: str, body: dict[str, Any]) -> tuple[str, dict[str, Any], str]:
    answer = await client.post(PATH, headers={"x-session-id": name}, json=body)
    if answer.status_code != 200:
        raise _NotAnswered(f"{answer.status_code} {answer.text[:300]}")
    told = answer.json()
    return told["choices"][0]["message"]["content"] or "", told["usage"], replica_of(answer)


async def _stream(client: httpx2.AsyncClient, name: str, body: dict[str, Any]) -> tuple[str, dict[str, Any], str]:
    asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
    text, usage, done = "", None, False
    async with client.stream("POST", PATH, headers={"x-session-id": name}, json=asked) as answer:
        if answer.status_code != 200:
            raise _NotAnswered(f"{answer.status_code} {(await answer.aread())[:300]!r}")
        async for line in answer.aiter_lines():
            if not line.startswith("data: "):
                continue
            if done := line == "data: [DONE]":
                break
            event = json.loads(line[6:])
            if "error" in event:
                raise _NotAnswered(line)
            usage = event.get("usage") or usage
            text += "".join(each["delta"].get("content") or "" for each in event.get("choices", []))
    if not done or usage is None:
        raise _NotAnswered("the stream ended early")
    return text, usage, replica_of(answer)


def replica_of(answer: httpx2.Response) -> str:
    """The name of the replica that answered."""
    return answer.headers.get(REPLICA_HEADER, "").partition(";")[0]


def words_of(name: str, number: int) -> str:
    """What is said in a turn."""
    return f"Turn {number} of the {name}: what comes next?"


async def history(
    client: httpx2.AsyncClient, turns: int, kills: int, kill: Callable[[str], None], *, sessions: int = 8
) -> tuple[dict[str, Any], list[Talk]]:
    """Lead dialogues beside each other, and kill the replica of one of them after every `turns / kills` turns, mostly
    while it answers. The report, and the dialogues."""
    talks = [Talk(f"talk-{number}") for number in range(sessions)]
    draw, died = random.Random(38), dict[str, float]()
    each = turns // sessions

    async def lead(talk: Talk) -> None:
        for number in range(each):
            await talk.say(client, words_of(talk.name, number), streamed=number % 2 == 0)

    async def end_some() -> None:
        for number in range(kills):
            due = (number + 1) * each * sessions // (kills + 1)
            while sum(len(talk.turns) for talk in talks) < due:
                await asyncio.sleep(0.02)
            alive = {talk.turns[-1].replica for talk in talks if talk.turns} - died.keys()
            if alive:
                victim = draw.choice(sorted(alive))
                died[victim] = time.monotonic()
                await asyncio.to_thread(kill, victim)

    begun = time.monotonic()
    await asyncio.gather(*map(lead, talks), end_some())
    report: dict[str, Any] = {
        "turns": each * sessions,
        "kills": len(died),
        "seconds": round(time.monotonic() - begun, 1),
    }
    report["asked_again"] = sum(told.asked - 1 for talk in talks for told in talk.turns)
    report["replicas"] = len({told.replica for talk in talks for told in talk.turns})
    waits = [wait for victim, at_s in died.items() for wait in _waits(talks, victim, at_s)]
    if waits:
        report["first_answer_s"] = {
            "of_sessions_there": len(waits),
            "median": round(statistics.median(waits), 1),
            "most": round(max(waits), 1),
        }
    return report, talks


def _waits(talks: list[Talk], victim: str, at_s: float) -> list[float]:
    """The seconds from a replica's death to the first answer of each session that it had."""
    found = []
    for talk in talks:
        before = [told for told in talk.turns if told.at_s <= at_s]
        after = [told for told in talk.turns if told.at_s > at_s]
        if before and after and before[-1].replica == victim:
            found.append(after[0].at_s - at_s)
    return found


async def faults_in(client: httpx2.AsyncClient, talks: list[Talk]) -> list[str]:
    """What is not as one daemon has it, which is asked the same here, whole: another text, or another number of tokens,
    as if a turn were missing or there twice. And each turn that had not all tokens of the one before."""
    found = []

    async def compare(talk: Talk) -> None:
        alone = Talk(talk.name)
        for number, told in enumerate(talk.turns):
            right = await alone.say(client, words_of(talk.name, number), streamed=False)
            if (right.text, right.total) != (told.text, told.total):
                found.append(f"{talk.name}, turn {number}: {told} instead of {right}")
                return
            if number and told.cached < talk.turns[number - 1].total:
                found.append(f"{talk.name}, turn {number}: {told} behind {talk.turns[number - 1]}")

    await asyncio.gather(*map(compare, talks))
    return found


def shapes(token: str, url: str) -> dict[str, Any]:
    """Requests of Claude Code as it sends them, with a sub-agent, streamed; then one that is cut off. The replicas of
    each conversation, and a fault where one has two."""
    with httpx2.Client(base_url=url, headers={"authorization": token}, timeout=300, trust_env=False) as client:
        places: dict[str, set[str]] = {}

        def seen(answer: httpx2.Response) -> None:
            if session := answer.headers.get("x-torpor-session"):
                places.setdefault(session, set()).add(replica_of(answer))

        client.event_hooks = {"response": [seen]}
        recording = SHAPES / "claude_code.json"
        answers = list(Replay(client).ask(shapes_in(recording, scale=0.05)))
        streamed = _is_whole(client, shapes_in(recording, scale=0.05)[0])
        report: dict[str, Any] = {"answers": len(answers), "sessions": len(places)}
        report |= {"streamed": streamed, "cut_off": _cut_off(client)}
        if any(len(at) != 1 for at in places.values()) or not streamed or not report["cut_off"]:
            report["fault"] = {name: sorted(at) for name, at in places.items()}
        return report


def _is_whole(client: httpx2.Client, shape: Shape) -> bool:
    """Whether a request as it was recorded, streamed, is answered to the end of its message."""
    asked = {**shape.body, "max_tokens": 60}
    with client.stream("POST", shape.path, json=asked, headers=shape.headers) as answer:
        lines = [line for line in answer.iter_lines() if line]
    return shape.body["stream"] is True and lines[-2] == "event: message_stop"


def _cut_off(client: httpx2.Client) -> bool:
    """Leave in the midst of an answer; whether the session answers again soon, which it does not while it writes."""
    asked = {"model": "demo", "messages": [{"role": "user", "content": "Tell a long story."}]}
    headers = {"x-session-id": "left"}
    with client.stream("POST", PATH, headers=headers, json={**asked, "max_tokens": 4000, "stream": True}) as answer:
        for number, _ in enumerate(answer.iter_lines()):
            if number == 6:
                break
    return client.post(PATH, headers=headers, json={**asked, "max_tokens": 4}).status_code == 200


async def namespaces(client: httpx2.AsyncClient, tokens: Path) -> dict[str, Any]:
    """The same name in two namespaces: two sessions, of which each token sees its own."""
    token = secrets.token_urlsafe(32)
    with tokens.open("a") as file:
        file.write(f"team {token}\n")
    headers = {"authorization": f"Bearer {token}"}
    async with httpx2.AsyncClient(base_url=client.base_url, headers=headers, timeout=300, trust_env=False) as other:
        talks = [Talk("notes"), Talk("notes")]
        for number in range(3):
            await asyncio.gather(
                talks[0].say(client, words_of("north", number), streamed=False),
                talks[1].say(other, words_of("south", number), streamed=True),
            )
        listed = [(await each.get("/v1/sessions")).json()["sessions"] for each in (client, other)]
        refused = (await other.get("/v1/cluster")).status_code
    report: dict[str, Any] = {"turns": 6, "of_the_other": refused}
    faults = [talk.turns for talk in talks if any(b.cached != a.total for a, b in pairwise(talk.turns))]
    seen = [{each["namespace"] for each in sessions} for sessions in listed]
    if faults or seen[1] != {"team"} or refused != 403:
        report["fault"] = {"turns": faults, "seen": [sorted(each) for each in seen]}
    return report
