"""`torpor launch`: an agent on this daemon, from its start to its end."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from torpor.cli.launch import launch
from torpor.cli.launch.agents import AGENTS
from torpor.daemon.api.process import HttpInfo
from torpor.socket_api import Client
from torpor.socket_api.wire.address import default_socket_path
from torpor.tests.cli.cli_rig import Torpor
from torpor.tests.socket_api.server_rig import ServerThread

AGENT = """\
#!{python}
# Asks one question, goes on with what it was answered before, and ends with the status that it is given.
import json, os, sys, urllib.request
status, question = sys.argv[-2:]
said = json.load(open("said")) if os.path.exists("said") else []
said.append({{"role": "user", "content": question}})
body = {{"model": os.environ["ANTHROPIC_MODEL"], "max_tokens": 8, "messages": said}}
headers = {{"authorization": "Bearer " + os.environ["TORPOR_TOKEN"], "content-type": "application/json"}}
url = os.environ["ANTHROPIC_BASE_URL"] + "/v1/messages"
with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as answer:
    said.append({{"role": "assistant", "content": json.load(answer)["content"]}})
json.dump(said, open("said", "w"))
print(url)
sys.exit(int(status))
"""


@pytest.fixture(autouse=True)
def home(short_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user with nothing installed."""
    for name in filter(re.compile("(?i).+_proxy").fullmatch, list(os.environ)):
        monkeypatch.delenv(name)
    for name in ("STATE", "CONFIG", "CACHE", "DATA"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(short_path / name.lower()))
    monkeypatch.setenv("HOME", str(short_path))
    monkeypatch.setenv("PATH", str(short_path / "bin"))
    (short_path / "bin").mkdir()
    monkeypatch.chdir(short_path)
    return short_path


def install(home: Path, name: str, text: str) -> None:
    (home / "bin" / name).write_text(text)
    (home / "bin" / name).chmod(0o755)


def told(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize("name", AGENTS)
def test_a_dry_run_shows_what_an_agent_gets_and_changes_nothing(torpor: Torpor, home: Path, name: str) -> None:
    ran = torpor("launch", name, "--dry-run", "--json", "--", "-p", "hello")
    assert (ran.status, ran.document["environment"]["TORPOR_TOKEN"]) == (0, "…")
    assert ran.document["command"][0] == AGENTS[name].command
    assert ran.document["command"][-2:] == ["-p", "hello"]
    assert ran.document["examples"] == ["url", "token", "model", "context"]
    shown = torpor("launch", name, "--dry-run", "--show-token", "--http", "9000", "--model", "mine=/models/mine")
    assert "export TORPOR_TOKEN='…'" in shown.out, "there is none yet"
    assert "# No daemon answers, so these are examples: the token, 32768 tokens of context." in told(shown.out)
    assert "http://127.0.0.1:9000" in shown.out
    assert [each.name for each in home.iterdir()] == ["bin"]


def test_what_is_missing_is_told_with_the_way_to_have_it(torpor: Torpor, home: Path, daemon: ServerThread) -> None:
    missing = torpor("launch", "codex", "--json")
    assert (missing.status, missing.error["error"]["code"]) == (13, "agent_missing")
    assert "npm install --global @openai/codex" in missing.error["error"]["message"]
    install(home, "codex", "#!/bin/sh\necho codex-cli 1.2.3\n")
    listed = {each["agent"]: each for each in torpor("launch", "--list", "--json").document["agents"]}
    assert list(listed) == list(AGENTS)
    assert (listed["codex"]["version"], listed["pi"]["path"]) == ("1.2.3", None)
    unserved = torpor("launch", "codex", "--json")
    assert (unserved.status, unserved.error["error"]["code"]) == (12, "http_not_served")
    assert "`torpor stop`" in unserved.error["error"]["message"]
    for words, sentence in (
        (("clade",), "Did you mean claude?"),
        ((), "Name an agent: claude, codex"),
        (("codex", "--write-config"), "does not serve HTTP"),
    ):
        assert sentence in told(torpor("launch", *words).err), words


def test_settings_are_shown_before_they_are_written(
    torpor: Torpor, home: Path, daemon: ServerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the facts of the daemon, not with those of an example."""
    tokens = home / "$tokens"
    tokens.write_text("work another-token-of-some-length\ndefault the-token-of-the-owner\n")
    tokens.chmod(0o600)
    daemon.service.also("status", http=HttpInfo("http://127.0.0.1:9", str(tokens)))
    asked = torpor("launch", "opencode", "--write-config")
    assert (asked.status, "Add --yes" in told(asked.err)) == (2, True)
    assert not (home / "config").exists()
    written = torpor("launch", "opencode", "--write-config", "--yes")
    assert (written.status, '+  "model": "torpor/fake",' in written.out) == (0, True), written.err
    command = next(line for line in written.out.splitlines() if line.startswith("export TORPOR_TOKEN=$(awk"))
    shell = ["/bin/sh", "-c", f"PATH=/usr/bin:/bin; {command}; echo $TORPOR_TOKEN"]
    assert subprocess.run(shell, capture_output=True, check=True).stdout == b"the-token-of-the-owner\n"
    path = home / "config" / "opencode" / "opencode.json"
    assert json.loads(path.read_text())["provider"]["torpor"]["options"]["baseURL"] == "http://127.0.0.1:9/v1"
    assert "has these settings already" in told(torpor("launch", "opencode", "--write-config").err)
    shown = torpor("launch", "goose", "--dry-run", "--show-token")
    assert "export OPENAI_API_KEY=the-token-of-the-owner" in shown.out
    path.unlink()
    monkeypatch.setattr(launch, "has_consent", lambda *_, **__: path.write_text("{}"))
    assert "has changed since it was shown" in told(torpor("launch", "opencode", "--write-config").err)
    assert path.read_text() == "{}"
    unserved = torpor("launch", "opencode", "--dry-run", "--model", "other=/folder", "--json")
    assert "serves fake=" in unserved.error["error"]["message"]
    assert "--show-token shows it" in torpor("launch", "goose", "--dry-run").err
    at_work = torpor("--namespace", "work", "launch", "goose", "--dry-run", "--show-token")
    assert "export OPENAI_API_KEY=another-token-of-some-length" in at_work.out
    assert "of the namespace team" in told(torpor("launch", "goose", "--namespace", "team", "--dry-run").err)
    assert '== \\"work\\"' in torpor("launch", "claude", "--namespace", "work", "--write-config", "--yes").out
    tokens.write_text("work another-token-of-some-length\n")
    assert "no token of the namespace default" in told(torpor("launch", "goose", "--dry-run").err)


def test_its_status_is_told_where_the_daemon_has_gone_meanwhile(
    torpor: Torpor, home: Path, daemon: ServerThread
) -> None:
    tokens, socket = home / "tokens", default_socket_path()
    tokens.write_text("default the-token-of-the-owner\n")
    tokens.chmod(0o600)
    daemon.service.also("status", http=HttpInfo("http://127.0.0.1:9", str(tokens)))
    install(home, "claude", f"#!/bin/sh\n/bin/mv {socket} {socket}.away; exit 7\n")
    ran = torpor("launch", "claude", "--socket", str(socket))
    Path(f"{socket}.away").rename(socket)
    assert (ran.status, "does not answer any more" in told(ran.err)) == (7, True), ran.err
    assert "so these are examples" in torpor("launch", "claude", "--dry-run", "--socket", str(home / "none")).out


def test_a_proxy_of_the_user_is_passed_by(torpor: Torpor, monkeypatch: pytest.MonkeyPatch) -> None:
    def told_of_proxies() -> dict[str, str]:
        environment = torpor("launch", "claude", "--dry-run", "--json").document["environment"]
        return {name: value for name, value in environment.items() if "proxy" in name.lower()}

    assert told_of_proxies() == {}
    monkeypatch.setenv("NO_PROXY", "intern")
    monkeypatch.setenv("https_proxy", "http://proxy:3128")
    assert told_of_proxies() == dict.fromkeys(("no_proxy", "NO_PROXY"), "intern,127.0.0.1")


@pytest.mark.one_in(2)
def test_an_agent_goes_on_over_a_kill_of_the_daemon_and_its_status_is_passed_on(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    install(home, "claude", AGENT.format(python=sys.executable))
    command = [sys.executable, "-P", "-m", "torpor.cli.main", "launch", "claude"]

    def launch(*more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*command, *more], capture_output=True, text=True, check=False, timeout=120)

    first = launch("--http", "0", "--", "7", "What is a list?")
    try:
        assert (first.returncode, "until torpor stop" in told(first.stderr)) == (7, True), first.stderr
        assert "demo holds 8,192 tokens, and coding agents need 32,768" in told(first.stderr)
        assert "0 tokens were reused, 13 were read and 8 written" in told(first.stderr)
        assert "8 written; 1 more session kept" in told(first.stderr)
        with Client() as client:
            pid = client.status().pid
        os.kill(pid, signal.SIGKILL)
        again = launch("--", "0", "And a set?")
        assert (again.returncode, "ended without a stop" in told(again.stderr)) == (0, True), again.stderr
        assert "0 tokens were reused, 36 were read (21 again) and" in told(again.stderr)
        dry = json.loads(launch("--json", "--dry-run").stdout)
        assert dry["environment"]["ANTHROPIC_BASE_URL"] in again.stdout
        assert not (home / "state" / "torpor" / "launch").exists(), "this agent needs no file"
        settings = json.loads(dry["command"][2])
        assert settings["env"].items() <= dry["environment"].items(), "what goes before its user's own settings"
        assert settings["env"]["ANTHROPIC_AUTH_TOKEN"] == "", "a token of its user's is for another server"
    finally:
        with Client() as client:
            client.shutdown(force=True)


RUNS = "import sys; from torpor.cli.launch.running import run; sys.exit(run(sys.argv[1:], {'TOLD': 'yes'}))"


@pytest.mark.parametrize(
    ("script", "number", "status"),
    [
        ("trap 'exit 5' {number}; echo $TOLD; while :; do /bin/sleep 0.01; done", signal.SIGTERM, 5),
        ("trap 'exit 6' {number}; echo $TOLD; while :; do /bin/sleep 0.01; done", signal.SIGINT, 6),
        ("echo $TOLD; exec /bin/sleep 60", signal.SIGHUP, 128 + signal.SIGHUP),
    ],
)
def test_signals_reach_the_agent_and_its_end_is_told_as_a_shell_would(
    script: str, number: signal.Signals, status: int
) -> None:
    """But those that are ignored, as a hangup is under nohup."""
    agent = ["/bin/sh", "-c", script.format(number=number.name.removeprefix("SIG"))]
    ignoring = ["/bin/sh", "-c", "trap '' USR1; exec \"$@\"", "sh"]
    with subprocess.Popen(
        [*ignoring, sys.executable, "-c", RUNS, *agent], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
    ) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == "yes\n"
        running.send_signal(signal.SIGUSR1)
        running.send_signal(number)
        try:
            assert running.wait(timeout=30) == status
        finally:
            running.kill()
