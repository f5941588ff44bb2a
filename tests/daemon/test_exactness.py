"""Promise 2: a woken session is bit for bit the one that slept, and the wake prefills nothing.

Each test compares with a control that has read and written the same and never slept (T11, BR26).
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torpor.daemon.api.sampling import Sampling
from torpor.tests.daemon import session_rig
from torpor.tests.daemon.session_rig import ROW, SAMPLED, Rigged, tokens_of
from torpor.tests.daemon.turns_rig import KINDS

GREEDY = Sampling()
SAMPLINGS = pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])


@pytest.mark.one_in(8)
@SAMPLINGS
@pytest.mark.parametrize("kind", KINDS)
async def test_a_session_goes_on_after_sleep_as_if_it_had_never_slept_t11(
    open_kind: Any, kind: str, sampling: Sampling
) -> None:
    async with open_kind(kind) as rig:
        for count in (1, 255, 256, 257, 511, 512, 513, 700):
            sleeper, control = f"sleeper-{count}", f"control-{count}"
            await rig.read_each((sleeper, control), tokens_of(count, count), sampling=sampling)
            before = await rig.fingerprint(sleeper)
            receipt = await rig.sleep(sleeper)
            assert receipt.token_count == count
            rig.network.reset()
            report = await rig.wake(sleeper)
            assert (report.tokens_prefilled, report.canary) == (0, "same_bits")
            assert rig.network.calls == [1], "the canary, which leaves no trace"
            assert await rig.fingerprint(sleeper) == before == await rig.fingerprint(control)
            assert await rig.write(sleeper, 16) == await rig.write(control, 16)
            assert await rig.fingerprint(sleeper) == await rig.fingerprint(control)


@pytest.mark.one_in(2)
@SAMPLINGS
async def test_many_rounds_of_sleep_change_nothing_t11(rig: Rigged, sampling: Sampling) -> None:
    await rig.read_each(("sleeper", "control"), tokens_of(1, 200), sampling=sampling)
    for round_, written in enumerate((1, 20, 30, 3, 45)):
        await rig.sleep_and_wake("sleeper")
        assert await rig.write("sleeper", written) == await rig.write("control", written), round_
        for name in ("sleeper", "control"):
            await rig.service.append(name, tokens=tokens_of(round_, 41))
        assert await rig.fingerprint("sleeper") == await rig.fingerprint("control"), round_


@pytest.mark.one_in(2)
async def test_a_cache_of_odd_capacity_wakes_exactly(rig: Rigged) -> None:
    """mlx-lm grows a partly filled cache to capacities that are no multiple of its step; a wake makes them even."""
    for name in ("sleeper", "control"):
        await rig.read(name, tokens_of(1, 300))
        await rig.service.append(name, tokens=tokens_of(2, 520))
    cache = rig.live("sleeper").state.caches[0]
    assert cache.keys.shape[2] % cache.step != 0
    await rig.sleep_and_wake("sleeper")
    assert rig.live("sleeper").state.caches[0].keys.shape[2] % cache.step == 0
    assert await rig.write("sleeper", 64) == await rig.write("control", 64)
    assert await rig.fingerprint("sleeper") == await rig.fingerprint("control")


async def test_a_request_wakes_a_session_by_itself_and_prefills_only_what_is_new(rig: Rigged) -> None:
    """#26676: what the model is asked to compute is counted, not believed."""
    await rig.read_each(("sleeper", "control"), tokens_of(1, 600))
    await rig.sleep("sleeper")
    rig.network.reset()
    first = await rig.service.generate("sleeper", max_tokens=5)
    assert rig.network.calls == [1] * 6, "the canary and what was asked for"
    assert first.prefilled_tokens == 0
    assert first.tokens == (await rig.service.generate("control", max_tokens=5)).tokens


async def test_the_wake_report_counts_what_the_model_computes(rig: Rigged) -> None:
    """#26676: the figure comes from the model calls on the woken state, so a wake that prefilled would say so."""
    await rig.read("a", tokens_of(1, 30))
    assert rig.live("a").state.computed_tokens == 30
    report = await rig.sleep_and_wake("a")
    assert (report.tokens_prefilled, rig.live("a").state.computed_tokens) == (0, 0)
    await rig.write("a", 4)
    assert rig.live("a").state.computed_tokens == 4


@pytest.mark.one_in(2)
async def test_a_second_sleep_writes_only_what_is_new(rig: Rigged) -> None:
    """Promise 5: full blocks are referred to; the unfinished last one, new ones and the state record are written."""
    first = await rig.asleep("a", tokens_of(1, 2 * 256 + 10))
    assert (first.blocks_new, first.blocks_reused) == (4, 0)
    await rig.write("a", 3)
    second = await rig.sleep("a")
    assert (second.blocks_new, second.blocks_reused) == (2, 2)
    block_bytes = 256 * ROW
    assert first.bytes_written > 2 * block_bytes > second.bytes_written
    assert second.parent == first.bundle_id
    assert second.token_count == first.token_count + 3
    await rig.write("a", 256)
    third = await rig.sleep("a")
    assert (third.blocks_new, third.blocks_reused) == (3, 2)
    assert third.logical_bytes > third.bytes_written


@pytest.mark.parametrize(("count", "rounds"), [(700, 3), (512, 1)], ids=["inside a block", "at its end"])
async def test_a_delta_sleep_after_a_wake_refers_to_the_full_blocks_that_the_wake_read(
    rig: Rigged, count: int, rounds: int
) -> None:
    await rig.read_each(("sleeper", "control"), tokens_of(1, count))
    await rig.sleep("sleeper")
    for _ in range(rounds):
        await rig.write("sleeper", 2)
        receipt = await rig.sleep("sleeper")
        assert (receipt.blocks_reused, receipt.blocks_new) == (2, 2)
    await rig.wake("sleeper")
    await rig.write("control", 2 * rounds)
    assert await rig.fingerprint("sleeper") == await rig.fingerprint("control")


async def test_changed_sampling_alone_makes_a_new_version_of_the_same_blocks(rig: Rigged) -> None:
    await rig.asleep("a", tokens_of(1, 512), sampling=SAMPLED)
    await rig.service.set("a", sampling=Sampling(temperature=GREEDY.temperature))
    receipt = await rig.sleep("a")
    assert (receipt.version, receipt.blocks_reused, receipt.blocks_new) == (2, 3, 0)
    await rig.wake("a")
    assert rig.live("a").sampling.temperature == GREEDY.temperature


@pytest.mark.one_in(2)
async def test_an_earlier_version_wakes_as_it_was(rig: Rigged) -> None:
    await rig.read_each(("sleeper", "control"), tokens_of(1, 600), sampling=SAMPLED)
    await rig.sleep("sleeper")
    await rig.write("sleeper", 40)
    await rig.sleep("sleeper")
    report = await rig.wake("sleeper", version=1)
    assert (report.version, report.token_count) == (1, 600)
    assert await rig.write("sleeper", 64) == await rig.write("control", 64)
    third = await rig.sleep("sleeper")
    assert (third.version, third.blocks_reused) == (3, 2)
    assert await rig.woken_fingerprint("sleeper") == await rig.fingerprint("control")


def in_another_process(verb: str, **order: Any) -> subprocess.Popen[str]:
    command = [sys.executable, session_rig.__file__, verb, json.dumps(order)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@pytest.mark.one_in(2)
@SAMPLINGS
async def test_a_session_goes_on_in_a_new_process_t11(
    open_rig: Any, store: Path, tiny_model: Path, digest_cache: Path, sampling: Sampling
) -> None:
    async with open_rig(store=store.with_name("control")) as control, open_rig() as rig:
        for each in (rig, control):
            await each.read("a", tokens_of(3, 700), sampling=sampling)
            await each.write("a", 20)
        receipt = await rig.sleep("a")
        await rig.service.close()
        order = {"store": str(store), "model": str(tiny_model), "digests": str(digest_cache)}
        process = in_another_process("wake", **order, session="a", count=64)
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 0
        found = json.loads(output)
        assert (found["tokens_prefilled"], found["calls"]) == (0, [1])
        expected = await control.fingerprint("a")
        assert found["woken"] == json.loads(json.dumps(vars_of(expected)))
        assert receipt.token_count == 720
        tokens, proofs, final = await control.write("a", 64)
        assert (found["tokens"], found["proofs"], found["final"]) == (list(tokens), list(proofs), final)


@pytest.mark.one_in(5)
async def test_an_acknowledged_sleep_survives_sigkill(
    open_rig: Any, store: Path, tiny_model: Path, digest_cache: Path
) -> None:
    """Promise 1, threat 27: the process that slept is killed before it can close anything."""
    order = {"store": str(store), "model": str(tiny_model), "digests": str(digest_cache), "session": "a"}
    tokens = tokens_of(5, 513)
    process = in_another_process("sleep", **order, tokens=tokens, count=10, sampling=SAMPLED.to_map())
    assert process.stdout is not None
    bundle_id = json.loads(process.stdout.readline())["bundle_id"]
    process.kill()
    process.communicate()
    async with open_rig() as rig:
        await rig.read("control", tokens, sampling=SAMPLED)
        await rig.write("control", 10)
        assert (await rig.wake("a")).bundle_id == bundle_id
        assert await rig.write("a", 64) == await rig.write("control", 64)
        assert await rig.fingerprint("a") == await rig.fingerprint("control")


def vars_of(fingerprint: session_rig.Fingerprint) -> dict[str, Any]:
    return {name: getattr(fingerprint, name) for name in fingerprint.__slots__}
