"""`--keep-last` and `--keep-days` of a daemon: what no rule keeps goes by itself, and nothing else."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from torpor.daemon.api.sampling import Sampling
from torpor.daemon.config.configuring import ConfigFile
from torpor.daemon.config.settings import Settings, settings_of
from torpor.daemon.upkeep.retaining import Retaining
from torpor.memvid.disk.clock import now_ns
from torpor.memvid.errors import StoreIoError
from torpor.memvid.store import Store
from torpor.memvid.writing import sleeping
from torpor.tests.daemon.session_rig import Rigged, listening, tokens_of, until


async def save(rig: Rigged, name: str, times: int) -> None:
    """So many new versions of a session."""
    for _ in range(times):
        await rig.service.append(name, tokens=[1])
        await rig.service.save(name)


def versions(rig: Rigged, name: str = "a") -> list[int]:
    return [row.version for row in rig.service._parts.store.disk.versions(rig.service._parts.sessions.resolve(name))]


async def at_rest(rig: Rigged) -> None:
    """Wait until no session is left to look at."""
    retaining = rig.service._parts.store.retaining
    await until(lambda: not list(retaining.due()))
    await rig.service._parts.upkeep.run(lambda: None)
    await asyncio.sleep(0)


async def saved(rig: Rigged, names: Sequence[str], times: int) -> None:
    for name in names:
        await rig.read(name, tokens_of(len(name), 300))
        await save(rig, name, times)


async def test_each_session_keeps_its_newest_versions_and_those_with_a_mark(open_rig: Any) -> None:
    async with open_rig(keep_last=2) as rig, listening(rig) as heard:
        await saved(rig, ["a", "b"], 1)
        await rig.service.mark("a", tag="first")
        await save(rig, "a", 1)
        await rig.service.mark("a", pinned=True)
        await save(rig, "a", 4)
        await until(lambda: versions(rig) == [1, 2, 5, 6])
        assert versions(rig, "b") == [1]
        await at_rest(rig)
    told = heard.of("versions_pruned", "a")
    assert sum(each["versions"] for each in told) == 2
    assert all(each["bytes_freed"] >= 0 for each in told)
    assert not heard.of("versions_pruned", "b")


async def test_without_a_rule_every_version_stays(open_rig: Any) -> None:
    async with open_rig() as rig, listening(rig) as heard:
        await saved(rig, ["a"], 7)
        await at_rest(rig)
        assert versions(rig) == [1, 2, 3, 4, 5, 6, 7]
    assert not heard.of("versions_pruned")


async def test_at_the_start_the_rule_holds_for_sessions_that_sleep(open_rig: Any) -> None:
    async with open_rig() as rig:
        await saved(rig, ["a", "bb"], 4)
    async with open_rig(keep_last=3) as rig:
        await until(lambda: versions(rig) == versions(rig, "bb") == [2, 3, 4])
        await rig.wake("a")


async def test_days_are_counted_back_from_the_newest_version(open_rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_rig(keep_days=2.5) as rig:
        await rig.read("a", tokens_of(1, 300))
        for days_ago in (5, 4, 3, 2):
            monkeypatch.setattr(sleeping, "now_ns", lambda ago=days_ago: now_ns() - ago * 24 * 3600 * 10**9)
            await save(rig, "a", 1)
        await until(lambda: versions(rig) == [2, 3, 4])


async def test_a_rule_of_the_file_holds_at_once(rig: Rigged, tmp_path: Path) -> None:
    file = tmp_path / "torpor.toml"
    file.write_text("")
    await saved(rig, ["a"], 4)
    models = {name: place.choice for name, place in rig.service._parts.models.shelf.places.items()}

    def read() -> Settings:
        return Settings(models, settings_of({"config": file}).options)

    rig.service.follow(ConfigFile(file, read), read())
    file.write_text("keep_last = 2")
    await rig.service.reload_config()
    await until(lambda: versions(rig) == [3, 4])
    file.write_text("")
    await rig.service.reload_config()
    await save(rig, "a", 2)
    await at_rest(rig)
    assert versions(rig) == [3, 4, 5, 6]


async def test_a_prune_that_fails_is_logged_and_done_behind_the_next_version(
    open_rig: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failed = threading.Event()

    def fail(*_: Any, **__: Any) -> None:
        failed.set()
        raise StoreIoError("No.")

    async with open_rig(keep_last=1) as rig:
        with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
            patch.setattr(Store, "prune", fail)
            await saved(rig, ["a"], 2)
            await until(failed.is_set)
            await at_rest(rig)
        assert "retain of torpor://default/a failed, and is tried again in 0.05 s: store_io: No." in caplog.text
        assert versions(rig) == [1, 2]
        await save(rig, "a", 1)
        await until(lambda: versions(rig) == [3])


async def test_a_session_goes_on_bit_for_bit_whatever_was_pruned_behind_it(open_rig: Any, tmp_path: Path) -> None:
    went_on = []
    for rule in (None, 1):
        async with open_rig(store=tmp_path / f"keep-{rule}", keep_last=rule) as rig:
            await rig.read("a", tokens_of(5, 600), sampling=Sampling(temperature=0.9, seed=3))
            await save(rig, "a", 4)
            await at_rest(rig)
            await rig.sleep("a")
            assert (await rig.wake("a")).tokens_prefilled == 0
            went_on.append((await rig.fingerprint("a"), await rig.write("a", 8)))
    assert went_on[0] == went_on[1]


async def test_what_torpor_wrote_by_itself_goes_behind_a_later_version_and_nothing_else_does(
    open_rig: Any, store: Path
) -> None:
    async with open_rig(durability="turn", stop_within=0) as rig:
        await rig.read("a", tokens_of(1, 300))
        await save(rig, "a", 2)
        await rig.service.append("a", tokens=[2])
        assert list((await rig.service.close()).ledgers) == ["torpor://default/a"]
    async with open_rig(durability="turn") as rig, listening(rig) as heard:
        assert versions(rig) == [1, 2, 3]
        await save(rig, "a", 1)
        await until(lambda: versions(rig) == [1, 2, 4])
        await rig.service.append("a", tokens=[3])
        rig.service._parts.sessions.residency.awake.drop(rig.live("a").uri)  # as by a crash
        await rig.wake("a")
        assert versions(rig) == [1, 2, 4, 5]
        await save(rig, "a", 1)
        await until(lambda: versions(rig) == [1, 2, 4, 6])
        await at_rest(rig)
        assert await rig.write("a", 3)
    assert [told["versions"] for told in heard.of("versions_pruned")] == [1, 1]


async def test_at_the_start_what_the_last_sleeps_of_a_stop_took_over_goes(
    open_rig: Any, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_rig(durability="turn", stop_within=0) as rig:
        await saved(rig, ["a"], 1)
        await rig.service.append("a", tokens=[2])
        assert list((await rig.service.close()).ledgers) == ["torpor://default/a"]
    monkeypatch.setattr(Store, "drop_stand_ins", lambda *_: pytest.fail("the stop came first"))
    monkeypatch.setattr(Retaining, "look_again", lambda _: None)
    async with open_rig(durability="turn") as rig:
        await save(rig, "a", 1)
        assert versions(rig) == [1, 2, 3]
    monkeypatch.undo()
    async with open_rig(durability="turn") as rig:
        await until(lambda: versions(rig) == [1, 3])
        assert await rig.write("a", 3)
