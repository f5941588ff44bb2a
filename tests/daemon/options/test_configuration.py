"""What may stand in a configuration file, and what is said of one that is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
from torpor.daemon.errors import InvalidConfiguration
from torpor.daemon.options.configuration import MAX_CONFIG_BYTES, Configuration, read_configuration


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "torpor.toml"


def test_an_empty_file_says_nothing(file: Path) -> None:
    file.write_text("")
    assert read_configuration(file) == Configuration()


def test_sizes_and_durations_are_numbers_or_words(file: Path) -> None:
    file.write_text('memory_budget = "1.5GiB"\nidle_sleep = 90\nmodel_ttl = "15min"\nkeep_free = 0\n')
    found = read_configuration(file)
    assert found.options == {"memory_budget": 3 << 29, "idle_sleep": 90.0, "model_ttl": 900.0, "keep_free": 0}


def test_models_stand_in_the_order_of_the_file_and_folders_are_meant_from_it(file: Path) -> None:
    (file.parent / "models" / "b").mkdir(parents=True)
    file.write_text(
        '[models.a]\npath = "./a"\nadapter = "adapters/x/y"\nfuse = true\nkv_bits = 8\npin = true\nttl = "1h"\n'
        '[models.b]\npath = "models/b"\nload = "start"\n[models.c]\npath = "owner/name"\n[models.d]\npath = "/d"\n'
    )
    found = read_configuration(file)
    folder = file.parent
    assert list(found.models) == ["a", "b", "c", "d"]
    assert [table.path for table in found.models.values()] == [f"{folder}/a", f"{folder}/models/b", "owner/name", "/d"]
    a = found.models["a"]
    assert (a.adapter, a.fuse, a.kv_bits, a.kv_group, a.pin, a.ttl) == (
        f"{folder}/adapters/x/y",
        True,
        8,
        64,
        True,
        3600,
    )


def test_a_cluster_has_a_table_of_its_own(file: Path) -> None:
    file.write_text('batch = 2\n[cluster]\nreplicas = 3\nmost_replicas = 9\nhost = "0.0.0.0"\nport = 80\n')
    found = read_configuration(file)
    assert found.options == {"batch": 2}
    assert found.cluster == {"replicas": 3, "most_replicas": 9, "host": "0.0.0.0", "port": 80}


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("memory = 1", "memory"),
        ("[models.a]\npath = 'x'\npinned = true", "models.a.pinned"),
        ("[models.a]\npin = true", "models.a.path"),
        ("[cluster]\nreplicas = 0", "cluster.replicas"),
        ("[cluster]\nbatch = 2", "cluster.batch"),
        ("memory_budget = 0", "memory_budget"),
        ("memory_budget = -1", "memory_budget"),
        ("memory_budget = true", "memory_budget"),
        ("memory_budget = 'much'", "no size"),
        ("idle_sleep = 0", "idle_sleep"),
        ("idle_sleep = nan", "idle_sleep"),
        ("model_ttl = 'soon'", "no duration"),
        ("load = 'never'", "load"),
        ("on_model_change = 'panic'", "on_model_change"),
        ("max_waiting = 0", "max_waiting"),
        ("max_waiting = 65537", "max_waiting: it must be a whole number from 1 to 65,536"),
        ("max_waiting = true", "max_waiting"),
        ("max_waiting = '3'", "max_waiting"),
        ("batch = 257", "batch"),
        ("canary = 'always'", "canary"),
        ("trusting = true", "trusting"),
        ("recompute = 'off'", "recompute"),
        ("prefix_reuse = 'sometimes'", "prefix_reuse: it must be 'exact', 'longest' or 'off'"),
        ("quantise_after = 30", "quantise_after: this key is not known"),
        ("remote_daily_budget = '20 GB a day'", "remote_daily_budget: '20 GB a day' is no part of a day's budget"),
        ("remote_daily_budget = 5", "remote_daily_budget: it must be a text"),
        ("keep_last = 0", "keep_last: it must be a whole number from 1"),
        ("keep_days = 0", "keep_days: 0 would keep the newest version alone: --keep-last 1 does"),
        ("keep_days = 'long'", "keep_days: it must be a number of days"),
        ("keep_days = nan", "keep_days"),
        ("scrub_rate = 'fast'", "scrub_rate: 'fast' is no size"),
        ("aliases = 'demo'", "aliases: it must be a table with a name behind each name"),
        ("[aliases]\n'gpt-*' = 3", "aliases: it must be a table"),
        ("[models.\"\"]\npath = 'x'", "a model's name has 1 to 256 characters"),
        ("[models.a]\npath = 'x'\nkv_bits = 5", "models.a.kv_bits"),
        ("[models.a]\npath = 'x'\npin = 1", "models.a.pin"),
        ("[models.a]\npath = 'x'\nfuse = true", "fuse"),
        ("[models.a]\npath = ''", "models.a.path"),
        ("models = 3", "models"),
        ("= 3", "not TOML"),
        ("a = 1\na = 2", "not TOML"),
        ("x = " + "[" * 5000, "not TOML"),
    ],
)
def test_what_is_wrong_is_named(file: Path, text: str, word: str) -> None:
    file.write_text(text)
    with pytest.raises(InvalidConfiguration, match=word) as refusal:
        read_configuration(file)
    assert refusal.value.path == str(file)


def test_a_file_that_cannot_be_read_or_is_too_long_is_refused(file: Path) -> None:
    with pytest.raises(InvalidConfiguration, match="cannot be read"):
        read_configuration(file)
    file.write_bytes(b"#" * (MAX_CONFIG_BYTES + 1))
    with pytest.raises(InvalidConfiguration, match="longer"):
        read_configuration(file)
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidConfiguration, match="not TOML"):
        read_configuration(file)


def test_an_option_of_the_command_line_alone_is_told_as_that(file: Path) -> None:
    file.write_text("store = '/s'")
    with pytest.raises(InvalidConfiguration, match="store: it can be said on the command line alone, with --store"):
        read_configuration(file)
    file.write_text("deterministic = true")
    with pytest.raises(InvalidConfiguration, match=r"deterministic: .* command line alone; here write batch = 1"):
        read_configuration(file)


def test_a_group_of_bits_is_refused_without_bits(file: Path) -> None:
    file.write_text("[models.a]\npath = 'x'\nkv_group = 32")
    with pytest.raises(InvalidConfiguration, match=r"models\.a: kv_group is for kv_bits, and there are none"):
        read_configuration(file)


def test_a_key_of_a_cluster_at_the_top_is_told_where_it_belongs(file: Path) -> None:
    file.write_text("replicas = 2")
    with pytest.raises(InvalidConfiguration, match=r"replicas: it is of a cluster: .* \[cluster\]"):
        read_configuration(file)


def test_a_key_of_a_model_at_the_top_is_told_where_it_belongs(file: Path) -> None:
    file.write_text("kv_bits = 8")
    with pytest.raises(InvalidConfiguration, match=r"kv_bits: it is of a model: .* \[models.NAME\]"):
        read_configuration(file)


@pytest.mark.parametrize("key", ["memory_budget", "model_ttl"])
def test_a_key_of_the_whole_daemon_in_the_table_of_a_model_is_told_where_it_belongs(file: Path, key: str) -> None:
    file.write_text(f"[models.a]\npath = 'x'\n{key} = 60")
    with pytest.raises(InvalidConfiguration, match=f"models.a.{key}: it is for the whole daemon: .* top of the file"):
        read_configuration(file)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("memory_budgets = 1", "wrong at memory_budgets: this key is not known; memory_budget is, if that was meant"),
        ("[models.a]\npath = 'x'\nkvbits = 8", "models.a.kvbits: this key is not known; kv_bits is, if that was meant"),
        (
            "zzz = 1",
            "zzz: this key is not known. The keys here are aliases, batch, cluster, daily_write_budget, durability",
        ),
        (
            "zzz = 1",
            "http, idle_sleep, keep_days, keep_free, keep_last, keep_unnamed, load, max_waiting, memory_budget",
        ),
        (
            "zzz = 1",
            "no_inspector, on_model_change, prefix_reuse, remote, remote_daily_budget, remote_key, remote_key_command",
        ),
        ("zzz = 1", "remote_key_command, remote_lease, remote_turns, scrub_rate"),
        ("zzz = 1", "scrub_rate, stop_within, store_budget, strip_named"),
    ],
)
def test_a_key_that_is_not_known_is_told_with_the_closest_one(file: Path, text: str, told: str) -> None:
    file.write_text(text)
    with pytest.raises(InvalidConfiguration) as refusal:
        read_configuration(file)
    assert told in refusal.value.message
    assert "The keys here are " in refusal.value.message
    assert "Extra inputs" not in refusal.value.message
