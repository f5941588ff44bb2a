"""`torpor doctor`: a report on this machine, its BLAS, the socket and the store."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ... import __version__
from ...errors import TorporError
from ...memvid.disk.location import default_store_path, named_store_path
from ...memvid.units import format_bytes, format_count, format_plural
from ...places import default_log_path
from ...socket_api.client.client import Client
from ...socket_api.client.link import start_command
from ...socket_api.wire.address import default_socket_path
from ..reach.daemon_link import find_ended_daemon, find_mismatch, nobody_is_there
from ..reach.examining import examine
from ..reach.options import JsonOption, SocketOption, StoreOption
from ..reach.store_view import describe_holder, find_holder, open_store
from ..view.disk import budgets_in, remark_on_room, use_of_remote
from ..view.formatting import format_seconds
from ..view.output import Output, facts_table, plain


def doctor(socket: SocketOption = None, store: StoreOption = None, as_json: JsonOption = False) -> None:
    """The BLAS matters on Linux without a GPU: the one that MLX ships there is many times slower than OpenBLAS.
    The examination runs in a process of its own and takes some seconds.

    [bold]Examples[/]

    [cyan]torpor doctor[/]
    [cyan]torpor doctor --json | jq .machine.blas[/]
    """
    output = Output(as_json=as_json)
    with output.progress("examining"):
        machine = examine_machine()
    daemon = _examine_daemon(socket)
    files = _examine_store(
        store or named_store_path() or Path(daemon["store"] if daemon["answers"] else default_store_path())
    )
    log = str(default_log_path())
    if as_json:
        body = {"torpor": __version__, "machine": machine, "daemon": daemon, "store": files, "log": log}
        output.document("doctor", body)
        return
    output.show(render_doctor(machine, daemon, files, log))
    remark_on_room(output, files["path"])
    advice = machine.get("blas", {}).get("advice")
    if advice:
        output.show(f"\n[yellow]{plain(advice)}[/]")


def examine_machine() -> dict[str, Any]:
    """The report on MLX. Raises DoctorFailed: there is none."""
    return examine("doctor")


def _examine_daemon(socket: Path | None) -> dict[str, Any]:
    place = str(socket or default_socket_path())
    try:
        with Client(socket) as client:
            mismatch = find_mismatch(client)
            problem = None if mismatch is None else mismatch.message
            return {"answers": True, "socket": place, "problem": problem, **asdict(client.status())}
    except TorporError as error:
        # No daemon is a fact; one that is silent or answers oddly is a problem.
        problem = None if nobody_is_there(error) else f"does not answer as it should: {error.code}: {error.message}"
        ended = find_ended_daemon(Path(place)) if problem is None else None
        return {"answers": False, "socket": place, "problem": ended.message if ended else problem}


def _examine_store(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = {"path": str(path), "locked_by": find_holder(path)}
    try:
        with open_store(path) as store:
            stored = {row.uri for row in store.iter_sessions()}
            journalled = len(set(store.acknowledged()) - stored)
            return {**found, "readable": True, "problem": None, "sessions": len(stored), "journalled": journalled}
    except TorporError as error:
        return {**found, "readable": False, "problem": error.message, "sessions": 0, "journalled": 0}


def render_doctor(machine: dict[str, Any], daemon: dict[str, Any], files: dict[str, Any], log: str) -> Any:
    """Draw the report. log: the default log of a daemon in the background."""
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
    facts.add_row("suspend", _describe_suspend(machine.get("suspend")))
    facts.add_row("daemon", _describe_daemon(daemon, files))
    facts.add_row("log", f"{plain(log)}, unless --log named another")
    facts.add_row("store", _describe_store(files))
    return facts


def describe_device(machine: dict[str, Any]) -> str:
    """The device of MLX: `gpu 0` for `Device(gpu, 0)`."""
    device = str(machine.get("device")).removeprefix("Device(").removesuffix(")")
    return plain(device.replace(",", ""))


def describe_blas(machine: dict[str, Any]) -> str:
    """The BLAS and its measured speed, in one line."""
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
        return f"none on {plain(daemon['socket'])}; start one with [cyan]{plain(start_command(daemon['socket']))}[/]"
    models = ", ".join(model["name"] for model in daemon["models"])
    return (
        f"[green]answers[/] on {plain(daemon['socket'])}"
        f" (pid {daemon['pid']}, up {format_seconds(daemon['uptime_s'])}):"
        f" {daemon['sessions_awake']} awake, {daemon['sessions_asleep']} asleep; models {plain(models)};"
        f" {_describe_memory(daemon['memory'])}{_describe_queue(daemon['queue'])}{_describe_config(daemon['config'])}"
        f"{_describe_disk(daemon, files)}{_describe_http(daemon['http'])}{_describe_remote(daemon['remote'])}"
    )


def _describe_remote(remote: dict[str, Any] | None) -> str:
    return "" if remote is None else f"; remote {plain(use_of_remote(remote))}"


def _describe_http(http: dict[str, Any] | None) -> str:
    return "" if http is None else f"; HTTP on {plain(http['url'] or http['socket'])}"


def _describe_suspend(why_not: str | None) -> str:
    """What happens before the system suspends. why_not: why sessions stay awake then."""
    return "sessions sleep first" if why_not is None else f"sessions stay awake: {plain(why_not)}"


def _describe_disk(daemon: dict[str, Any], files: dict[str, Any]) -> str:
    """The budgets of the store that is shown below, or that the daemon serves another one."""
    if os.path.realpath(daemon["store"]) != os.path.realpath(files["path"]):
        return f"; it serves another store, {plain(daemon['store'])}"
    disk = daemon["disk"]
    return "" if disk is None else f"; {', '.join(budgets_in(disk)) or 'no budget for the store'}"


def _describe_config(config: dict[str, Any] | None) -> str:
    if config is None:
        return ""
    if config["problem"]:
        return f"; [yellow]its configuration was not taken over: {plain(config['problem'])}[/]"
    waits = [
        f"; {until}: {plain(', '.join(config[what]))}"
        for what, until in (
            ("waits_for_restart", "only a restart will change"),
            ("waits_for_disuse", "in memory until no request uses them"),
        )
        if config[what]
    ]
    return f"; configured by {plain(config['path'])}{''.join(waits)}"


def _describe_queue(queue: dict[str, Any]) -> str:
    if not queue["waiting"]:
        return ""
    back = f", {format_count(queue['background'])} of them in the background" if queue["background"] else ""
    return f"; {format_plural(queue['waiting'], 'request')} waiting{back} ({format_count(queue['limit'])} may)"


def _describe_memory(memory: dict[str, Any]) -> str:
    taken = memory["weights_bytes"] + memory["sessions_bytes"] + memory["reserved_bytes"]
    return f"{format_bytes(taken)} of {format_bytes(memory['budget_bytes'])} of memory taken"


def _describe_store(files: dict[str, Any]) -> str:
    if files["readable"]:
        more = f", and {format_count(files['journalled'])} in the journal alone" if files["journalled"] else ""
        return f"{plain(files['path'])}: {format_plural(files['sessions'], 'session')} with a version{more}"
    return plain(files["problem"])
