"""`torpor doctor`: what this machine, its BLAS, the socket and the store are like."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from .. import __version__
from ..errors import TorporError
from ..memvid.location import default_store_path
from ..socket_api.address import default_socket_path
from .background import default_log_path
from .daemon_link import connect, nobody_is_there
from .errors import DoctorFailed
from .formatting import format_plural, format_seconds
from .options import JsonOption, SocketOption, StoreOption
from .output import Output, facts_table, plain
from .store_view import describe_holder, find_holder, open_store

EXAMINATION_TIMEOUT_S = 120.0  # importing MLX and fifteen small products take seconds even on a slow machine
MAX_STDERR_CHARS = 600  # of a failed examination's last words that are shown


def doctor(socket: SocketOption = None, store: StoreOption = None, as_json: JsonOption = False) -> None:
    """Say what Torpor finds here: versions, device, which BLAS computes and how fast, the daemon and the store.

    The BLAS matters on Linux without a GPU: the one that MLX ships there is many times slower than OpenBLAS.
    The examination runs in a process of its own and takes some seconds.

    [bold]Examples[/]

    [cyan]torpor doctor[/]
    [cyan]torpor doctor --json | jq .machine.blas[/]
    """
    output = Output(as_json=as_json)
    with output.progress("examining"):
        machine = examine_machine()
    daemon = _examine_daemon(socket)
    files = _examine_store(store or Path(daemon["store"] if daemon["answers"] else default_store_path()))
    log = str(default_log_path())
    if as_json:
        body = {"torpor": __version__, "machine": machine, "daemon": daemon, "store": files, "log": log}
        output.document("doctor", body)
        return
    output.stdout.print(render_doctor(machine, daemon, files, log))
    advice = machine.get("blas", {}).get("advice")
    if advice:
        output.stdout.print(f"\n[yellow]{plain(advice)}[/]")


def examine_machine() -> dict[str, Any]:
    """Run the examination, which imports MLX, in a process of its own, and give its report.

    Raises:
        DoctorFailed: it did not come back with one.
    """
    command = [sys.executable, "-P", "-m", "torpor.daemon.doctor"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=EXAMINATION_TIMEOUT_S, check=False)
        report = json.loads(done.stdout)
    except subprocess.TimeoutExpired as error:
        raise DoctorFailed(f"The examination took more than {EXAMINATION_TIMEOUT_S:.0f} s and was ended.") from error
    except ValueError as error:
        words = done.stderr.strip()[-MAX_STDERR_CHARS:]
        raise DoctorFailed(
            f"The examination ended with status {done.returncode} and no report: {words}", status=done.returncode
        ) from error
    if not isinstance(report, dict):
        raise DoctorFailed("The examination's report is not one JSON object.")
    return report


def _examine_daemon(socket: Path | None) -> dict[str, Any]:
    place = str(socket or default_socket_path())
    try:
        with connect(socket) as client:
            return {"answers": True, "socket": place, "problem": None, **client.status().model_dump(mode="json")}
    except TorporError as error:
        # Nobody there is a fact; somebody there who does not answer, or not as a daemon does, is a problem.
        problem = None if nobody_is_there(error) else f"does not answer as it should: {error.code}: {error.message}"
        return {"answers": False, "socket": place, "problem": problem}


def _examine_store(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = {"path": str(path), "locked_by": find_holder(path)}
    try:
        with open_store(path) as store:
            return {**found, "readable": True, "problem": None, "sessions": sum(1 for _ in store.iter_sessions())}
    except TorporError as error:
        return {**found, "readable": False, "problem": error.code, "sessions": 0}


def render_doctor(machine: dict[str, Any], daemon: dict[str, Any], files: dict[str, Any], log: str) -> Any:
    """Draw what was found; `log` is where a daemon in the background writes unless told otherwise."""
    blas = machine.get("blas", {})
    facts = facts_table()
    facts.add_row("torpor", f"{__version__} on Python {plain(machine.get('python'))}")
    facts.add_row("machine", f"{plain(str(machine.get('platform')))}, {plain(machine.get('cpu_count'))} cores")
    packages = [f"{name} {version or 'missing'}" for name, version in machine.get("packages", {}).items()]
    facts.add_row("packages", plain(", ".join(packages)))
    facts.add_row("device", describe_device(machine))
    facts.add_row("BLAS", describe_blas(machine))
    if blas.get("reason"):
        facts.add_row("", f"[dim]{plain(str(blas['reason']))}[/]")
    facts.add_row("daemon", _describe_daemon(daemon, files))
    facts.add_row("log", plain(log))
    facts.add_row("store", _describe_store(files))
    return facts


def describe_device(machine: dict[str, Any]) -> str:
    """Say on what MLX computes: `Device(gpu, 0)` is `gpu 0`."""
    device = str(machine.get("device")).removeprefix("Device(").removesuffix(")")
    return plain(device.replace(",", ""))


def describe_blas(machine: dict[str, Any]) -> str:
    """Say in one line which BLAS computes and how fast it was measured to be."""
    blas = machine.get("blas", {})
    verdict = "[green]fast[/]" if blas.get("fast") else "[yellow]slow[/]"
    library = plain(str(blas.get("library") or "the one that MLX ships"))
    return f"{verdict}  {plain(blas.get('gflops'))} GFLOP/s ({plain(blas.get('product'))}), {library}"


def _describe_daemon(daemon: dict[str, Any], files: dict[str, Any]) -> str:
    if not daemon["answers"] and files["locked_by"] is not None:
        found = daemon["problem"] or f"none on {daemon['socket']}"
        return f"[yellow]{plain(found)}; but {plain(describe_holder(files['locked_by'], Path(files['path'])))}[/]"
    if daemon["problem"]:
        return f"[yellow]{plain(daemon['problem'])}[/]"
    if not daemon["answers"]:
        return f"none on {plain(daemon['socket'])}; start one with [cyan]torpor serve[/]"
    models = ", ".join(model["name"] for model in daemon["models"])
    return (
        f"[green]answers[/] on {plain(daemon['socket'])}"
        f" (pid {daemon['pid']}, up {format_seconds(daemon['uptime_s'])}):"
        f" {daemon['sessions_awake']} awake, {daemon['sessions_asleep']} asleep; models {plain(models)}"
    )


def _describe_store(files: dict[str, Any]) -> str:
    if files["readable"]:
        return f"{plain(files['path'])}: {format_plural(files['sessions'], 'session')}"
    return f"{plain(files['path'])}: {plain(files['problem'])}"
