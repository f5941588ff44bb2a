"""A running daemon takes over what its file says, all of it or nothing."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from torpor.daemon.api.process import ConfigInfo
from torpor.daemon.config.configuring import ConfigFile
from torpor.daemon.config.settings import settings_of
from torpor.daemon.engine.buffers import CACHED_SHARE
from torpor.daemon.errors import InvalidConfiguration, UnknownModel
from torpor.daemon.memory import loading
from torpor.daemon.models.models import LoadedModel
from torpor.daemon.options.serve_options import ServeOptions
from torpor.daemon.service import Service
from torpor.daemon.sessions.sessions import Session
from torpor.daemon.upkeep import unloading
from torpor.tests.daemon.session_rig import SAMPLED, Rigged, listening, tokens_of, until

import mlx.core as mx  # isort: skip  # after torpor, which chooses the BLAS

Followed = Callable[..., Any]


@pytest.fixture
def followed(store: Path, tmp_path: Path, tiny_model: Path, another_model: Path, digest_cache: Path) -> Followed:
    """Opens a service that keeps to a file; `write` of what it gives changes the file, and has it read anew. In a text
    ONE and TWO stand for folders of models."""
    file = tmp_path / "torpor.toml"

    def write(text: str) -> None:
        file.write_text(text.replace("ONE", str(tiny_model)).replace("TWO", str(another_model)))

    @asynccontextmanager
    async def opener(text: str, **given: Any) -> AsyncIterator[tuple[Rigged, Callable[[str], None]]]:
        write(text)
        kept = {"store": store, "config": file, "prefix_reuse": "off", "batch": 1, "scrub_rate": 0, **given}
        settings = settings_of(kept)
        service = await Service.open(settings.options, models=settings.models, digest_cache=digest_cache)
        service.follow(ConfigFile(file, lambda: settings_of(kept)), settings)
        readings = []

        def change(text: str) -> None:
            write(text)
            readings.append(asyncio.ensure_future(service.reload_config()))

        try:
            yield Rigged(service, {}), change
        finally:
            await asyncio.gather(*readings)
            await service.close()

    return opener


async def config(rig: Rigged) -> ConfigInfo:
    info = (await rig.service.status()).config
    assert info is not None
    return info


async def taken_over(rig: Rigged, times: int = 1) -> None:
    configuring = rig.service._parts.config
    assert configuring is not None
    await until(lambda: configuring.info().reloads == times)


async def refused(rig: Rigged, word: str) -> None:
    configuring = rig.service._parts.config
    assert configuring is not None
    await until(lambda: word in (configuring.info().problem or ""))


def next_idle_sleep(rig: Rigged) -> float | None:
    (state,) = (each for each in rig.service._parts.upkeep.loop.states() if each.name == "idle sleep")
    found: float | None = state.next
    return found


def served(rig: Rigged) -> list[str]:
    return [place.name for place in rig.service._parts.models.shelf.places.values()]


def cannot_sleep(rig: Rigged, name: str, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """From now on a session cannot be put to sleep, until the event is set."""
    may_sleep, put_away = threading.Event(), rig.service._parts.sessions.residency.putting_away.put_away

    async def failing(live: Session, *args: Any, **how: Any) -> object:
        if live.uri.name == name and not may_sleep.is_set():
            raise OSError("no disk")
        return await put_away(live, *args, **how)

    monkeypatch.setattr(rig.service._parts.sessions.residency.putting_away, "put_away", failing)
    return may_sleep


async def test_models_and_policies_of_the_file_are_those_of_the_daemon(followed: Followed) -> None:
    text = 'memory_budget = "64MiB"\nidle_sleep = 60\nmax_waiting = 7\n[models.one]\npath = "ONE"\npin = true\n'
    text += '[models.two]\npath = "TWO"\nttl = 5'
    async with followed(text) as (rig, _):
        status = await rig.service.status()
        assert [(model.name, model.resident, model.pinned, model.ttl_s) for model in status.models] == [
            ("one", True, True, None),
            ("two", False, False, 5.0),
        ]
        assert status.memory.budget_bytes == 64 << 20
        assert status.queue.limit == 7
        assert (await config(rig)).problem is None


async def test_a_changed_file_adds_changes_and_removes_models(
    followed: Followed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unloading, "LEAVING_S", 0.02)
    async with followed('[models.one]\npath = "ONE"') as (rig, write):
        await rig.read("a", tokens_of(1, 50), sampling=SAMPLED)
        write('[models.one]\npath = "ONE"\npin = true\n[models.two]\npath = "TWO"\nload = "start"')
        await taken_over(rig)
        await until(lambda: rig.service._parts.models.shelf.places["two"].model is not None)
        (one, _) = (await rig.service.status()).models
        assert (one.pinned, one.loads, rig.is_awake("a")) == (True, 1, True), "what stays is not touched"
        async with rig.service._parts.sessions.residency.turn(rig.live("a").uri):
            write('[models.two]\npath = "TWO"')
            await taken_over(rig, 2)
            assert (await rig.service.status()).models[1].problem, "it is in use, and goes later"
            with pytest.raises(UnknownModel):
                await rig.service.create("b", model="one")
            assert (await rig.service.create("b")).model == "two"
        await until(lambda: served(rig) == ["two"])
        assert not rig.is_awake("a"), "it sleeps"
        with pytest.raises(UnknownModel):
            await rig.wake("a")
        write('[models.two]\npath = "TWO"\n[models.one]\npath = "ONE"')
        await taken_over(rig, 3)
        await rig.wake("a")


async def test_a_model_answers_to_its_aliases_and_its_own_name_holds_over_them(followed: Followed) -> None:
    models = '[models.one]\npath = "ONE"\n[models.two]\npath = "TWO"\n'
    async with followed(models + '[aliases]\n"on*" = "two"\n"o?e*" = "one"') as (rig, write):
        made = [await rig.service.create(f"s{at}", model=name) for at, name in enumerate(("one", "one-9"))]
        assert [each.model for each in made] == ["one", "two"], "the first alias that fits"
        with pytest.raises(UnknownModel):
            await rig.service.create("b", model="ONE-9")
        write(models + '[aliases]\n"one-9" = "one"')
        await taken_over(rig)
        hello = ({"role": "user", "content": "hello"},)
        assert (await rig.service.measure("c", messages=hello, model="one-9")).model == "one"
        assert (await rig.service.status()).aliases == (("one-9", "one"),)


async def test_how_many_may_wait_changes_at_once(followed: Followed) -> None:
    async with followed('max_waiting = 7\n[models.one]\npath = "ONE"') as (rig, write):
        for at, (line, limit) in enumerate([("max_waiting = 2", 2), ("", ServeOptions.max_waiting)], start=1):
            write(f'{line}\n[models.one]\npath = "ONE"')
            await taken_over(rig, at)
            assert (await rig.service.status()).queue.limit == limit


async def test_a_wrong_file_is_refused_whole_and_told_until_a_right_one_comes(followed: Followed) -> None:
    async with followed('memory_budget = "64MiB"\n[models.one]\npath = "ONE"') as (rig, write):
        for wrong, word in [
            ('memory_budget = "32MiB"\n[models.one]\npath = "ONE"\npinn = true', "pinn"),
            ('memory_budget = 99\n[models.one]\npath = "ONE"\n[models.two]\npath = "/nowhere"', "model_unavailable"),
            ('memory_budget = 10\n[models.one]\npath = "ONE"\npin = true', "memory_budget_exceeded"),
        ]:
            write(wrong)
            await refused(rig, word)
            assert (await rig.service.status()).memory.budget_bytes == 64 << 20
            assert served(rig) == ["one"]
        write('memory_budget = "32MiB"\n[models.one]\npath = "ONE"')
        await taken_over(rig)
        assert (await config(rig)).problem is None
        assert (await rig.service.status()).memory.budget_bytes == 32 << 20


async def test_a_reading_that_fails_unforeseen_is_told_and_the_next_one_counts(
    followed: Followed, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("unforeseen")

    async with followed('[models.one]\npath = "ONE"') as (rig, write):
        with monkeypatch.context() as patched:
            patched.setattr("torpor.daemon.config.configuring.require_models_fit", fail)
            write('[models.one]\npath = "ONE"\npin = true')
            await refused(rig, "unforeseen")
        write('[models.one]\npath = "ONE"\npin = true')
        await taken_over(rig)
        assert (await config(rig)).problem is None


async def test_a_budget_that_no_model_in_memory_fits_into_is_refused(followed: Followed) -> None:
    async with followed('[models.one]\npath = "ONE"') as (rig, write):
        await rig.read("a", tokens_of(1, 50))
        budget = (await rig.service.status()).memory.budget_bytes
        write('memory_budget = "64KiB"\n[models.one]\npath = "ONE"')
        await until(lambda: rig.service._parts.config.info().problem is not None)
        assert (await rig.service.status()).memory.budget_bytes == budget
        assert rig.is_awake("a")


async def test_a_smaller_budget_puts_to_sleep_what_no_longer_fits(followed: Followed) -> None:
    async with followed('memory_budget = "64MiB"\n[models.one]\npath = "ONE"') as (rig, write):
        await rig.read_each("abc", tokens_of(1, 50))
        told = (await rig.service.status()).memory
        budget = told.weights_bytes + told.sessions_bytes // 2
        write(f'memory_budget = {budget}\n[models.one]\npath = "ONE"')
        await until(lambda: [rig.is_awake(name) for name in "abc"] == [False, False, True])
        await until(lambda: rig.service._parts.models.memory._evicting is None)
        assert (await rig.service.status()).memory.budget_bytes == budget
        await taken_over(rig)
        bound = await rig.service._parts.models.engine.call(lambda: mx.set_cache_limit(0))
        assert bound == (budget - told.weights_bytes) // CACHED_SHARE


async def test_idle_sleep_and_the_policy_of_changes_are_taken_over(followed: Followed) -> None:
    async with followed('[models.one]\npath = "ONE"') as (rig, write):
        await rig.read("a", tokens_of(1, 50))
        write('idle_sleep = 0.05\non_model_change = "reload"\n[models.one]\npath = "ONE"')
        await until(lambda: not rig.is_awake("a"))
        assert rig.service._parts.options.on_model_change == "reload"
        write('[models.one]\npath = "ONE"')
        await taken_over(rig, 2)
        await until(lambda: next_idle_sleep(rig) is None)


async def test_who_listens_is_told_what_became_of_a_changed_file(followed: Followed) -> None:
    async with followed('[models.one]\npath = "ONE"') as (rig, write), listening(rig) as heard:
        write('[models.one]\npath = "ONE"\npinn = true')
        await refused(rig, "pinn")
        write('store_budget = "1GiB"\n[models.one]\npath = "ONE"')
        await taken_over(rig)
        await until(lambda: bool(heard.of("configuration_taken_over")))
        assert heard.of("configuration_refused") == [{"code": InvalidConfiguration.code}]
        assert heard.of("configuration_taken_over") == [{"waiting": 1}]


async def test_what_takes_a_restart_is_said_and_the_command_line_holds_over_the_file(followed: Followed) -> None:
    async with followed('[models.one]\npath = "ONE"', memory_budget=32 << 20) as (rig, write):
        write('store_budget = "1GiB"\nmemory_budget = "64MiB"\n[models.one]\npath = "ONE"')
        await taken_over(rig)
        assert (await config(rig)).waits_for_restart == ("store_budget",)
        assert (await rig.service.status()).memory.budget_bytes == 32 << 20


async def test_a_memory_budget_that_the_file_names_no_more_holds_until_a_restart_and_that_is_said(
    followed: Followed,
) -> None:
    async with followed('memory_budget = "64MiB"\n[models.one]\npath = "ONE"') as (rig, write):
        write('[models.one]\npath = "ONE"')
        await taken_over(rig)
        assert (await config(rig)).waits_for_restart == ("memory_budget",)
        assert (await rig.service.status()).memory.budget_bytes == 64 << 20
        write('memory_budget = "64MiB"\n[models.one]\npath = "ONE"')
        await taken_over(rig, 2)
        assert (await config(rig)).waits_for_restart == ()


async def test_a_model_that_is_to_be_loaded_from_elsewhere_is_so_when_nobody_uses_it(
    followed: Followed, another_model: Path
) -> None:
    async with followed('[models.one]\npath = "ONE"') as (rig, write):
        first = (await rig.service.status()).models[0].identity
        write('[models.one]\npath = "TWO"')
        await until(lambda: rig.service._parts.models.shelf.places["one"].model is None)
        (one,) = (await rig.service.status()).models
        assert (one.resident, one.identity, one.path) == (False, None, str(another_model)), (
            "what it was is not told of it"
        )
        await rig.service.create("a")
        (one,) = (await rig.service.status()).models
        assert (one.path, one.identity != first) == (str(another_model.resolve()), True)


@pytest.mark.one_in(1)
async def test_a_model_that_is_brought_back_while_it_is_still_in_use_stays(followed: Followed) -> None:
    async with followed('[models.one]\npath = "ONE"') as (rig, write):
        await rig.read("a", tokens_of(1, 50))
        async with rig.service._parts.sessions.residency.turn(rig.live("a").uri):
            write('[models.two]\npath = "TWO"')
            await taken_over(rig)
            write('[models.one]\npath = "ONE"')
            await taken_over(rig, 2)
        assert (await rig.service.create("b")).model == "one"
        await until(lambda: served(rig) == ["one"])  # the other one may be loading still
        assert (await rig.service.status()).models[0].loads == 1


async def test_what_the_file_says_holds_whether_a_model_that_it_drops_can_be_unloaded_or_not(
    followed: Followed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unloading, "LEAVING_S", 0.02)
    async with followed('memory_budget = "64MiB"\n[models.one]\npath = "ONE"') as (rig, write):
        await rig.read_own("ac", 50)
        may_sleep = cannot_sleep(rig, "a", monkeypatch)
        write('memory_budget = "32MiB"\nidle_sleep = 60\n[models.two]\npath = "TWO"')
        await taken_over(rig)
        status = await rig.service.status()
        assert status.memory.budget_bytes == 32 << 20
        await until(lambda: next_idle_sleep(rig) is not None)
        assert (await rig.service.create("b")).model == "two"
        await until(lambda: rig.service._parts.models.shelf.places["one"].stays_for is not None)
        told = await config(rig)
        assert (told.problem, told.waits_for_disuse, served(rig)) == (None, ("one",), ["two", "one"])
        one = (await rig.service.status()).models[1]
        assert "torpor://default/a cannot be put to sleep (OSError: no disk)" in (one.problem or "")
        await until(lambda: [rig.is_awake(name) for name in "ac"] == [True, False])  # it keeps no other from it
        may_sleep.set()
        await until(lambda: served(rig) == ["two"])
        assert ((await config(rig)).waits_for_disuse, rig.is_awake("a")) == ((), False)


async def test_a_model_in_use_that_is_to_be_loaded_from_elsewhere_is_so_after_its_last_use_and_told_until_then(
    followed: Followed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unloading, "LEAVING_S", 0.02)
    async with followed('[models.one]\npath = "ONE"') as (rig, write):
        await rig.read("a", tokens_of(1, 50))
        first = rig.live("a").model.identity
        async with rig.service._parts.sessions.residency.turn(rig.live("a").uri):
            write('[models.one]\npath = "TWO"')
            await taken_over(rig)
            assert (await config(rig)).waits_for_disuse == ("one",)
            assert "once it is not in use" in ((await rig.service.status()).models[0].problem or "")
        await until(lambda: rig.service._parts.models.shelf.places["one"].model is None)
        assert (await config(rig)).waits_for_disuse == ()
        await rig.service.create("b")
        assert rig.live("b").model.identity != first
        assert (await rig.service.status()).models[0].problem is None


async def test_a_model_that_comes_while_the_file_changes_where_from_is_not_taken_for_the_new_one(
    followed: Followed, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_go_on, begun, sources = threading.Event(), threading.Event(), []

    def held(name: str, source: str, *args: Any) -> LoadedModel:
        sources.append(Path(source).name)
        begun.set()
        assert may_go_on.wait(30)
        return load(name, source, *args)

    load = loading.load_model
    monkeypatch.setattr(loading, "load_model", held)
    monkeypatch.setattr(unloading, "LEAVING_S", 0.02)
    async with followed('[models.one]\npath = "ONE"\nload = "use"') as (rig, write):
        asked = asyncio.ensure_future(rig.service.load_model(model="one"))
        await until(begun.is_set)
        write('[models.one]\npath = "TWO"\nload = "use"')
        await taken_over(rig)
        may_go_on.set()
        await asked
        await until(lambda: rig.service._parts.models.shelf.places["one"].model is None)
        await rig.service.load_model(model="one")
        assert sources == ["tiny", "another"]


async def test_a_time_without_use_that_comes_with_the_file_holds_from_then_on(followed: Followed) -> None:
    async with followed('[models.one]\npath = "ONE"') as (rig, write):
        write('[models.one]\npath = "ONE"\nttl = 0.05')
        await until(lambda: rig.service._parts.models.shelf.places["one"].model is None)


async def test_asking_for_it_reads_the_file_anew_and_one_at_a_time(followed: Followed) -> None:
    async with followed('[models.one]\npath = "ONE"') as (rig, _):
        await asyncio.gather(*(rig.service.reload_config() for _ in range(3)))
        assert (await config(rig)).reloads == 3
        await rig.service.create("a")
        await rig.service.append("a", tokens=tokens_of(1, 5))
