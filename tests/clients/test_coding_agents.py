"""Claude Code, Codex, opencode and pi: the programs that people run, headless, each turn a process of its own.

Ten turns, a tool called in each second one, a `kill -9` of the daemon after the fifth. And where the context is full,
our error makes them shorten their history and go on.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from conftest import Stage
from front import Exchange, Front, calls_in, require_nothing_read_twice
from pages import documented
from serving import ROOT, larger_context

TURNS = 10
PROGRAMS = ROOT / ".venv-clients" / "node_modules" / ".bin"
CLAUDE = Path(sysconfig.get_path("purelib")) / "claude_agent_sdk" / "_bundled" / "claude"
FULL_PROMPTS = 65_536
"""Positions, for agents whose prompts are longer than the demo model's context."""


@dataclass
class Agent:
    """A program in a home of its own. tool: one that it offers, to be called. runs: arguments for a turn, by question
    and whether it goes on."""

    home: Path
    tool: str
    runs: Callable[[str, bool], list[str]]
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def project(self) -> Path:
        return self.home / "project"

    def ask(self, question: str, *, goes_on: bool, may_fail: bool = False) -> None:
        """One turn."""
        done = subprocess.run(
            self.runs(question, goes_on),
            env={"PATH": os.environ["PATH"], "HOME": str(self.home), **self.environment},
            cwd=self.project,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert may_fail or done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def home_in(folder: Path) -> Path:
    home = folder / "home"
    (home / "project").mkdir(parents=True)
    subprocess.run(["git", "init", "--quiet", str(home / "project")], check=True)
    (home / "project" / "notes.txt").write_text("twelve lines\n" * 12)
    return home


def claude_code(front: Front, folder: Path) -> Agent:
    return _claude_code(front, folder, ["--tools", "Read,Glob", "--system-prompt", "You are a helper."])


def claude_code_in_full(front: Front, folder: Path) -> Agent:
    return _claude_code(front, folder, [])


def _claude_code(front: Front, folder: Path, prompt: list[str]) -> Agent:
    options = ["--output-format", "json", "--allowedTools", "Read,Glob", "--max-turns", "6", *prompt]
    environment = dict(re.findall(r"export (\w+)=(.*)", documented("claude-code", front)))
    environment |= {"DISABLE_AUTOUPDATER": "1", "IS_SANDBOX": "1"}

    def runs(question: str, goes_on: bool) -> list[str]:
        return [str(CLAUDE), "-p", question, *options, *["-c"][: int(goes_on)]]

    return Agent(home_in(folder), "Glob", runs, environment)


def codex(front: Front, folder: Path) -> Agent:
    home = home_in(folder)
    (home / ".codex").mkdir()
    (home / ".codex" / "config.toml").write_text(
        'approval_policy = "never"\nsandbox_mode = "danger-full-access"\ncheck_for_update_on_startup = false\n'
        + documented("codex", front)
    )

    def runs(question: str, goes_on: bool) -> list[str]:
        options = ["--skip-git-repo-check", "--json"]
        way = ["resume", "--last", *options] if goes_on else options
        return [str(PROGRAMS / "codex"), "exec", *way, question]

    environment = {"CODEX_HOME": str(home / ".codex"), "TORPOR_TOKEN": front.token}
    return Agent(home, "exec_command", runs, environment)


def opencode(front: Front, folder: Path) -> Agent:
    home = home_in(folder)
    (home / ".config" / "opencode").mkdir(parents=True)
    settings = {"autoupdate": False, "share": "disabled", "permission": {"bash": "allow", "edit": "allow"}}
    (home / ".config" / "opencode" / "opencode.json").write_text(
        json.dumps({**settings, **json.loads(documented("opencode", front))})
    )

    def runs(question: str, goes_on: bool) -> list[str]:
        way = ["--format", "json", *["-c"][: int(goes_on)]]
        return [str(PROGRAMS / "opencode"), "run", question, *way]

    quiet = ("AUTOUPDATE", "MODELS_FETCH", "LSP_DOWNLOAD")
    environment = {f"OPENCODE_DISABLE_{name}": "1" for name in quiet}
    return Agent(home, "read", runs, {"TORPOR_TOKEN": front.token, **environment})


def pi(front: Front, folder: Path) -> Agent:
    home = home_in(folder)
    (home / ".pi" / "agent").mkdir(parents=True)
    (home / ".pi" / "agent" / "models.json").write_text(documented("pi", front))
    (home / ".pi" / "agent" / "settings.json").write_text(json.dumps({"compaction": {"keepRecentTokens": 2_000}}))

    def runs(question: str, goes_on: bool) -> list[str]:
        options = ["--provider", "torpor", "--model", "demo", "--mode", "json"]
        return [str(PROGRAMS / "pi"), *options, *["-c"][: int(goes_on)], "-p", question]

    return Agent(home, "read", runs, {"TORPOR_TOKEN": front.token, "PI_OFFLINE": "1", "PI_SKIP_VERSION_CHECK": "1"})


def main_requests(exchanges: list[Exchange]) -> list[Exchange]:
    """Those of the conversation, without the ones for titles and the like, which offer no tools."""
    return [each for each in exchanges if each.body.get("tools")]


AGENTS = (claude_code, claude_code_in_full, codex, opencode, pi)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("make", AGENTS, ids=lambda make: make.__name__)
def test_ten_turns_with_tools_survive_a_kill_and_nothing_is_read_twice(
    stage: Stage, make: Callable[[Front, Path], Agent]
) -> None:
    """T9."""
    is_short = make in (claude_code, pi)
    front = stage.begin(*([] if is_short else ["--model", f"demo={larger_context(stage.folder, FULL_PROMPTS)}"]))
    agent = make(front, stage.folder)
    for turn in range(TURNS):
        if turn == TURNS // 2:
            stage.kill()
        front.calls = agent.tool if turn % 2 else None
        agent.ask(f"Question {turn}: what does it say?", goes_on=turn > 0)
    require_nothing_read_twice(main_requests(front.exchanges))
    assert list(calls_in(front.exchanges)) == [agent.tool] * (TURNS // 2)


LONG = "The file has twelve lines. " * 220
"""Fills a context in a few turns."""


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("make", "positions"),
    [(claude_code, 8_192), (opencode, 16_384), (pi, 8_192)],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_full_context_makes_it_shorten_its_history_and_go_on(
    stage: Stage, make: Callable[[Front, Path], Agent], positions: int
) -> None:
    """QC6. opencode goes on in the same turn, and its status tells of the error."""
    front = stage.begin("--model", f"demo={larger_context(stage.folder, positions)}")
    agent = make(front, stage.folder)
    for turn in range(TURNS):
        agent.ask(f"Question {turn}. {LONG}", goes_on=turn > 0, may_fail=True)
        if any(each.status != 200 for each in front.exchanges):
            break
    refused = next(each for each in front.exchanges if each.status != 200)
    assert refused.status == 400
    agent.ask("And now?", goes_on=True)
    last = front.exchanges[-1]
    assert last.status == 200
    assert len(json.dumps(last.body)) < len(json.dumps(refused.body))


@pytest.mark.timeout(1800)
def test_codex_shortens_its_history_where_the_result_of_a_tool_fills_the_context(stage: Stage) -> None:
    """QC6. Not where the first request of a turn is too long: of that it tells its user."""
    front = stage.begin("--model", f"demo={larger_context(stage.folder, 16_384)}")
    agent = codex(front, stage.folder)
    front.calls, front.arguments = agent.tool, {agent.tool: {"cmd": "seq 3000"}}
    agent.ask("Count.", goes_on=False, may_fail=True)
    first, refused, *_ = front.exchanges
    assert (first.status, refused.status) == (200, 400)
    agent.ask("And now?", goes_on=True)
    last = front.exchanges[-1]
    assert last.status == 200
    assert len(json.dumps(last.body)) < len(json.dumps(refused.body))
