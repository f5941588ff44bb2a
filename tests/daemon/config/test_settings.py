"""What is served and how: the file, and over it the command line."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from torpor.daemon.config.settings import settings_of
from torpor.daemon.errors import InvalidConfiguration, UnknownModel
from torpor.daemon.options.serve_options import MODEL_OPTIONS, ServeOptions
from torpor.errors import TorporError
from torpor.snapshot.layout import DEFAULT_KV_GROUP, KV_BITS, KV_GROUPS, KvChoice

TWO = {"model": {"a": "/a", "b": "/b"}}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "torpor.toml"


def kv(**given: Any) -> dict[str, KvChoice | None]:
    return {name: each.kv for name, each in settings_of(given).models.items()}


def test_kv_bits_are_of_the_model_that_is_named_and_a_plain_number_of_the_only_one() -> None:
    assert kv(**TWO, kv_bits={"b": 8}) == {"a": None, "b": KvChoice(8, 64)}
    assert kv(**TWO, kv_bits={"b": 8, "a": 4}, kv_group={"b": 32}) == {"a": KvChoice(4, 64), "b": KvChoice(8, 32)}
    assert kv(model={"a": "/a"}, kv_bits={"": 8}, kv_group={"": 128}) == {"a": KvChoice(8, 128)}


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"kv_bits": {"": 8}}, "does not say for which model: 'a', 'b' are served. Write --kv-bits NAME=8"),
        ({"kv_bits": {"a": 8}, "kv_group": {"b": 32}}, "'b' has none"),
        ({"kv_bits": {"c": 8}}, "--kv-bits is for 'c'"),
    ],
)
def test_bits_without_their_model_are_refused(wrong: dict[str, Any], told: str) -> None:
    with pytest.raises(TorporError, match=re.escape(told)):
        kv(**TWO, **wrong)


def test_a_command_line_outdoes_the_tables_of_a_file(file: Path) -> None:
    file.write_text('[models.a]\npath = "/a"\nkv_bits = 8\nkv_group = 128\nadapter = "/x"\nfuse = true\nttl = 5')
    assert kv(config=file) == {"a": KvChoice(8, 128)}
    assert kv(config=file, kv_group={"a": 32}) == {"a": KvChoice(8, 32)}
    assert kv(config=file, kv_bits={"a": 4}) == {"a": KvChoice(4, 64)}, "bits bring their own group"
    (choice,) = settings_of({"config": file}).models.values()
    assert (choice.adapter is not None and choice.adapter.fused, choice.ttl_s) == (True, 5.0)
    (choice,) = settings_of({"config": file, "adapter": {"a": "/y"}, "model_ttl": 9.0}).models.values()
    assert (choice.adapter is not None and choice.adapter.fused, choice.ttl_s) == (False, 9.0)


def test_an_alias_stands_for_a_model_that_is_served(file: Path) -> None:
    file.write_text('[aliases]\n"claude-*" = "b"\n[models.a]\npath = "/a"\n[models.b]\npath = "/b"')
    assert settings_of({"config": file}).options.aliases == (("claude-*", "b"),)
    with pytest.raises(InvalidConfiguration, match=r"'claude-\*' stands for 'b', and only 'a' are served"):
        settings_of({"config": file, "model": {"a": "/a"}})


def test_what_nothing_says_is_as_it_is_declared() -> None:
    assert settings_of({}).options == ServeOptions()
    assert list(settings_of({}).models) == ["demo"]
    plain = ServeOptions()
    assert (plain.store_budget, plain.daily_write_budget, plain.keep_free) == (None, None, 0)
    assert (plain.keep_last, plain.keep_days) == (None, None), "what a client made stays"
    assert (plain.memory_budget, plain.idle_sleep, plain.max_waiting, plain.batch) == (None, None, 512, 16)
    assert (plain.scrub_rate, plain.stop_within) == (8 << 20, 60)


def test_models_are_loaded_at_the_start_as_the_policy_says_and_pinned_by_name() -> None:
    def at_start(**given: Any) -> list[str]:
        choices = settings_of({"model": {"a": "/a", "b": "/b", "c": "/c"}, **given}).models
        return [name for name, choice in choices.items() if choice.at_start]

    assert at_start() == ["a"]
    assert at_start(load="start") == ["a", "b", "c"]
    assert at_start(load="use", pin={"c": True}) == []
    assert at_start(pin={"c": True}) == ["a", "c"]
    choices = settings_of({"pin": {"demo": True}, "model_ttl": 60.0}).models
    assert [(choice.pinned, choice.ttl_s) for choice in choices.values()] == [(True, 60.0)]


@pytest.mark.parametrize("wrong", [{"pin": {"other": True}}, {"adapter": {"other": "/x"}}])
def test_an_option_for_a_model_that_is_not_served_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UnknownModel):
        settings_of(wrong)


def test_every_policy_may_stand_in_the_file_and_the_command_line_holds_over_it(file: Path) -> None:
    file.write_text('prefix_reuse = "longest"\nbatch = 1\nscrub_rate = "off"\nkeep_days = 30\n')
    options = settings_of({"config": file}).options
    assert (options.prefix_reuse, options.batch, options.scrub_rate) == ("longest", 1, 0)
    assert settings_of({"config": file, "prefix_reuse": "off", "keep_last": 4}).options == ServeOptions(
        config=file, prefix_reuse="off", batch=1, scrub_rate=0, keep_days=30.0, keep_last=4
    )


def test_what_is_declared_is_what_the_layer_below_can_do() -> None:
    """The options stand where the commands may import them, so these words are written there a second time."""
    assert MODEL_OPTIONS["kv_bits"].kind.values == KV_BITS  # type: ignore[attr-defined]
    assert MODEL_OPTIONS["kv_group"].kind.values == KV_GROUPS  # type: ignore[attr-defined]
    assert MODEL_OPTIONS["kv_group"].default == DEFAULT_KV_GROUP


@pytest.mark.parametrize("key", ['remote_key = "/k"', 'remote_key_command = "echo"'])
def test_a_key_of_a_remote_needs_the_remote(file: Path, key: str) -> None:
    """Else a daemon whose file lost the line of its remote would begin without it, and say nothing."""
    file.write_text(key)
    with pytest.raises(InvalidConfiguration, match="There is a key of a remote, and no remote"):
        settings_of({"config": file})
    assert settings_of({"config": file, "remote": "file:///r"}).options.remote == "file:///r"
