"""Figures of a cluster on one machine (`torpor serve-ray`), with a folder as its remote: what Ray adds to a request and
to a token, the memory of its processes, and what a replica's death and its replacement cost.

    pip install 'torpor[ray]'; python bench/cluster.py

Every session's cached tokens are compared with its ledger after each move; a difference is an error.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx2
from cluster_turns import faults_in, history, namespaces, shapes
from torpor.socket_api.cluster.deployment import DEFAULTS, application
from torpor.socket_api.cluster.own_cluster import own_cluster
from torpor.socket_api.cluster.passing import REPLICA_HEADER

_STORIES = ("harbor", "orchard", "mill", "quarry")


@dataclass
class Session:
    """A dialogue of a client that sends all of it again. ledger: the tokens that the session has, by its last
    answer."""

    name: str
    messages: list[dict[str, str]] = field(default_factory=list)
    ledger: int = 0
    replica: str = ""

    def body(self, words: str, **more: Any) -> dict[str, Any]:
        """A request for the next answer."""
        return {"model": "demo", "messages": [*self.messages, {"role": "user", "content": words}], **more}


@dataclass(frozen=True)
class Had:
    """The tokens of a turn that its session had: in memory or in a version, and those that were computed again."""

    cached: int
    recomputed: int


async def turn(client: httpx2.AsyncClient, session: Session, words: str) -> tuple[float, Had]:
    """One turn: its seconds, and what the session had of it."""
    begun = time.monotonic()
    body = session.body(words, max_tokens=12)
    answer = await client.post("/v1/chat/completions", headers={"x-session-id": session.name}, json=body)
    if answer.status_code != 200:
        raise RuntimeError(f"{session.name}: {answer.status_code} {answer.text[:300]}")
    seconds, told = time.monotonic() - begun, answer.json()
    message = told["choices"][0]["message"]
    session.messages = [*body["messages"], {"role": "assistant", "content": message["content"]}]
    session.ledger = told["usage"]["total_tokens"]
    session.replica = answer.headers.get(REPLICA_HEADER, "").partition(";")[0]
    details = told["usage"]["prompt_tokens_details"]
    return seconds, Had(details["cached_tokens"], details["recomputed_tokens"])


async def overhead(client: httpx2.AsyncClient, count: int) -> dict[str, float]:
    """The median seconds of a request for one token in a session that is awake, and of a token of a stream."""
    session = Session(f"overhead-{time.monotonic_ns()}")
    await turn(client, session, "Say something.")
    requests, tokens = [], []
    for number in range(count):
        begun = time.monotonic()
        body = session.body(f"Number {number}?", max_tokens=1)
        answer = await client.post("/v1/chat/completions", headers={"x-session-id": session.name}, json=body)
        answer.raise_for_status()
        requests.append(time.monotonic() - begun)
    for number in range(max(3, count // 10)):
        body = session.body(f"Tell a long story, {number}.", max_tokens=100, stream=True)
        path, headers = "/v1/chat/completions", {"x-session-id": session.name}
        async with client.stream("POST", path, headers=headers, json=body) as answer:
            told = (line async for line in answer.aiter_lines() if '"content"' in line or '"reasoning' in line)
            at = [time.monotonic() async for _ in told]
        if len(at) > 10:
            tokens.append((at[-1] - at[0]) / (len(at) - 1))
    return {"request_ms": 1000 * statistics.median(requests), "token_ms": 1000 * statistics.median(tokens)}


async def paired(one: httpx2.AsyncClient, cluster: httpx2.AsyncClient, count: int) -> dict[str, Any]:
    """The overhead of both, turn about: what else the machine does then weighs on both."""
    rounds = 5
    told = [(await overhead(one, count // rounds), await overhead(cluster, count // rounds)) for _ in range(rounds)]

    def median(values: Iterable[float]) -> float:
        return round(statistics.median(values), 2)

    kinds = told[0][0]
    return {
        "alone": {kind: median(alone[kind] for alone, _ in told) for kind in kinds},
        "ray": {kind: median(ray[kind] for _, ray in told) for kind in kinds},
        "ray_adds": {kind: median(ray[kind] - alone[kind] for alone, ray in told) for kind in kinds},
    }


@contextlib.asynccontextmanager
async def client_of(url: str, config: Path) -> AsyncIterator[httpx2.AsyncClient]:
    lines = (config / "torpor" / "http-tokens").read_text().splitlines()
    token = next(line.split()[1] for line in lines if line.startswith("default "))
    async with httpx2.AsyncClient(
        base_url=url, headers={"authorization": f"Bearer {token}"}, timeout=300, trust_env=False
    ) as client:
        yield client


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[str]:
    """One daemon without Ray; its URL."""
    command = [sys.executable, "-m", "torpor.cli.main", "serve", "--json", "--http", "0"]
    remote = [
        "--remote",
        f"file://{folder}/remote",
        "--remote-turns",
        "0",
        "--remote-lease",
        str(DEFAULTS["remote_lease"]),
    ]
    places = ["--store", str(folder / "store"), "--socket", str(folder / "s")]
    with subprocess.Popen([*command, *remote, *places], stdout=subprocess.PIPE, text=True) as daemon:
        assert daemon.stdout is not None
        try:
            ready = next(told for line in daemon.stdout if (told := json.loads(line))["event"] == "ready")
            yield str(ready["http"][0]).split()[2].removesuffix("/v1,")
        finally:
            daemon.send_signal(signal.SIGTERM)


async def told_of(client: httpx2.AsyncClient, replicas: int) -> dict[str, Any]:
    """What the cluster tells of all its replicas."""
    begun = time.monotonic()
    answer = await client.get("/v1/cluster")
    answer.raise_for_status()
    names = sorted(each["replica"] for each in answer.json()["replicas"])
    report: dict[str, Any] = {"replicas": len(names), "seconds": round(time.monotonic() - begun, 3)}
    text = (await client.get("/metrics")).text
    if len(names) != replicas or any(f'replica="{name}"' not in text for name in names):
        report["fault"] = {"names": names, "metrics": text[:300]}
    return report


def resident_mb() -> dict[str, float]:
    """The private memory of the processes that Ray has, by what they are, in MB."""
    found: dict[str, float] = {}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            line = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            environment = (process / "environ").read_bytes()
            is_ours = f"TORPOR_BENCH={os.getpid()}".encode() in environment or line.startswith("ray::")
            if not is_ours or process.name == str(os.getpid()):
                continue
            rollup = (process / "smaps_rollup").read_text()
            kib = next(int(each.split()[1]) for each in rollup.splitlines() if each.startswith("Pss:"))
            kind = next((name for name in ("gcs_server", "raylet", "dashboard", "monitor") if name in line), line[:40])
            found[kind] = found.get(kind, 0.0) + kib / 1024
    return found


async def deaths(client: httpx2.AsyncClient, pid_of: Any) -> dict[str, Any]:
    """Kill the replica of a session in mid-answer."""
    sessions = [Session(name) for name in _STORIES]
    for number in range(3):
        await asyncio.gather(*(turn(client, each, f"Chapter {number} of the {each.name}.") for each in sessions))
    killed, lived = sessions[0].replica, {each.replica for each in sessions[1:]} - {sessions[0].replica}
    pid = pid_of(killed)
    body = sessions[0].body("Tell a very long story.", max_tokens=2000, stream=True)
    cut = False
    try:
        async with client.stream(
            "POST", "/v1/chat/completions", headers={"x-session-id": sessions[0].name}, json=body
        ) as answer:
            lines = 0
            async for line in answer.aiter_lines():
                lines += line.startswith("data:")
                if lines == 5 and pid:
                    os.kill(pid, signal.SIGKILL)
                    pid = 0
    except httpx2.HTTPError:
        cut = True
    begun, report = time.monotonic(), {"stream_cut": cut, "sessions": {}}

    async def again(session: Session) -> None:
        was, ledger = session.replica, session.ledger
        _, had = await turn(client, session, "And then?")
        report["sessions"][session.name] = {
            "was_at_killed": was == killed,
            "moved": session.replica != was,
            "to_one_that_lived": session.replica in lived,
            "seconds": round(time.monotonic() - begun, 2),
            "ledger": ledger,
            **asdict(had),
        }
        if had.cached != ledger:
            report["fault"] = f"{session.name} had {ledger} tokens, and after its replica died {had}"

    await asyncio.gather(*map(again, sessions))
    return report | {"all": sessions}


async def replaced(client: httpx2.AsyncClient, sessions: list[Session], scale: Any) -> dict[str, Any]:
    """Deploy anew, with one replica: Ray replaces both. Then ask each session again."""
    begun = time.monotonic()
    await asyncio.to_thread(scale)
    report: dict[str, Any] = {"deployed_s": round(time.monotonic() - begun, 2), "sessions": {}}
    for session in sessions:
        was, ledger = session.replica, session.ledger
        seconds, had = await turn(client, session, "And after that?")
        moved = session.replica != was
        report["sessions"][session.name] = {
            "moved": moved,
            "seconds": round(seconds, 2),
            "ledger": ledger,
            **asdict(had),
        }
        if had.cached != ledger:
            report["fault"] = f"{session.name} had {ledger} tokens, and after it was replaced {had}"
    return report


async def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100, help="requests for the overhead, of each kind")
    parser.add_argument("--turns", type=int, default=1000, help="turns while replicas are killed")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--json", type=Path, help="write the figures there")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as path:
        report = await measured(Path(path), options)
    print(json.dumps(report, indent=1))
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=1))
    return 1 if any("fault" in part for part in report.values() if isinstance(part, dict)) else 0


async def measured(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    config = folder / "config"
    os.environ |= {"XDG_CONFIG_HOME": str(config), "RAY_USAGE_STATS_ENABLED": "0", "TORPOR_BENCH": str(os.getpid())}
    for name in ("one", "many"):
        (folder / name / "remote").mkdir(parents=True)
    report: dict[str, Any] = {}
    given = {"remote": f"file://{folder}/many/remote", "store": folder / "many" / "stores", "stop_within": 30.0}

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    cluster, begun = f"http://127.0.0.1:{port}", time.monotonic()
    with own_cluster(2) as address:
        import ray
        from ray import serve

        def run(replicas: int) -> None:
            serve.run(application({**given, "replicas": replicas}), name="torpor")

        def pid_of(replica: str) -> int:
            actor = ray.get_actor(f"SERVE_REPLICA::torpor#replica#{replica}", namespace="serve")
            return int(ray.get(actor.__ray_call__.remote(lambda _: os.getpid())))

        ray.init(address, log_to_driver=False, logging_level="error")
        try:
            report["ray_s"] = round(time.monotonic() - begun, 1)
            await asyncio.to_thread(serve.start, http_options={"port": port})
            await asyncio.to_thread(run, 2)
            report["ready_s"] = round(time.monotonic() - begun, 1)
            with alone(folder / "one") as url:
                async with client_of(cluster, config) as client, client_of(url, config) as one:
                    report |= await paired(one, client, options.count)
                    report["resident_mb"] = {name: round(mb) for name, mb in resident_mb().items()}
                    report["told"] = await told_of(client, 2)
                    report["killed"] = await deaths(client, pid_of)
                    sessions = report["killed"].pop("all")
                    report["history"], talks = await history(
                        client, options.turns, options.kills, lambda replica: os.kill(pid_of(replica), signal.SIGKILL)
                    )
                    report["clients"] = await asyncio.to_thread(shapes, client.headers["authorization"], cluster)
                    report["namespaces"] = await namespaces(client, config / "torpor" / "http-tokens")
                    report["replaced"] = await replaced(client, sessions, lambda: run(1))
                    if found := await faults_in(one, talks):
                        report["history"]["fault"] = found[:5]
        finally:
            with contextlib.suppress(Exception):
                serve.delete("torpor")
            ray.shutdown()
    return report


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
