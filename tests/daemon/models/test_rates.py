"""How fast the daemon reads and computes is measured in the work that it does, and kept for the next one."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from torpor.daemon.models.rates import RATE_NAMES, WINDOW, Measured
from torpor.memvid import Store
from torpor.memvid.folder.rates_file import MAX_SUBJECTS
from torpor.tests.daemon.session_rig import Rigged, tokens_of


@pytest.fixture
def measured(store: Path) -> Any:
    with Store.open(store, writable=True) as opened:
        yield Measured(opened)


async def test_rates_are_measured_in_what_is_done_anyway(rig: Rigged) -> None:
    assert all(getattr(rig.service.measured.of(rig.model), name) is None for name in RATE_NAMES)
    await rig.read("a", tokens_of(1, 300))
    after_reading = rig.service.measured.of(rig.model)
    assert after_reading.prefill is not None
    assert (after_reading.prefill.samples, after_reading.decode) == (1, None)
    await rig.write("a", 5)
    await rig.sleep("a")
    assert rig.service.measured.of(rig.model).fixed is None, "no wake, no rate"
    for times in (1, 2):
        await rig.wake("a")
        woken = rig.service.measured.of(rig.model)
        assert woken.decode.samples == 1
        assert (woken.restore.samples, woken.fixed.samples) == (times, times)
        await rig.sleep("a")


async def test_what_was_read_for_nothing_is_no_sample(rig: Rigged) -> None:
    await rig.service.create("a")
    rig.network.fail_at(1)
    with pytest.raises(Exception, match="the model broke"):
        await rig.service.append("a", tokens=tokens_of(1, 300))
    assert rig.service.measured.of(rig.model).prefill is None


async def test_a_wake_that_computes_is_no_sample_of_what_a_wake_takes_beside_reading(rig: Rigged) -> None:
    await rig.asleep("a", tokens_of(1, 300))
    await rig.wake("a", at_token=100)
    rates = rig.service.measured.of(rig.model)
    assert rates.fixed is None
    assert rates.restore.samples == 1


async def test_the_next_daemon_knows_what_this_one_has_measured(open_rig: Any) -> None:
    async with open_rig() as rig:
        await rig.read("a", tokens_of(1, 300))
        before = rig.service.measured.of(rig.model)
    async with open_rig() as rig:
        after = rig.service.measured.of(rig.model)
        assert after.prefill.seconds == pytest.approx(before.prefill.seconds)
        assert (after.prefill.samples, after.decode) == (1, None)
        elsewhere = dataclasses.replace(rig.model, backend={**rig.model.backend, "processor": "another"})
        assert rig.service.measured.of(elsewhere).prefill is None, "another machine's rates are not ours"


def test_one_sample_that_was_held_up_or_is_tiny_says_little(measured: Measured) -> None:
    model: Any = Model("a")
    for _ in range(6):
        measured.add(model, "prefill", 1000, 1.0)
    measured.add(model, "prefill", 1000, 500.0)
    measured.add(model, "prefill", 1000, 0.001)
    for _ in range(5):
        measured.add(model, "prefill", 1, 0.5)
    rate = measured.of(model).prefill
    assert rate is not None
    assert (rate.per_second, rate.samples) == (1000, 13)


def test_the_last_samples_count(measured: Measured) -> None:
    model: Any = Model("a")
    for seconds in [1.0] * WINDOW + [2.0] * WINDOW:
        measured.add(model, "decode", 10, seconds)
    rate = measured.of(model).decode
    assert rate is not None
    assert (rate.per_second, rate.samples) == (5, WINDOW)


def test_nothing_done_tells_nothing(measured: Measured) -> None:
    model: Any = Model("a")
    measured.add(model, "prefill", 0, 1.0)
    measured.add(model, "prefill", 5, float("nan"))
    assert measured.of(model).prefill is None
    measured.add(model, "prefill", 5, 0.0)
    assert measured.of(model).prefill is not None, "a clock that does not tick divides nothing by zero"


def test_models_are_measured_apart_and_only_so_many(measured: Measured) -> None:
    for number in range(MAX_SUBJECTS + 1):
        measured.add(_model(str(number)), "fixed", 1, number + 1.0)
    assert measured.of(_model("0")).fixed is None
    assert measured.of(_model("1")).fixed.seconds == 2.0


def test_what_cannot_be_kept_ends_nothing(measured: Measured, monkeypatch: pytest.MonkeyPatch) -> None:
    from torpor.memvid.errors import NoSpace

    def full(*_: object) -> None:
        raise NoSpace("The disk is full.")

    measured.add(_model("a"), "fixed", 1, 1.0)
    monkeypatch.setattr(measured._store, "save_rates", full)
    measured.save()


def _model(name: str) -> Any:
    return Model(name)


class Model:
    """As much of a model as a rate is of."""

    def __init__(self, name: str) -> None:
        self.identity = type("Identity", (), {"digest": name.encode()})
        self.backend = {"device": "cpu"}
