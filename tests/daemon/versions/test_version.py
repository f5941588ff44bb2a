"""One place of the daemon writes versions, and what a session says in each."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

from torpor.daemon.versions.version import Base, is_said_by, map_behind, map_of
from torpor.tests.daemon.session_rig import Rigged, tokens_of

DAEMON = Path(__file__).resolve().parents[3] / "daemon"


def test_one_place_of_the_daemon_writes_versions() -> None:
    """Whatever makes a version is told to the same watchers, and meets the same remedies."""
    places = [
        path.relative_to(DAEMON).as_posix()
        for path in sorted(DAEMON.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and node.attr == "write_bundle"
    ]
    assert places == ["versions/writing.py"]


async def test_a_base_has_the_blocks_that_still_match_and_none_where_nothing_slept(rig: Rigged) -> None:
    await rig.read("a", tokens_of(1, 600))
    live = rig.live("a")
    assert Base.of(live) == Base.none(live) == Base(None, (), dict(live.model.backend))
    await rig.service.save("a")
    assert live.durable is not None
    assert (Base.of(live).blocks, Base.of(live).held) == (live.durable.entries, 600)
    live.unchanged_tokens = 300
    assert (Base.of(live).held, Base.of(live).bundle_id) == (256, live.durable.bundle_id)
    assert Base.of(live, ()) == Base(live.durable.bundle_id, (), dict(live.model.backend))


async def test_a_version_says_what_its_session_map_is_and_no_other(rig: Rigged) -> None:
    await rig.woken("a", tokens_of(1, 600))
    live = rig.live("a")
    with rig.service._parts.store.disk.open_session(live.uri) as reader:
        assert is_said_by(reader.manifest, map_of(live))
        assert not is_said_by(reader.manifest, map_behind(live, Base.of(live)))


async def test_a_sleep_behind_a_ledger_follows_it_and_writes_the_rest(open_rig: Any) -> None:
    """A stop that is refused leaves sessions awake whose ledgers are versions by then."""
    async with open_rig() as rig:
        await rig.asleep("a", tokens_of(1, 600))
        await rig.service.append("a", tokens=tokens_of(2, 40))
        live = rig.live("a")
        await rig.service._parts.store.versions.keep_ledger(live, "stop_deadline")
        assert live.durable is not None
        ledger = live.durable
        assert (ledger.version, ledger.block_tokens, ledger.unread_tokens, live.dirty) == (2, 600, 40, True)
        slept = await rig.sleep("a")
        assert (slept.version, slept.parent, slept.token_count) == (3, ledger.bundle_id, 640)
        assert slept.blocks_reused == 2
        assert (await rig.wake("a")).provenance.recomputed is None
