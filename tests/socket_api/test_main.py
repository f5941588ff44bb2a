"""The server's entry point: its arguments, and what it says before it serves."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from torpor.daemon.api.process import ShutdownResult
from torpor.daemon.errors import UnknownModel
from torpor.daemon.service import Service
from torpor.errors import TorporError
from torpor.snapshot.kv_format import KvChoice
from torpor.socket_api.main import describe_stop, parse_arguments, settings_of


def test_models_are_named_in_the_order_given() -> None:
    options = parse_arguments(["--model", "first=/a", "--model", "second=owner/name=x", "--socket", "/s", "--json"])
    assert list(options.models.items()) == [("first", "/a"), ("second", "owner/name=x")]
    assert options.socket == Path("/s")
    assert options.store is None
    assert options.json


def test_adapters_are_named_by_their_model_and_fused_if_asked() -> None:
    assert parse_arguments([]).adapters == {}
    options = parse_arguments(["--adapter", "a=/x", "--adapter", "b=/y=z"])
    assert (dict(options.adapters), options.fuse, options.check_models) == ({"a": "/x", "b": "/y=z"}, False, False)
    options = parse_arguments(["--kv-bits", "a=8", "--kv-bits", "b=4", "--kv-group", "32", "--canary", "never"])
    assert (options.kv_bits, options.kv_group, options.canary) == ({"a": 8, "b": 4}, {"": 32}, "never")
    options = parse_arguments([])
    assert (options.kv_bits, options.kv_group, options.canary) == ({}, {}, "always")
    assert (options.trusting, options.recompute) == (False, "off")
    assert parse_arguments(["--trusting"]).trusting
    assert parse_arguments(["--recompute", "exact"]).recompute == "exact"
    options = parse_arguments(["--adapter", "a=/x", "--fuse", "--check-models"])
    assert (options.fuse, options.check_models) == (True, True)


@pytest.mark.parametrize(
    "wrong", [["--adapter", "nameless"], ["--adapter", "a=1", "--adapter", "a=2"], ["--model", "a=1", "--fuse"]]
)
def test_an_adapter_without_a_model_s_name_and_a_fuse_without_an_adapter_are_refused(
    wrong: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as refused:
        parse_arguments(wrong)
    assert refused.value.code == 2
    assert "--adapter" in capsys.readouterr().err


def test_kv_bits_are_of_the_model_that_is_named_and_a_plain_number_of_the_only_one() -> None:
    def kv(*arguments: str) -> dict[str, KvChoice | None]:
        return {name: each.kv for name, each in settings_of(parse_arguments(arguments)).models.items()}

    two = ("--model", "a=/a", "--model", "b=/b")
    assert kv(*two, "--kv-bits", "b=8") == {"a": None, "b": KvChoice(8, 64)}
    assert kv(*two, "--kv-bits", "b=8", "--kv-group", "b=32", "--kv-bits", "a=4") == {
        "a": KvChoice(4, 64),
        "b": KvChoice(8, 32),
    }
    assert kv("--model", "a=/a", "--kv-bits", "8", "--kv-group", "128") == {"a": KvChoice(8, 128)}
    for wrong, told in (
        (("--kv-bits", "8"), "does not say for which model: 'a', 'b' are served. Write --kv-bits NAME=8"),
        (("--kv-bits", "a=8", "--kv-group", "b=32"), "'b' has none"),
        (("--kv-bits", "c=8"), "--kv-bits is for 'c'"),
    ):
        with pytest.raises(TorporError, match=re.escape(told)):
            kv(*two, *wrong)


@pytest.mark.parametrize("wrong", ["5", "=8", "a=", "a=16"])
def test_bits_that_there_are_not_are_refused(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_arguments(["--kv-bits", wrong])
    assert "is not NAME=N, where N is 8 or 4" in capsys.readouterr().err


def test_budgets_are_bytes_and_none_is_set_by_itself() -> None:
    plain = parse_arguments([])
    assert (plain.store_budget, plain.daily_write_budget, plain.keep_free) == (None, None, None)
    assert settings_of(plain).fixed == {"store_budget": None, "daily_write_budget": None, "keep_free": 0}
    options = parse_arguments(["--store-budget", "1000", "--daily-write-budget", "20", "--keep-free", "3"])
    assert (options.store_budget, options.daily_write_budget, options.keep_free) == (1000, 20, 3)
    with pytest.raises(SystemExit):
        parse_arguments(["--keep-free", "much"])


def test_models_are_loaded_at_the_start_as_the_policy_says_and_pinned_by_name() -> None:
    def at_start(*arguments: str) -> list[str]:
        options = parse_arguments(["--model", "a=/a", "--model", "b=/b", "--model", "c=/c", *arguments])
        return [name for name, choice in settings_of(options).models.items() if choice.at_start]

    assert at_start() == ["a"]
    assert at_start("--load", "start") == ["a", "b", "c"]
    assert at_start("--load", "use", "--pin", "c") == []
    assert at_start("--pin", "c") == ["a", "c"]
    choices = settings_of(parse_arguments(["--pin", "demo", "--model-ttl", "60"])).models
    assert [(choice.pinned, choice.ttl_s) for choice in choices.values()] == [(True, 60.0)]
    for wrong in (["--pin", "other"], ["--adapter", "other=/x"]):
        with pytest.raises(UnknownModel):
            settings_of(parse_arguments(wrong))


def test_the_scrub_has_a_rate_of_bytes_and_0_is_none() -> None:
    assert parse_arguments([]).scrub_rate == 8 << 20
    assert parse_arguments(["--scrub-rate", "0"]).scrub_rate == 0
    for wrong in ("-1", "fast"):
        with pytest.raises(SystemExit):
            parse_arguments(["--scrub-rate", wrong])


def test_memory_has_a_budget_of_bytes_and_an_idle_time_of_seconds() -> None:
    plain = parse_arguments([])
    assert (plain.memory_budget, plain.idle_sleep) == (None, None)
    options = parse_arguments(["--memory-budget", "1000", "--idle-sleep", "1.5"])
    assert (options.memory_budget, options.idle_sleep) == (1000, 1.5)
    for wrong in ("0", "-1", "nan", "inf", "soon"):
        with pytest.raises(SystemExit):
            parse_arguments(["--idle-sleep", wrong])


def test_how_many_may_wait_is_bounded_and_512_unless_told() -> None:
    assert settings_of(parse_arguments([])).max_waiting == 512
    assert settings_of(parse_arguments(["--max-waiting", "3"])).max_waiting == 3
    for wrong in ("0", "65537", "many"):
        with pytest.raises(SystemExit):
            parse_arguments(["--max-waiting", wrong])


@pytest.mark.parametrize("wrong", [["--model", "nameless"], ["--model", "=x"], ["--model", "a=1", "--model", "a=2"]])
def test_a_model_without_a_name_of_its_own_is_refused_with_status_2(
    wrong: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as refused:
        parse_arguments(wrong)
    assert refused.value.code == 2
    assert "--model" in capsys.readouterr().err


def test_the_end_is_told_in_a_sentence_that_counts_right() -> None:
    assert describe_stop(ShutdownResult(("a",), {}, ("b",))) == (
        "torpor stopped; 1 session was put to sleep; 1 had read nothing and is gone"
    )
    assert describe_stop(ShutdownResult((), {}, ("b", "c"))).endswith(
        "0 sessions were put to sleep; 2 had read nothing and are gone"
    )


def test_a_bundle_that_cannot_be_read_is_named_before_the_daemon_serves(tiny_model: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"

    async def sleep_one() -> None:
        service = await Service.open(store_path=store, models={"tiny": str(tiny_model)})
        await service.create(session="kept")
        await service.append(session="kept", text="a few words", on_event=lambda _event: None)
        await service.close()

    asyncio.run(sleep_one())
    (bundle,) = (store / "bundles").rglob("*.mvb")
    os.truncate(bundle, bundle.stat().st_size - 1)
    for file in store.glob("index.sqlite*"):
        file.unlink()

    socket = Path(tempfile.mkdtemp(prefix="torpor-")) / "t.sock"
    command = [sys.executable, "-m", "torpor.socket_api.main", "--json", "--model", f"tiny={tiny_model}"]
    daemon = subprocess.Popen(
        [*command, "--store", str(store), "--socket", str(socket)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert daemon.stdout is not None
        ready = json.loads(daemon.stdout.readline())
        assert (ready["event"], ready["warnings"]) == ("ready", 2)
        daemon.send_signal(signal.SIGTERM)
        _, said = daemon.communicate(timeout=60)
    finally:
        daemon.kill()
        daemon.wait()
        socket.parent.rmdir()
    assert "warning" in said
    assert bundle.name in said


def test_a_sound_store_is_opened_without_a_warning(tiny_model: Path, tmp_path: Path) -> None:
    async def open_twice() -> list[tuple[str, ...]]:
        found = []
        for _ in range(2):
            service = await Service.open(store_path=tmp_path / "store", models={"tiny": str(tiny_model)})
            found.append(service.warnings)
            await service.create(session=f"s{time.monotonic_ns()}")
            await service.close()
        return found

    assert asyncio.run(open_twice()) == [(), ()]


def test_what_a_daemon_logs_has_its_time(tmp_path: Path) -> None:
    script = (
        "import logging, sys; from torpor.socket_api.main import main; main(sys.argv[1:]); "
        "logging.getLogger('torpor.daemon').warning('a word')"
    )
    command = [sys.executable, "-c", script, "--socket", str(tmp_path / "s"), "--store", str(tmp_path / "store")]
    done = subprocess.run([*command, "--model", "m=/nowhere"], capture_output=True, text=True, timeout=60, check=True)
    refused, logged = done.stderr.splitlines()
    assert refused.startswith("torpor serve: ")
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} WARNING a word", logged)
