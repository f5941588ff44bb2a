"""The simulation of many machines: small cases computed by hand, sums that hold, and the same by the same seed.

How far it agrees with real daemons is measured by `bench/simulate.py`, as that takes minutes.
"""

from __future__ import annotations

import dataclasses
import random
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torpor.snapshot  # noqa: F401  # chooses the BLAS before MLX is imported

BENCH = Path(__file__).resolve().parents[2] / "bench"

sys.path.insert(0, str(BENCH))
try:
    import scale_page
    import stated
    import two_replicas
    from simulated import Clock, Engine, Line, Session, Simulation
    from traffic import Agents
finally:
    sys.path.remove(str(BENCH))

RATES = stated.Rates(
    "by hand",
    token_bytes=10,
    memory_bytes=20_000,
    disk_bytes=10**9,
    turn_s=1.0,
    read_s=0.01,
    read_context_s=0.0,
    write_s=0.1,
    write_row_s=0.1,
    write_context_s=0.0,
    wake_s=2.0,
    wake_bytes_s=1_000.0,
    sleep_s=0.5,
    sleep_bytes_s=1_000.0,
    ask_s=0.25,
    fetch_s=1.0,
    fetch_bytes_s=500.0,
    send_s=1.0,
    send_bytes_s=2_000.0,
)


def simulation(machines: int = 2, **settings: float) -> Simulation:
    return Simulation(RATES, stated.Settings(idle_s=float("inf"), **settings), machines)


def turn(of: Simulation, session: Session, machine: int, read: int, write: int) -> float:
    """A turn with nothing beside it; seconds to its end."""
    begun_s, ends = of.clock.now_s, []
    of.turn(session, of.machines[machine], read, write, lambda: ends.append(of.clock.now_s))
    of.clock.run()
    return float(ends[0] - begun_s)


def firsts(of: Simulation, found: str) -> list[float]:
    return of.told.first_s[found]


# --- by hand


def test_a_new_session_is_taken_and_read_and_written() -> None:
    of = simulation()
    seconds = turn(of, Session(), 0, read=100, write=10)
    assert firsts(of, "new") == pytest.approx([0.25 + 1.0 + 1.0])
    assert seconds == pytest.approx(2.25 + 10 * 0.2)


def test_two_texts_share_the_engine_and_what_is_written_beside_one_has_half() -> None:
    clock, ends = Clock(), {}
    engine = Engine(clock, RATES)
    engine.read(10.0, lambda: ends.setdefault("one", clock.now_s))
    engine.read(10.0, lambda: ends.setdefault("other", clock.now_s))
    clock.run()
    assert ends == pytest.approx({"one": 20.0, "other": 20.0})
    engine.read(10.0, lambda: ends.setdefault("text", clock.now_s - 20.0))
    engine.write(100, 0.1, lambda: ends.setdefault("answer", clock.now_s - 20.0))  # 20 seconds alone
    clock.run()
    assert ends["text"] == pytest.approx(20.0)
    assert ends["answer"] == pytest.approx(30.0)
    begun_s = clock.now_s
    for name in ("one", "other"):
        engine.read(10.0, lambda name=name: ends.update({name: clock.now_s - begun_s}))
    engine.write(100, 0.1, lambda: ends.update(answer=clock.now_s - begun_s))
    clock.run()
    assert ends == pytest.approx({"one": 30.0, "other": 30.0, "text": 20.0, "answer": 40.0}), "each has a third"


def test_a_session_wakes_from_the_disk_where_it_slept_and_is_fetched_elsewhere() -> None:
    of, session = simulation(), Session()
    turn(of, session, 0, read=990, write=10)  # 1,000 tokens are 10,000 bytes
    of.sleep(session)
    of.clock.at(1_000.0, lambda: None)
    of.clock.run()
    turn(of, session, 0, read=100, write=1)
    assert firsts(of, "disk") == pytest.approx([0.25 + 2.0 + 10.0 + 1.0 + 1.0])
    of.sleep(session)
    of.clock.at(2_000.0, lambda: None)
    of.clock.run()
    turn(of, session, 1, read=100, write=1)
    tokens = 1_101
    fetched = 1.0 + 10 * tokens / 500 + 2.0 + 10 * tokens / 1_000
    assert firsts(of, "remote") == pytest.approx([fetched + 1.0 + 1.0])
    assert of.told.came_bytes == 10 * tokens
    assert of.told.sent_bytes == 10 * (768 + 232 + 1_101 - 768), "a block that is not full is sent again"


def test_a_session_that_is_awake_elsewhere_comes_once_its_holder_has_learned_of_it() -> None:
    of, session = simulation(lease_s=30.0), Session()
    turn(of, session, 0, read=90, write=10)
    of.clock.at(session.used_s + 100.0, lambda: None)
    of.clock.run()
    begun_s, sent_s = of.clock.now_s, session.used_s + 5.0
    turn(of, session, 1, read=100, write=1)
    renewal_s = next(at for at in (sent_s + 10.0 * number for number in range(1, 100)) if at > begun_s)
    free_s = renewal_s + 0.5 + 1.0 + 1.0 + 1_000 / 2_000 + 0.25  # it sleeps, is sent, and is let go
    looks = -(-(free_s - begun_s) // stated.LOOK_S)
    ready_s = looks * stated.LOOK_S + 0.25 + (1.0 + 2.0) + (2.0 + 1.0)
    assert firsts(of, "remote") == pytest.approx([ready_s + 1.0 + 1.0])
    assert of.told.acts["ask"] == 1


@pytest.mark.parametrize(("idle_s", "turns_s", "told_s"), [(6.0, 99.0, 6.0), (99.0, 3.0, 3.0), (99.0, 99.0, 20.0)])
def test_its_holder_learns_of_it_by_what_comes_first(idle_s: float, turns_s: float, told_s: float) -> None:
    """Its own sleep, turns that it sends, or the renewal."""
    of, session = Simulation(RATES, stated.Settings(lease_s=60.0, turns_s=turns_s, idle_s=idle_s), 2), Session()
    turn(of, session, 0, read=90, write=10)
    ended_s = of.clock.now_s
    session.renewed_s = ended_s
    of.clock.at(ended_s + 1.0, lambda: None)
    of.clock.run()
    turn(of, session, 1, read=100, write=1)
    free_s = told_s - 1.0 + 0.5 + 1.0 + 1.0 + 1_000 / 2_000 + 0.25
    looks = -(-free_s // stated.LOOK_S)
    assert firsts(of, "remote") == pytest.approx([looks * stated.LOOK_S + 0.25 + 3.0 + 3.0 + 2.0])


def test_what_fills_no_block_is_fetched_again() -> None:
    of, session = simulation(), Session()
    turn(of, session, 0, read=290, write=10)
    for machine in (1, 0):
        of.sleep(session)
        of.clock.at(of.clock.now_s + 100.0, lambda: None)
        of.clock.run()
        turn(of, session, machine, read=9, write=1)
    assert of.told.came_bytes == 10 * (300 + 310 - 256)


def test_what_was_used_longest_ago_sleeps_for_what_needs_its_memory() -> None:
    of = simulation(1)
    sessions = [Session() for _ in range(3)]
    for session in sessions[:2]:
        turn(of, session, 0, read=890, write=10)
    turn(of, sessions[0], 0, read=90, write=10)
    turn(of, sessions[2], 0, read=890, write=10)
    assert [session.awake_at is not None for session in sessions] == [True, False, True]


def test_a_turn_waits_while_another_has_the_memory_and_then_for_its_sleep() -> None:
    of, ends = simulation(1), []
    for _ in range(2):
        of.turn(Session(), of.machines[0], 1_400, 10, lambda: ends.append(of.clock.now_s))
    of.clock.run()
    alone_s, sleep_s = 0.25 + 15.0 + 2.0, 0.5 + 10 * (1_410 - 5 * 256) / 1_000
    assert ends == pytest.approx([alone_s, alone_s + sleep_s + alone_s])


def test_a_disk_without_room_lets_go_what_was_used_longest_ago_and_fetches_it_back() -> None:
    of = Simulation(dataclasses.replace(RATES, disk_bytes=15_000), stated.Settings(), 1)
    first, other = Session(), Session()
    for session in (first, other):
        turn(of, session, 0, read=990, write=10)
        of.sleep(session)
    of.clock.run()
    assert of.machines[0].disk_bytes == 10_000
    turn(of, first, 0, read=100, write=1)
    assert of.told.found == {"new": 2, "remote": 1}
    assert of.told.came_bytes == 10_000


def test_a_session_is_placed_where_it_is_awake_then_where_its_bytes_are_then_where_nothing_waits() -> None:
    of, session = simulation(3), Session()
    of.machines[0].engine.read(1.0, lambda: None)
    assert of.place(session, 10) is of.machines[1]
    turn(of, session, 2, read=500, write=12)
    assert of.place(session, 10) is of.machines[2]
    of.sleep(session)
    of.clock.run()
    assert of.place(session, 10) is of.machines[2]
    of.machines[2].engine.read(1_000.0, lambda: None)
    assert of.place(session, 10) is not of.machines[2]


def test_a_lease_is_renewed_three_times_in_it_and_every_change_of_the_head_renews_it() -> None:
    of, session = simulation(lease_s=60.0), Session()
    turn(of, session, 0, read=90, write=10)
    of.clock.at(session.used_s + 605.0, lambda: None)
    of.clock.run()
    of.settle([session])
    assert of.told.acts["turn"] == 1, "it is sent five seconds behind its end"
    assert of.told.acts["renewal"] == 30, "the first of them 20 seconds behind that"


# --- laws of queues


def gaps(rate: float, count: int = 40_000, seed: int = 1) -> list[float]:
    chance = random.Random(seed)
    return [chance.expovariate(rate) for _ in range(count)]


def even(mean: float) -> Callable[[], float]:
    return lambda: mean


def drawn(mean: float) -> Callable[[], float]:
    chance = random.Random(2)
    return lambda: chance.expovariate(1 / mean)


@pytest.mark.parametrize("load", [0.3, 0.7])
@pytest.mark.parametrize(("service", "share"), [(even, 0.5), (drawn, 1.0)])
def test_a_line_waits_as_m_d_1_and_m_m_1(
    load: float, service: Callable[[float], Callable[[], float]], share: float
) -> None:
    """Pollaczek and Khinchine: the wait is load / (1 - load) services, and half of that where all are alike."""
    line, seconds, now_s, waits = Line(), service(1.0), 0.0, []
    for gap in gaps(load):
        now_s += gap
        waits.append(line.wait_s(now_s))
        line.takes(now_s, seconds())
    assert sum(waits) / len(waits) == pytest.approx(share * load / (1 - load), rel=0.1)
    assert line.busy_s / now_s == pytest.approx(load, rel=0.03)


@pytest.mark.parametrize("load", [0.3, 0.7])
@pytest.mark.parametrize("service", [even, drawn])
def test_texts_share_an_engine_as_m_g_1_ps(load: float, service: Callable[[float], Callable[[], float]]) -> None:
    """A text takes 1 / (1 - load) times its own seconds, however these are spread."""
    clock, seconds, took = Clock(), service(1.0), list[float]()
    engine, arrived_s = Engine(clock, RATES), 0.0

    def arrives() -> None:
        begun_s = clock.now_s
        engine.read(seconds(), lambda: took.append(clock.now_s - begun_s))

    for gap in gaps(load, 10_000):
        clock.at(arrived_s := arrived_s + gap, arrives)
    clock.run()
    assert sum(took) / len(took) == pytest.approx(1 / (1 - load), rel=0.1)
    assert engine.settle() / clock.now_s == pytest.approx(load, rel=0.03)


def test_answers_share_an_engine_as_m_m_1_ps() -> None:
    """Where a round takes what its rows take, sessions that write share the time as texts do."""
    clock, chance, took = Clock(), random.Random(3), list[float]()
    rates = dataclasses.replace(RATES, write_s=0.0)
    engine, arrived_s = Engine(clock, rates), 0.0

    def arrives() -> None:
        begun_s = clock.now_s
        engine.write(1 + int(chance.expovariate(1 / 100)), 0.01, lambda: took.append(clock.now_s - begun_s))

    for gap in gaps(0.6, 10_000):
        clock.at(arrived_s := arrived_s + gap, arrives)
    clock.run()
    load = engine.settle() / clock.now_s
    assert sum(took) / len(took) == pytest.approx(1.005 / (1 - load), rel=0.1)


def test_new_sessions_wait_for_an_engine_as_m_d_1_ps() -> None:
    """The whole of a turn to its first token: one request of the remote, then its share of the engine."""
    rates = dataclasses.replace(RATES, write_s=0.0, write_row_s=1e-4, memory_bytes=10**9)
    of, load, arrived_s = Simulation(rates, stated.Settings(idle_s=float("inf")), 1), 0.6, 0.0
    for gap in gaps(load / 2.0, 6_000):  # reading takes 2 s
        arrived_s += gap
        of.clock.at(arrived_s, lambda: of.turn(Session(), of.machines[0], 100, 1, lambda: None))
    of.clock.run()
    seconds = firsts(of, "new")
    assert sum(seconds) / len(seconds) == pytest.approx(0.25 + 2.0 / (1 - load), rel=0.1)


@pytest.mark.parametrize("points", [stated.HUMAN, stated.TOOL])
def test_waits_are_drawn_with_the_quantiles_that_were_stated(points: tuple[tuple[float, float], ...]) -> None:
    chance = random.Random(4)
    waits = sorted(stated.drawn_between(chance, points) for _ in range(20_000))
    for at, seconds in points[1:-1]:
        assert waits[int(at * len(waits))] == pytest.approx(seconds, rel=0.25)


# --- sums, and seeds


def run(seed: int, *, keeps: bool = True) -> Simulation:
    of = Simulation(stated.h100(), stated.Settings(), 2, keeps=keeps)
    Agents(of, daily=400.0, seed=seed).run(600.0, 3_600.0)
    return of


def test_a_run_is_the_same_by_the_same_seed_and_another_by_another() -> None:
    one = run(1).told
    assert one == run(1).told
    assert one != run(2).told


def test_the_sums_hold() -> None:
    of = run(1)
    told = of.told
    assert told.turns == sum(told.found.values()) > 100
    assert 0 <= told.turns - len(told.firsts) < 50, "those that wait at the ends"
    asked = [
        sum(stated.REQUESTS[act][at] * count for act, count in told.acts.items() if act != "strip") for at in (0, 1)
    ]
    parts = [told.sent_bytes / stated.PART_BYTES, told.came_bytes / stated.PIECE_BYTES]
    for kind, least, more in zip(("writes", "reads"), asked, parts, strict=True):
        assert (
            least
            <= told.requests[kind]
            <= least + more + 2 * told.acts["version"] + told.acts["wake"] + told.acts["look"]
        )
    for machine in of.machines:
        assert machine.idle_bytes == sum(each.tokens for each in machine.idle) * of.rates.token_bytes
        assert machine.busy_bytes >= 0
        assert machine.disk_bytes == of.rates.token_bytes * sum(each.on_disk[machine.number] for each in machine.stored)


def test_where_nothing_is_kept_nothing_is_asked_of_the_remote_and_all_is_read_again() -> None:
    told = run(1, keeps=False).told
    assert not told.requests
    assert told.found.keys() <= {"new", "awake", "read again"}


# --- the rates of two daemons


def test_rates_that_turns_were_made_with_are_found_in_them() -> None:
    """A turn that other work made long moves them little."""
    token_bytes = two_replicas.demo_shape().token_bytes
    made = dataclasses.replace(
        RATES, token_bytes=token_bytes, turn_s=0.02, read_s=2e-4, read_context_s=2e-7, write_s=0.0, write_row_s=5e-3,
        write_context_s=1e-6, ask_s=0.01, wake_s=0.02, fetch_s=0.03, fetch_bytes_s=2e8, send_s=0.04, send_bytes_s=1e8,
        sleep_s=0.01,
    )  # fmt: skip
    part = two_replicas.Part()
    ways = {"new": 0.0, "awake": 0.0, "disk": made.ask_s + made.wake_s}
    for number in range(60):
        found, tokens, read, write = (
            ("new", "awake", "disk", "remote")[number % 4],
            70 * number,
            40 + 97 * number % 700,
            9,
        )
        tokens *= found != "new"
        wake_s = ways.get(found, made.fetch_s + tokens * token_bytes / made.fetch_bytes_s + made.wake_s)
        first_s = wake_s + made.turn_s + made.ask_s * (found == "new") + made.reading_s(read, tokens)
        rest_s = write * made.row_s(tokens + read)
        first_s += 2.0 * (number == 33)
        done = two_replicas.Done(two_replicas.Turn("s", 0, read, write), found, tokens, write, wake_s, first_s, rest_s)
        part.done.append(done)
        part.slept.append(
            two_replicas.Slept(made.sleep_s, made.send_s + 1e5 * number / made.send_bytes_s, 100_000 * number)
        )
    rates = two_replicas.rates_of([part])
    names = "turn_s read_s read_context_s write_row_s ask_s wake_s fetch_s fetch_bytes_s send_s send_bytes_s sleep_s"
    for name in names.split():
        assert getattr(rates, name) == pytest.approx(getattr(made, name), rel=0.1), name
    paces = two_replicas.paces_of(part, made)
    assert sorted(paces)[:-1] == pytest.approx([1.0] * 59)


# --- what is told of it


def test_each_number_that_nobody_assumed_has_a_source() -> None:
    assert all(each.source for each in stated.STATED.values() if each.kind != "assumed")


def test_a_page_has_its_tables_made_anew_and_keeps_its_words() -> None:
    page = "One.\n\n<!-- generated: a -->\nold\n<!-- end of a -->\n\n<!-- generated: b -->\nkept\n<!-- end of b -->\n"
    assert scale_page.with_page(page, {"a": "new"}) == page.replace("old", "new")


def test_the_table_of_inputs_in_the_document_is_that_of_the_code() -> None:
    page = (BENCH.parent / "docs" / "scale.md").read_text(encoding="utf-8")
    made = scale_page.tables({"kinds": {}})["inputs"]
    assert scale_page.with_page(page, {"inputs": made}) == page


def test_the_page_names_what_does_not_agree() -> None:
    figures = {"a": {"was": 2.0, "predicted": 2.3}, "b": {"was": 2.0, "predicted": 1.5}}
    real = {"figures": figures, "turns": {"measured": 3, "predicted": 4}, "rounds": 1, "rates": {}, "load_average": 1.0}
    told = scale_page.tables({"kinds": {}, "two replicas": real})["agreement"]
    assert "all but b (-25 %); the largest difference is -25 %" in told
    figures["b"]["predicted"] = 1.7
    assert "all 2 figures" in scale_page.tables({"kinds": {}, "two replicas": real})["agreement"]
