"""`torpor ls --cluster`: the replicas of a cluster, and the sessions of all."""

from __future__ import annotations

import json
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any, Final
from urllib.parse import urlsplit

from ...memvid.units import format_bytes, format_plural
from ...socket_api.errors import DaemonUnreachable
from ...socket_api.tokens import OWNERS, default_tokens_path
from ..errors import InvalidUsage
from ..launch.filling import token_of
from ..view.formatting import format_id
from ..view.output import Output, plain, rows_table

_PATH: Final = "/v1/cluster"
_TIMEOUT_S: Final = 30.0
_COLUMNS = ("SESSION", "STATE", "TOKENS", "VERSION", "RESIDENT", "REPLICA", "BUNDLE")


def list_cluster(url: str, namespace: str | None, output: Output) -> None:
    """Show what each replica has. Raises DaemonUnreachable: no cluster answers there."""
    told = _asked(url, token_of(default_tokens_path(), namespace or OWNERS))
    if output.as_json:
        output.document("ls", told)
        return
    for each in told["replicas"]:
        output.remark(_replica_line(each))
    table = rows_table(
        *_COLUMNS,
        right=("TOKENS", "VERSION", "RESIDENT"),
        whole=("SESSION", "STATE", "REPLICA"),
        first_to_go=("BUNDLE", "RESIDENT", "VERSION"),
    )
    for name, (replica, info) in sorted(_newest(told["replicas"]).items()):
        table.add_row(
            plain(name.removeprefix("torpor://")),
            plain(info["state"]),
            str(info["token_count"]),
            str(info["version"] or "–"),
            format_bytes(info["resident_bytes"]) if info["resident_bytes"] else "–",
            plain(replica),
            plain(format_id(info["bundle_id"])),
        )
    output.show(table)


def _replica_line(each: dict[str, Any]) -> str:
    status = each["status"]
    memory = status["memory"]
    awake = format_plural(status["sessions_awake"], "session")
    room = f"{format_bytes(memory['sessions_bytes'])} of {format_bytes(memory['budget_bytes'])}"
    return f"[dim]replica[/] {plain(each['replica'])}: {awake} awake, {room}"


def _newest(replicas: list[dict[str, Any]]) -> dict[str, tuple[str, dict[str, Any]]]:
    """Each session where it is awake, or else where its newest version is: others have older ones of it."""
    found: dict[str, tuple[str, dict[str, Any]]] = {}
    for each in replicas:
        for info in each["sessions"]:
            before = found.get(info["session"])
            if before is None or _rank(info) > _rank(before[1]):
                found[info["session"]] = (each["replica"], info)
    return found


def _rank(info: dict[str, Any]) -> tuple[bool, int]:
    return info["state"] == "awake", info["version"] or 0


def _asked(url: str, token: str) -> dict[str, Any]:
    at = urlsplit(url)
    kind = {"http": HTTPConnection, "https": HTTPSConnection}.get(at.scheme)
    if kind is None or not at.netloc:
        raise InvalidUsage(f"{url} is no address of a cluster, as http://127.0.0.1:8000 is one.", option="--cluster")
    connection = kind(at.netloc, timeout=_TIMEOUT_S)
    try:
        connection.request("GET", _PATH, headers={"Authorization": f"Bearer {token}"})
        answer = connection.getresponse()
        body = answer.read()
        if answer.status == HTTPStatus.OK:
            told: dict[str, Any] = json.loads(body)
            return told
        why = f"it answers {answer.status}"
    except (OSError, HTTPException, ValueError) as error:
        why = str(error)
    finally:
        connection.close()
    raise DaemonUnreachable(
        f"No cluster answers at {url}: {why}. Give the address that torpor serve-ray writes when it is ready."
    )
