"""The groups of parts stay small, close each other in order, and handlers reach into no part."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torpor.daemon import upkeep
from torpor.daemon.parts.parts import Parts
from torpor.daemon.upkeep.loop import Job
from torpor.tests.daemon.session_rig import MODEL, Rigged, open_service

DAEMON = Path(__file__).resolve().parents[3] / "daemon"
VERBS, PARTS = DAEMON / "verbs", DAEMON / "parts"
GROUPS = ("store", "models", "sessions", "upkeep")
MOST_PARTS = 17
MOST_BESIDE_GROUPS = 7
"""What all groups share: the bus, the queue, the door, the options, the configuration file, where HTTP is served, the
time of the start."""

DEEPEST = 3
"""A group, a part of it, and what the part offers."""


async def test_a_group_has_few_parts(rig: Rigged) -> None:
    parts = rig.service._parts
    counts = {name: len([one for one in vars(getattr(parts, name)) if one[0] != "_"]) for name in GROUPS}
    assert max(counts.values()) <= MOST_PARTS, counts
    beside = (vars(parts).keys() | {name for name in vars(Parts) if name[0] != "_"}) - set(GROUPS)
    shared = {name for name in beside if name[0] != "_" and not callable(getattr(parts, name))}
    assert len(shared) <= MOST_BESIDE_GROUPS, shared


@pytest.mark.parametrize("name", GROUPS)
def test_a_group_is_made_of_those_before_it(name: str) -> None:
    tree = ast.parse((PARTS / f"{name}.py").read_text(encoding="utf-8"))
    beside = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level == 1}
    assert beside <= set(GROUPS[: GROUPS.index(name)])


async def test_a_group_closes_before_those_that_it_is_made_of(
    store: Path, tiny_model: Path, digest_cache: Path
) -> None:
    models, before = {MODEL: str(tiny_model)}, set(threading.enumerate())
    service, closed = await open_service(store, models=models, digest_cache=digest_cache), []
    for name in GROUPS:
        group = getattr(service._parts, name)

        async def close(*order: Any, name: str = name, close: Callable[..., Awaitable[Any]] = group.close) -> Any:
            told = await close(*order)
            closed.append(name)
            return told

        group.close = close
    await service.close()
    assert closed == ["upkeep", "sessions", "models", "store"]
    left = {each.name for each in set(threading.enumerate()) - before if each.name.startswith("torpor")}
    told = {"torpor-load", "torpor-grammar"}
    assert left <= told, "a thread amid a load or a grammar is told to end, and not waited for"


def jobs_below(job: type[Job]) -> Iterator[type[Job]]:
    """Those of the package that have a name; tests have others."""
    for each in job.__subclasses__():
        if each.__module__.startswith(f"{upkeep.__name__}.") and hasattr(each, "name"):
            yield each
        yield from jobs_below(each)


async def test_every_job_of_upkeep_is_made(store: Path, tiny_model: Path, digest_cache: Path) -> None:
    for module in pkgutil.iter_modules(upkeep.__path__):
        importlib.import_module(f"{upkeep.__name__}.{module.name}")
    models = {MODEL: str(tiny_model)}
    (store.parent / "shared").mkdir()
    remote = f"file://{store.parent / 'shared'}"
    service = await open_service(store, models=models, digest_cache=digest_cache, scrub_rate=1, remote=remote)
    made = {each.name for each in service._parts.upkeep.loop.states()}
    await service.close()
    assert made == {each.name for each in jobs_below(Job)}, "make it in a group of daemon/parts, as upkeep.py does"


async def test_what_the_service_offers_is_no_part(rig: Rigged) -> None:
    assert not [name for name in vars(rig.service) if name[0] != "_"]


def chain_of(node: ast.expr, local: dict[str, str]) -> str | None:
    """The names behind the parts, with a dot before each; None for what is no part. local: those of local names."""
    if isinstance(node, ast.Attribute):
        before = chain_of(node.value, local)
        return None if before is None else f"{before}.{node.attr}"
    return local.get(node.id) if isinstance(node, ast.Name) else None


def learn(target: ast.expr, value: ast.expr, local: dict[str, str]) -> None:
    """Take over what an assignment makes of a part."""
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        for each, of in zip(target.elts, value.elts, strict=True):
            learn(each, of, local)
    elif isinstance(target, ast.Name) and (chain := chain_of(value, local)) is not None:
        local[target.id] = chain


def reaches_in(function: ast.AST) -> Iterator[tuple[str, int]]:
    """Each chain of names behind the parts in a handler, with its line."""
    local, nodes = {"parts": ""}, list(ast.walk(function))
    for node in nodes * 2:  # a name may be of a name that stands further down in the walk
        if isinstance(node, ast.Assign):
            learn(node.targets[0], node.value, local)
    for node in nodes:
        if isinstance(node, ast.Attribute) and (chain := chain_of(node, local)):
            yield chain.removeprefix("."), node.lineno


def against(source: str) -> list[str]:
    """What a module of handlers reaches that is neither of a group nor of a part of one."""
    found = []
    for function in ast.walk(ast.parse(source)):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            for chain, line in reaches_in(function):
                names = chain.split(".")
                if len(names) > (DEEPEST if names[0] in GROUPS else DEEPEST - 1) or any(
                    each[0] == "_" for each in names
                ):
                    found.append(f"{line}: parts.{chain}")
    return found


@pytest.mark.parametrize("path", sorted(VERBS.glob("*.py")), ids=lambda path: path.stem)
def test_a_handler_asks_a_group_or_a_part_of_one_and_reaches_into_no_part(path: Path) -> None:
    assert not against(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    "line",
    [
        "parts.sessions.residency.awake.get(uri)",
        "residency = parts.sessions.residency; residency.awake.get(uri)",
        "turns, awake = parts.sessions.turns, parts.sessions.residency.awake; awake.get(uri)",
        "parts.sessions._hits",
        "parts.bus.subscriptions.clear()",
    ],
)
def test_a_deeper_reach_is_seen(line: str) -> None:
    assert against(f"async def handler(parts, request):\n    {line}\n")
