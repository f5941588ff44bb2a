"""What a repair on a daemon would do, told before it is done: what is computed again first, and what goes only if that
fails.

Values only: the store's own dry run, which knows of no model, and what healing would compute, into one report.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ...memvid.checking.set_aside_versions import LOST
from ...memvid.format.records import Action, MaintenanceReport
from ...memvid.uri import SessionUri

HEAL = "heal"
"""The kind of action that stands for a healing."""


def healed_first(report: MaintenanceReport, foreseen: Mapping[SessionUri, tuple[int, str]]) -> MaintenanceReport:
    """A dry run of a repair before which sessions are healed. foreseen: their newest versions, and what would be done
    to them, as a sentence.

    What the store would take of such a version stands in its healing's reason, as what is done if that fails; earlier
    versions may come back with the blocks that are computed.
    """
    lost = {problem.path for problem in report.problems if problem.code == LOST}
    instead: dict[SessionUri, list[Action]] = {uri: [] for uri in foreseen}
    kept: list[Action] = []
    unsure: set[str] = set()
    for action in report.actions:
        uri = action.session
        if uri is None or uri not in foreseen or (action.path not in lost and action.kind != "salvage"):
            kept.append(action)
        elif action.kind == "salvage" or action.version == foreseen[uri][0]:
            instead[uri].append(action)
        else:
            unsure.add(action.path)
            kept.append(replace(action, reason=f"{_UNLESS}: {action.reason}"))
    healings = [
        Action(HEAL, "", uri, version, 0, f"{sentence} Only if that fails: {_told(instead[uri])}.")
        for uri, (version, sentence) in foreseen.items()
    ]
    gone = [action for actions in instead.values() for action in actions]
    spared = {action.path for action in gone} - {action.path for action in kept}
    problems = (problem for problem in report.problems if problem.code != LOST or problem.path not in spared)
    return replace(
        report,
        actions=(*healings, *kept),
        bytes_written=report.bytes_written - sum(action.size_bytes for action in gone if action.kind == "salvage"),
        problems=tuple(
            replace(problem, message=f"{_UNLESS}: {problem.message}") if problem.path in unsure else problem
            for problem in problems
        ),
    )


_UNLESS = "unless what is computed again brings its blocks back"


def _told(actions: list[Action]) -> str:
    told = (f"{action.kind}, {action.reason.rstrip('.')}" for action in actions)
    return "; ".join(told) or "what is damaged is cut off"
