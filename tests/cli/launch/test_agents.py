"""What each agent gets: its record, filled in, and put into its user's file where that is asked for."""

from __future__ import annotations

import json
import os
import re
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from torpor.cli.errors import InvalidUsage, UnreadableInput
from torpor.cli.launch.agents import AGENTS, HOMES
from torpor.cli.launch.filling import Facts, settings_of, start_of, text_of
from torpor.cli.launch.user_settings import change_of

FACTS = Facts("http://127.0.0.1:9", "the-token", "/a folder/tokens", 'a "strange" $name\\ 😀', 40_000)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in (*HOMES, *filter(re.compile("(?i).+_proxy").fullmatch, list(os.environ))):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.mark.parametrize("agent", AGENTS.values(), ids=AGENTS)
def test_an_agent_is_told_address_token_and_model_and_its_user_may_say_more(agent: object) -> None:
    """Also a model whose name means something to a shell, to JSON and to a template."""
    record = AGENTS[getattr(agent, "name", "")]
    start = start_of(record, FACTS, Path("/f"), ("-p", "$what"))
    assert start.environment["TORPOR_TOKEN"] == FACTS.token
    assert start.command[0] == record.command
    assert tuple(start.command[-2:]) == ("-p", "$what")
    told = [*start.environment.values(), *start.command, start.text if start.file else ""]
    for fact in (FACTS.url, FACTS.model):
        assert any(fact in each or json.dumps(fact, ensure_ascii=False)[1:-1] in each for each in told), fact
    assert (start.file is None) == ("/f" not in "".join([*start.environment.values(), *start.command]))
    assert FACTS.token not in text_of(record, FACTS), "a file needs no token"
    assert all(each not in "".join(told) for each in ("$url", "$model", "$context", "$file"))


def test_the_settings_are_the_text_of_their_file() -> None:
    for agent in AGENTS.values():
        read = tomllib.loads if (agent.settings_path or "").endswith(".toml") else json.loads
        assert read(text_of(agent, FACTS)) == settings_of(agent, FACTS)


@pytest.mark.parametrize(
    ("name", "environment", "file"),
    [
        (
            "goose",
            {
                "GOOSE_PROVIDER": "openai",
                "GOOSE_MODEL": "demo",
                "GOOSE_CONTEXT_LIMIT": "40000",
                "OPENAI_HOST": FACTS.url,
                "OPENAI_BASE_PATH": "v1/chat/completions",
                "OPENAI_API_KEY": FACTS.token,
                "OPENAI_TIMEOUT": "3600",
            },
            None,
        ),
        ("crush", {"CRUSH_GLOBAL_DATA": "/f"}, "/f/crush.json"),
    ],
)
def test_two_agents_get_what_their_documents_tell(name: str, environment: dict[str, str], file: str | None) -> None:
    start = start_of(AGENTS[name], replace(FACTS, model="demo"), Path("/f"))
    assert start.environment == {"TORPOR_TOKEN": FACTS.token, **environment}
    assert (start.file and str(start.file), list(start.command)) == (file, [name])
    if file:
        provider = json.loads(start.text)["providers"]["torpor"]
        assert (provider["base_url"], provider["api_key"]) == (f"{FACTS.url}/v1", "$TORPOR_TOKEN")
        assert provider["models"][0]["context_window"] == 40_000


def test_a_users_file_keeps_all_that_it_has(home: Path) -> None:
    path = home / ".qwen" / "settings.json"
    path.parent.mkdir()
    own = {"ui": {"theme": "dark"}, "modelProviders": {"openai": [{"id": "mine"}, {"id": FACTS.model, "name": "old"}]}}
    (home / "elsewhere.json").write_text(json.dumps(own))
    path.symlink_to(home / "elsewhere.json")
    (home / "elsewhere.json").chmod(0o640)
    change = change_of(AGENTS["qwen"], FACTS)
    assert '+  "model": {' in list(change.lines())
    umask = os.umask(0o077)
    change.write()
    os.umask(umask)
    assert path.is_symlink()
    assert path.stat().st_mode & 0o777 == 0o640
    merged = json.loads(path.read_text())
    assert merged["ui"] == own["ui"]
    assert [each["id"] for each in merged["modelProviders"]["openai"]] == ["mine", FACTS.model]
    assert merged["modelProviders"]["openai"][1]["baseUrl"] == f"{FACTS.url}/v1"
    assert list(change_of(AGENTS["qwen"], FACTS).lines()) == [], "a second time changes nothing"


@pytest.mark.parametrize("text", ['{"a": 1, // mine\n}', "[]", "[" * 100_000, b"\xff\xfe", " " * (4 << 20) + " {}"])
def test_a_file_that_cannot_be_kept_whole_is_left_as_it_is(home: Path, text: str | bytes) -> None:
    path = home / ".claude" / "settings.json"
    path.parent.mkdir()
    path.write_bytes(before := text.encode() if isinstance(text, str) else text)
    with pytest.raises(UnreadableInput, match="torpor launch claude --dry-run"):
        change_of(AGENTS["claude"], FACTS)
    assert path.read_bytes() == before


def test_a_file_with_a_name_of_torpors_own_is_new_and_an_agent_without_one_says_so(home: Path) -> None:
    change_of(AGENTS["codex"], FACTS).write()
    path = home / ".codex" / "torpor.config.toml"
    assert tomllib.loads(path.read_text())["model"] == FACTS.model
    assert path.stat().st_mode & 0o777 == 0o600
    assert change_of(AGENTS["codex"], replace(FACTS, model="b")).after.count('model = "b"') == 1
    with pytest.raises(InvalidUsage, match="from the environment"):
        change_of(AGENTS["goose"], FACTS)
