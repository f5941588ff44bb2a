"""What all replicas tell, as one answer: their figures, their sessions, and their metrics with each one's name."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import Any, Final

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Message

from ..errors import ReplicaLost
from ..http.sessions import PATH as SESSIONS_PATH
from .passing import REPLICA_HEADER, Order

PATH: Final = "/v1/cluster"
_STATUS_PATH: Final = "/v1/status"
METRICS_PATH: Final = "/metrics"

_FAMILY: Final = re.compile(r"# HELP (\S+) ")
_SAMPLE: Final = re.compile(r"([A-Za-z_:][A-Za-z0-9_:]*)(?:\{(.*)\})? (.*)")

Ask = Callable[[Order], AsyncGenerator[Message]]


@dataclass(frozen=True, slots=True)
class Told:
    """What one replica answered."""

    replica: str
    status: int
    body: bytes


class _Refused(Exception):
    """An answer that is no answer of all, for it is a refusal."""

    def __init__(self, told: Told) -> None:
        super().__init__(told.status)
        self.told = told


async def cluster(ask: Ask, order: Order) -> Response:
    """The status and the sessions of each replica, by their names. order: a request for it, as it came."""
    try:
        told = await _of_each(ask, _to(order, _STATUS_PATH))
        listed = {each.replica: each for each in await _of_each(ask, _to(order, SESSIONS_PATH))}
    except _Refused as refused:
        return Response(refused.told.body, refused.told.status, media_type="application/json")
    replicas = [
        {
            "replica": each.replica,
            "status": json.loads(each.body),
            "sessions": json.loads(listed[each.replica].body)["sessions"] if each.replica in listed else [],
        }
        for each in told
    ]
    return Response(json.dumps({"replicas": replicas}), media_type="application/json")


async def sessions(ask: Ask, order: Order) -> Response:
    """The sessions of all replicas, each as it is where it is awake or else newest: others have older ones of it."""
    try:
        told = [json.loads(each.body) for each in await _of_each(ask, order)]
    except _Refused as refused:
        return Response(refused.told.body, refused.told.status, media_type="application/json")
    found: dict[str, dict[str, Any]] = {}
    for info in (info for each in told for info in each["sessions"]):
        before = found.get(info["session"])
        if before is None or _rank(info) > _rank(before):
            found[info["session"]] = info
    body = {**told[0], "sessions": [found[uri] for uri in sorted(found)]}
    return Response(json.dumps(body), media_type="application/json")


def _rank(info: Mapping[str, Any]) -> tuple[bool, int]:
    return info["state"] == "awake", info["version"] or 0


async def metrics(ask: Ask, order: Order) -> Response:
    """The metrics of all, each figure with the label `replica`: a sum over it is that of the cluster."""
    try:
        told = await _of_each(ask, order)
    except _Refused as refused:
        return Response(refused.told.body, refused.told.status, media_type="application/json")
    text = labelled({each.replica: each.body.decode() for each in told})
    return Response(text, media_type="text/plain; version=0.0.4")


def labelled(texts: Mapping[str, str]) -> str:
    """The texts of several replicas as one: every family once, with the samples of all."""
    families: dict[str, tuple[list[str], list[str]]] = {}
    for replica, text in texts.items():
        family: tuple[list[str], list[str]] = ([], [])
        for line in text.splitlines():
            if begins := _FAMILY.match(line):
                family = families.setdefault(begins[1], ([], []))
            if line.startswith("#"):
                if line not in family[0]:
                    family[0].append(line)
            elif sample := _SAMPLE.fullmatch(line):
                labels = ",".join(each for each in (sample[2], f'replica="{replica}"') if each)
                family[1].append(f"{sample[1]}{{{labels}}} {sample[3]}")
    return "".join(f"{line}\n" for head, samples in families.values() for line in (*head, *samples))


async def _of_each(ask: Ask, order: Order) -> list[Told]:
    """The answers of all replicas. Raises _Refused: the first one refuses, as then all would."""
    first = await _answer(ask, order)
    if first.status != HTTPStatus.OK:
        raise _Refused(first)
    found = {first.replica: first}
    # One after the other: Ray takes calls beside each other of one request for the same call, and loses all but one.
    for name in order.why:
        if name not in found:
            with suppress(ReplicaLost):  # one that is gone meanwhile tells nothing; another may have answered for it
                told = await _answer(ask, replace(order, at=name, why={}))
                if told.status == HTTPStatus.OK:
                    found[told.replica] = told
    return [found[name] for name in sorted(found)]


async def _answer(ask: Ask, order: Order) -> Told:
    status, replica, body = 0, "", bytearray()
    async with aclosing(ask(order)) as messages:
        async for message in messages:
            if message["type"] == "http.response.start":
                status, headers = message["status"], Headers(raw=message["headers"])
                replica = headers[REPLICA_HEADER].partition(";")[0]
            else:
                body += message.get("body", b"")
    return Told(replica, status, bytes(body))


def _to(order: Order, path: str) -> Order:
    """The same request of another path."""
    scope: dict[str, Any] = {**order.scope, "path": path, "raw_path": path.encode()}
    return replace(order, scope=scope, why={})
