"""T9, threats 39 to 52, 60 and 61, over HTTP: clients that mean no good, or leave at the worst moment.

What needs no model is in the other files of this folder. The same threats to the daemon's own socket are in
`tests/socket_api/server` and `tests/socket_api/wire`, and those to a session in `tests/daemon` and `tests/memvid`.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import socket
import stat
import sys
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest
from torpor.tests.socket_api.http.http_rig import HttpThread
from torpor.tests.socket_api.http.serving import Served, serving, working
from torpor.tests.socket_api.real_daemon import until

SECRET = "zanzibar quokka"
TEAM = "team-token-of-some-length"
HELLO = {"model": "demo", "messages": [{"role": "user", "content": "What is a list?"}], "max_tokens": 4}
CHAT = "/v1/chat/completions"

on_linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc tells what a process holds")


def client_of(served: Served, token: str | None = None) -> httpx2.Client:
    return httpx2.Client(base_url=served.url, headers={"x-api-key": token or served.token}, timeout=60)


def raw_request(path: str, body: Any = None) -> bytes:
    """A whole request, for the Unix socket."""
    raw = b"" if body is None else json.dumps(body).encode()
    return f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(raw)}\r\n\r\n".encode() + raw


def connected(path: Path) -> socket.socket:
    found = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    found.settimeout(60)
    found.connect(str(path))
    return found


def asked(client: httpx2.Client, session: str | None = None, **more: Any) -> dict[str, int]:
    """Ask in a session, and give the usage of the answer."""
    return answered_in(client, session, **more)[0]


def answered_in(
    client: httpx2.Client, session: str | None, messages: Any = HELLO["messages"], **more: Any
) -> tuple[dict[str, int], str]:
    """Ask in a session, and give the usage and the text of the answer."""
    headers = {"x-torpor-session": session} if session else {}
    answer = client.post(CHAT, json={**HELLO, "messages": messages, **more}, headers=headers)
    assert answer.status_code == 200, answer.text
    told = answer.json()
    usage, said = told["usage"], told["choices"][0]["message"]["content"]
    return {"total": usage["total_tokens"], "cached": usage["prompt_tokens_details"]["cached_tokens"]}, said


# --- connections


@pytest.mark.one_in(1)
@pytest.mark.parametrize("count", [1_000, pytest.param(10_000, marks=pytest.mark.heavy)])
def test_connections_by_the_thousand_that_say_nothing_lock_nobody_out_threat_41(served: Served, count: int) -> None:
    """Half of them begin a request, and go on with it never."""
    idle: deque[socket.socket] = deque()
    with client_of(served) as client:
        for at in range(count):
            each = connected(served.socket)
            with contextlib.suppress(BrokenPipeError):  # it gave way already
                each.sendall(b"GET /v1/models HTT" * (at % 2))
            idle.append(each)
            if len(idle) > 600:  # more than are served; a test has few open files
                idle.popleft().close()
            if at % 100 == 0:
                assert client.get("/v1/models").status_code == 200
        assert asked(client)["total"]
    for each in idle:
        each.close()


@on_linux
def test_a_request_cut_at_any_byte_leaves_nothing_behind_threat_42(server: HttpThread) -> None:
    server.ask("GET", "/healthz")
    before = len(os.listdir("/proc/self/fd"))
    whole = raw_request("/v1/sessions", {"session": "a"})
    for end in range(len(whole)):
        with connected(server.socket_path) as client:
            client.sendall(whole[:end])
    server.wait_until(lambda: len(os.listdir("/proc/self/fd")) <= before)
    assert server.server.works == 0
    assert not server.service.sessions


@pytest.mark.parametrize("length", [2**32, 2**63, 2**64])
def test_a_body_of_4_gib_is_refused_before_it_is_sent_threat_43(server: HttpThread, length: int) -> None:
    with connected(server.socket_path) as client:
        client.sendall(b"POST /v1/sessions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % length)
        assert int(client.recv(4096).split()[1]) in (400, 413)


@pytest.mark.one_in(1)
@on_linux
@pytest.mark.parametrize("count", [60, pytest.param(10_000, marks=pytest.mark.heavy)])
def test_clients_that_leave_at_any_moment_leave_nothing_behind_threat_45(served: Served, count: int) -> None:
    """T9: in the midst of a request, of its answer, or behind it. Neither files, work nor begun sessions pile up. An
    answer that was whole before its client left stays, as any answer: the same question again has another one."""
    process, draw = f"/proc/{served.daemon.process.pid}", random.Random(count)

    def leave() -> None:
        whole = raw_request(CHAT, {**HELLO, "stream": True, "max_tokens": 64})
        sent = min(draw.randrange(2 * len(whole)), len(whole))
        with connected(served.socket) as client:
            client.sendall(whole[:sent])
            if sent == len(whole):
                left = draw.randrange(4_000)
                while left > 0 and (got := client.recv(left)):
                    left -= len(got)

    def held() -> tuple[int, int]:
        with client_of(served) as client:
            sessions = client.get("/v1/sessions").json()["sessions"]
        return len(os.listdir(f"{process}/fd")), sum(each["token_count"] < whole_answer for each in sessions)

    with client_of(served) as client:
        whole_answer = asked(client, max_tokens=64)["total"]
    for _ in range(20):
        leave()
    files, begun = held()
    memory = beside_sessions(served)
    for _ in range(count):
        leave()
    until(lambda: held()[0] <= files)
    print(f"{count} clients left: from {memory} to {beside_sessions(served)} KiB resident beside sessions")
    assert held()[1] <= begun + 20  # one that comes while others still end begins its own
    with client_of(served) as client:
        assert asked(client)["total"]


def beside_sessions(served: Served) -> int:
    """Memory of the daemon without what it tells as that of its sessions, in KiB."""
    status = Path(f"/proc/{served.daemon.process.pid}/status").read_text()
    with client_of(served) as client:
        told = client.get("/metrics").text
    (resident,) = re.findall(r"^VmRSS:\s+(\d+) kB", status, re.MULTILINE)
    (sessions,) = re.findall(r"^torpor_memory_sessions_bytes (\S+)", told, re.MULTILINE)
    return int(resident) - int(float(sessions)) // 1024


# --- sessions


def test_a_client_that_leaves_its_sleep_may_ask_for_it_again_threat_46(served: Served) -> None:
    with client_of(served) as client:
        asked(client, "left-asleep")
        with connected(served.socket) as leaving:
            leaving.sendall(raw_request("/v1/sessions/left-asleep/sleep"))
        until(lambda: working(served) == 0)
        receipts = [client.post("/v1/sessions/left-asleep/sleep").json() for _ in range(2)]
        assert receipts[0]["bundle_id"] == receipts[1]["bundle_id"]


def test_what_was_minted_for_one_token_is_nothing_to_another_threat_47(served: Served) -> None:
    """Ids of responses, and names of sessions: forged, or overheard."""
    with client_of(served) as owner, other_namespace(served) as other:
        asked_of = {"model": "demo", "input": f"The {SECRET} is here.", "max_output_tokens": 4}
        made = owner.post("/v1/responses", json=asked_of).json()
        session = owner.post("/v1/responses", json=asked_of).headers["x-torpor-session"]
        for each in (
            other.get(f"/v1/responses/{made['id']}"),
            other.get(f"/v1/responses/{made['id']}/input_items"),
            other.delete(f"/v1/responses/{made['id']}"),
            other.post("/v1/responses", json={**asked_of, "previous_response_id": made["id"]}),
            other.get(f"/v1/sessions/{session.removeprefix('torpor://').replace('/', '%2F')}"),
            other.post(CHAT, json=HELLO, headers={"x-torpor-session": session}),
        ):
            assert each.status_code in (400, 403, 404), each.text
            assert SECRET not in each.text
        assert owner.get(f"/v1/responses/{made['id']}").status_code == 200


@contextlib.contextmanager
def other_namespace(served: Served) -> Iterator[httpx2.Client]:
    """A client whose token is for another namespace."""
    (tokens,) = served.daemon.folder.glob("config/**/http-tokens")
    tokens.write_text(f"{tokens.read_text().rstrip()}\nteam {TEAM}\n")
    with client_of(served, TEAM) as client:
        yield client


def test_sleeps_of_one_session_at_once_make_one_version_threat_49(served: Served) -> None:
    with client_of(served) as client, ThreadPoolExecutor(8) as pool:
        asked(client, "slept")
        told = list(pool.map(lambda _: client.post("/v1/sessions/slept/sleep"), range(8)))
        assert [each.status_code for each in told] == [200] * 8
        assert len({each.json()["version"] for each in told}) == 1


def test_a_sleep_beside_an_answer_takes_all_of_it_or_nothing_threat_50(served: Served) -> None:
    with client_of(served) as client, ThreadPoolExecutor(1) as pool:
        with client.stream(
            "POST", CHAT, json={**HELLO, "stream": True, "max_tokens": 120}, headers=named("torn")
        ) as answer:
            lines = answer.iter_lines()
            next(lines)
            sleep = pool.submit(client.post, "/v1/sessions/torn/sleep")
            assert list(lines)[-2:] == ["data: [DONE]", ""]
        slept = sleep.result().json()["token_count"]
        assert slept == client.get("/v1/sessions/torn").json()["info"]["token_count"]


def named(session: str) -> dict[str, str]:
    return {"x-torpor-session": session}


@pytest.mark.one_in(4)
def test_sessions_that_take_each_others_memory_while_they_wake_lose_nothing_threat_51(short_path: Path) -> None:
    """Each has only what it was asked, and all of it, though a few of them fit at once."""
    with serving(short_path, "--memory-budget", "30MB") as served, client_of(served) as client:

        def talk(session: str) -> None:
            messages, held = [{"role": "user", "content": f"{session}: {'a word, ' * 40}"}], 0
            for _ in range(4):
                usage, said = answered_in(client, session, messages)
                assert usage["cached"] == held
                held = usage["total"]
                messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "And then?"}]

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(talk, [f"mine-{number}" for number in range(8)]))
        (slept,) = re.findall(r"^torpor_memory_slept_by_pressure (\S+)", client.get("/metrics").text, re.MULTILINE)
        assert float(slept) > 8


def test_wakes_sleeps_and_deletes_at_once_give_the_whole_session_or_none_threat_52(served: Served) -> None:
    with client_of(served) as client, ThreadPoolExecutor(4) as pool:
        for _ in range(3):
            asked(client, "gone")
            client.post("/v1/sessions/gone/sleep")
            wakes = [pool.submit(client.post, "/v1/sessions/gone/wake") for _ in range(3)]
            deleted = pool.submit(client.delete, "/v1/sessions/gone")
            assert {each.result().status_code for each in wakes} <= {200, 404}
            assert deleted.result().status_code == 200
            assert client.get("/v1/sessions/gone").status_code == 404


# --- secrets


@pytest.mark.one_in(1)
@on_linux
def test_neither_texts_nor_tokens_are_logged_and_all_files_are_the_owners_threat_60(
    short_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with serving(short_path) as served, client_of(served) as client:
        asked(client, "secret", messages=[{"role": "user", "content": SECRET}])
        for wrong in (
            client.post(CHAT, json={"messages": SECRET}),
            client.post(CHAT, content=f'{{"messages": "{SECRET}'.encode()),
            client.get(f"/v1/sessions/{SECRET}"),
            client.get("/v1/models", headers={"x-api-key": SECRET}),
        ):
            assert wrong.status_code in (400, 401, 404)
        assert client.post("/v1/sessions/secret/sleep").status_code == 200
        limits = Path(f"/proc/{served.daemon.process.pid}/limits").read_text()
        (core,) = (line.split()[4] for line in limits.splitlines() if line.startswith("Max core file size"))
        assert core == "0"
        for each in (each for each in short_path.rglob("*") if not each.is_dir()):
            assert stat.S_IMODE(each.stat().st_mode) == 0o600, each
        assert stat.S_IMODE((short_path / "store").stat().st_mode) == 0o700
        token = served.token
    said = capfd.readouterr()
    assert SECRET not in said.out + said.err
    assert token not in said.out + said.err


@pytest.mark.one_in(1)
def test_a_token_does_not_tell_what_those_of_another_have_read_threat_61(served: Served) -> None:
    """What one namespace has read makes no answer of another cheaper."""
    long = [{"role": "user", "content": f"{SECRET} " * 60}]
    with client_of(served) as owner, other_namespace(served) as other:
        assert asked(owner, "first", messages=long)["cached"] == 0
        again = [{"role": "user", "content": f"{SECRET} " * 60 + "And?"}]
        assert asked(owner, messages=again)["cached"] > 0
        assert asked(other, messages=again)["cached"] == 0


def test_a_token_is_told_of_no_request_for_another_namespace_threat_61(served: Served) -> None:
    """What requests cost is counted of its own sessions alone, and a session that is gone has no namespace."""
    with client_of(served) as owner, other_namespace(served) as other:
        asked(owner, "of-the-owner")
        asked(owner, "gone")
        owner.delete("/v1/sessions/gone")
        before = other.get("/v1/why").json()["total"]["requests"]
        session = asked(other, "of-another")
        told = other.get("/v1/why", params={"by": "session"}).json()
        assert told["total"]["requests"] == before + 1, session
        assert {row["key"].split("/")[2] for row in told["rows"]} == {"team"}
        assert "of-the-owner" not in other.get("/v1/why", params={"by": "session", "namespace": "default"}).text


@pytest.mark.one_in(1)
def test_no_number_tells_a_token_that_another_namespace_has_the_same_words_threat_61(served: Served) -> None:
    """Equal blocks lie in the store once, whoever wrote them. Every answer about a session is the same as about one
    with words that nobody has."""
    rng = random.Random(31)
    known, unknown = ([rng.randrange(5, 4000) for _ in range(400)] for _ in range(2))
    with client_of(served) as owner, other_namespace(served) as other:
        assert read_and_slept(owner, "mine", known)["sleep"]["blocks_new"] > 0
        assert read_and_slept(owner, "again", known)["sleep"]["blocks_reused"] > 0, "its owner may know"
        guess, control = (told_of(other, name, words) for name, words in (("guess", known), ("other", unknown)))
        assert guess == control
        assert guess["sleep"]["token_count"] == 401
        refused = other.get("/metrics")
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "forbidden")
        assert owner.get("/metrics").status_code == 200


def read_and_slept(client: httpx2.Client, name: str, prompt: list[int]) -> dict[str, Any]:
    """What a client is told of a session that reads these tokens and sleeps."""
    body = {"prompt": prompt, "max_tokens": 1}
    answer = client.post("/v1/completions", json=body, headers={"x-torpor-session": name}).json()
    return {"answer": answer["usage"], "sleep": client.post(f"/v1/sessions/{name}/sleep").json()}


def told_of(client: httpx2.Client, name: str, prompt: list[int]) -> dict[str, Any]:
    """What a client is told of a session with these tokens to its end, without names, ids and times."""
    told = read_and_slept(client, name, prompt)
    for verb, more in (("wake", {}), ("save", {}), ("fork", {"name": f"{name}-fork"})):
        told[verb] = client.post(f"/v1/sessions/{name}/{verb}", json=more).json()
    told["fold"] = client.post(f"/v1/sessions/{name}/fold", json={"name": f"{name}-fold", "summary": "So."}).json()
    told["why"] = client.get(f"/v1/sessions/{name}/why").json()
    told["show"] = client.get(f"/v1/sessions/{name}").json()
    told["history"] = client.get(f"/v1/history?sessions={name}").json()
    told["blocks"] = client.get(f"/v1/sessions/{name}/blocks", params={"deep": "true"}).json()
    assert len(told["blocks"]["blocks"]) == 3
    told["list"] = [each for each in client.get("/v1/sessions").json()["sessions"] if each["name"].startswith(name)]
    told["delete"] = [client.delete(f"/v1/sessions/{name}{end}").json() for end in ("", "-fork", "-fold")]
    apart = re.compile(r"session|name|bundle_id|block_id|.*_ns|.*seconds|parent|lineage|tail_text")
    own: dict[str, Any] = without(told, apart)
    return own


def without(told: Any, left_out: re.Pattern[str]) -> Any:
    if isinstance(told, dict):
        return {key: without(value, left_out) for key, value in told.items() if not left_out.fullmatch(key)}
    return [without(each, left_out) for each in told] if isinstance(told, list) else told
