"""Claude Code, Codex, opencode, pi, Qwen Code, Cline, Continue, aider and goose: the programs that people run, as
`torpor launch` starts them, headless. Each turn is a process of its own, but for Cline, which is one process behind an
editor.

Ten turns, a tool called in each second one, a `kill -9` of the daemon after the fifth. And where the context is full,
our error makes them shorten their history and go on.
"""

from __future__ import annotations

import json
import subprocess
import sysconfig
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest
from acp import Conversation
from conftest import Stage
from front import Exchange, Front, calls_in, require_nothing_read_twice, require_reads_do_not_grow
from launching import launched
from serving import INSTALLED, OLDER, larger_context

TURNS = 10
PROGRAMS = INSTALLED / "node_modules" / ".bin"
CLAUDE = Path(sysconfig.get_path("purelib")) / "claude_agent_sdk" / "_bundled" / "claude"
FULL_PROMPTS = 65_536
"""Positions, for agents whose prompts are longer than the demo model's context."""


@dataclass
class Agent:
    """An agent in a home of its own. tool: one that it offers, to be called."""

    home: Path
    tool: str

    @property
    def project(self) -> Path:
        return self.home / "project"

    def called(self, turn: int) -> str:
        """The tool that a turn calls."""
        return self.tool

    def ask(self, question: str, *, goes_on: bool, may_fail: bool = False) -> None:
        """One turn."""
        raise NotImplementedError

    def close(self) -> None:
        """End what is left of it."""


@dataclass
class ByCommand(Agent):
    """A program of which each turn is a process. launch: its command and environment, without its own arguments. runs:
    these for a turn, by question and whether it goes on."""

    launch: tuple[list[str], Mapping[str, str]]
    runs: Callable[[str, bool], list[str]]

    def ask(self, question: str, *, goes_on: bool, may_fail: bool = False) -> None:
        command, environment = self.launch
        done = subprocess.run(
            [*command, *self.runs(question, goes_on)],
            env=environment,
            cwd=self.project,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert may_fail or done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        assert " ran, " in done.stderr, "it tells what was read"


@dataclass
class InEditor(Agent):
    """A program that an editor would start: one process for all turns. other: a tool that takes turns with the first
    one, for Cline ends a turn with a call that it has seen four times."""

    other: str
    conversation: Conversation

    def called(self, turn: int) -> str:
        return (self.tool, self.other)[turn // 2 % 2]

    def ask(self, question: str, *, goes_on: bool, may_fail: bool = False) -> None:
        self.conversation.ask(question)

    def close(self) -> None:
        self.conversation.end()


def home_in(folder: Path) -> Path:
    home = folder / "home"
    (home / "project").mkdir(parents=True)
    subprocess.run(["git", "init", "--quiet", str(home / "project")], check=True)
    (home / "project" / "notes.txt").write_text("twelve lines\n" * 12)
    return home


Context = int | None
"""Tokens that the model holds, where an agent is to think that it holds more."""


def claude_code(front: Front, folder: Path, context: Context = None) -> Agent:
    return _claude_code(front, folder, ["--tools", "Read,Glob", "--system-prompt", "You are a helper."])


def claude_code_in_full(front: Front, folder: Path, context: Context = None) -> Agent:
    return _claude_code(front, folder, [])


def _claude_code(front: Front, folder: Path, prompt: list[str]) -> Agent:
    options = ["--output-format", "json", "--allowedTools", "Read,Glob", "--max-turns", "6", *prompt]
    home = home_in(folder)
    launch = launched("claude", CLAUDE, front, home, DISABLE_AUTOUPDATER="1", IS_SANDBOX="1")

    def runs(question: str, goes_on: bool) -> list[str]:
        return ["-p", question, *options, *["-c"][: int(goes_on)]]

    return ByCommand(home, "Glob", launch, runs)


def codex(front: Front, folder: Path, context: Context = None) -> Agent:
    home = home_in(folder)

    def runs(question: str, goes_on: bool) -> list[str]:
        options = ["--skip-git-repo-check", "--json", "--dangerously-bypass-approvals-and-sandbox"]
        return ["exec", *(["resume", "--last"] if goes_on else []), *options, question]

    return ByCommand(home, "exec_command", launched("codex", PROGRAMS / "codex", front, home, context=context), runs)


def opencode(front: Front, folder: Path, context: Context = None) -> Agent:
    home = home_in(folder)
    (home / ".config" / "opencode").mkdir(parents=True)
    settings = {"autoupdate": False, "share": "disabled", "permission": {"bash": "allow", "edit": "allow"}}
    (home / ".config" / "opencode" / "opencode.json").write_text(json.dumps(settings))

    def runs(question: str, goes_on: bool) -> list[str]:
        return ["run", question, "--format", "json", *["-c"][: int(goes_on)]]

    quiet = {f"OPENCODE_DISABLE_{name}": "1" for name in ("AUTOUPDATE", "MODELS_FETCH", "LSP_DOWNLOAD")}
    program = PROGRAMS / "opencode"
    return ByCommand(home, "read", launched("opencode", program, front, home, context=context, **quiet), runs)


def pi(front: Front, folder: Path, context: Context = None) -> Agent:
    home = home_in(folder)
    (home / ".pi" / "agent").mkdir(parents=True)
    (home / ".pi" / "agent" / "settings.json").write_text(json.dumps({"compaction": {"keepRecentTokens": 2_000}}))

    def runs(question: str, goes_on: bool) -> list[str]:
        return ["--mode", "json", *["-c"][: int(goes_on)], "-p", question]

    quiet = {"PI_OFFLINE": "1", "PI_SKIP_VERSION_CHECK": "1"}
    return ByCommand(home, "read", launched("pi", PROGRAMS / "pi", front, home, context=context, **quiet), runs)


def qwen_code(front: Front, folder: Path, context: Context = None) -> Agent:
    home = home_in(folder)
    (home / ".qwen").mkdir()
    quiet = {"privacy": {"usageStatisticsEnabled": False}, "general": {"enableAutoUpdate": False}}
    (home / ".qwen" / "settings.json").write_text(json.dumps(quiet))

    def runs(question: str, goes_on: bool) -> list[str]:
        prompt = ["--system-prompt", "You are a helper.", "--core-tools", "read_file", "--yolo"]
        return [*prompt, *["-c"][: int(goes_on)], "-o", "json", question]

    return ByCommand(home, "read_file", launched("qwen", PROGRAMS / "qwen", front, home), runs)


def cline(front: Front, folder: Path, context: Context = None) -> Agent:
    """Without an editor, it goes on with no conversation of before."""
    home = home_in(folder)
    (home / ".cline" / "data" / "settings").mkdir(parents=True)
    few_tools = {"disabledTools": ["teams", "spawn_agent"]}
    (home / ".cline" / "data" / "settings" / "global-settings.json").write_text(json.dumps(few_tools))
    command, environment = launched("cline", PROGRAMS / "cline", front, home)
    command += ["--acp", "--auto-approve", "true"]
    return InEditor(home, "read_files", "search_codebase", Conversation(command, "demo", environment, home / "project"))


def continue_cli(front: Front, folder: Path, context: Context = None) -> Agent:
    home = home_in(folder)

    def runs(question: str, goes_on: bool) -> list[str]:
        return ["-p", "--auto", *["--resume"][: int(goes_on)], question]

    launch = launched("continue", PROGRAMS / "cn", front, home, CONTINUE_METRICS_ENABLED="0")
    return ByCommand(home, "Read", launch, runs)


def aider(front: Front, folder: Path, context: Context = None) -> Agent:
    quiet = ("--no-analytics", "--no-check-update", "--no-show-model-warnings", "--no-git", "--yes-always")
    home = home_in(folder)

    def runs(question: str, goes_on: bool) -> list[str]:
        return [*quiet, *["--restore-chat-history"][: int(goes_on)], "--message", question, "notes.txt"]

    return ByCommand(home, "", launched("aider", OLDER / "aider", front, home), runs)


def goose(front: Front, folder: Path, context: Context = None) -> Agent:
    home = home_in(folder)

    def runs(question: str, goes_on: bool) -> list[str]:
        return ["run", "--no-profile", "--with-builtin", "developer", *["-r"][: int(goes_on)], "-t", question]

    launch = launched("goose", PROGRAMS / "goose", front, home, GOOSE_DISABLE_KEYRING="1", GOOSE_MODE="auto")
    return ByCommand(home, "tree", launch, runs)


def main_requests(exchanges: list[Exchange]) -> list[Exchange]:
    """Those of the conversation, without the ones for titles and the like, which offer no tools."""
    return [each for each in exchanges if each.body.get("tools")]


AGENTS = (claude_code, claude_code_in_full, codex, opencode, pi, cline, continue_cli)
SHORT = (claude_code,)
"""Those whose prompts fit the demo model's context."""


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("make", AGENTS, ids=lambda make: make.__name__)
def test_ten_turns_with_tools_survive_a_kill_and_nothing_is_read_twice(
    stage: Stage, make: Callable[[Front, Path], Agent]
) -> None:
    """T9."""
    agent = lead(stage, make, short=make in SHORT)
    require_nothing_read_twice(main_requests(stage.front.exchanges))
    assert list(calls_in(stage.front.exchanges)) == [agent.called(turn) for turn in range(1, TURNS, 2)]


@pytest.mark.timeout(1800)
def test_qwen_code_goes_on_over_a_kill_and_reads_again_what_it_takes_out_of_earlier_questions(stage: Stage) -> None:
    """T9, for a client that has a reminder in its newest question alone. Its memory is another dialogue."""
    agent = lead(stage, qwen_code, short=False)
    first = stage.front.exchanges[0].body["tools"]
    dialogue = [each for each in stage.front.exchanges if each.body.get("tools") == first]
    require_reads_do_not_grow(dialogue, settled=6)
    assert list(calls_in(dialogue)) == [agent.tool] * (TURNS // 2)


@pytest.mark.timeout(1800)
def test_goose_goes_on_over_a_kill_and_what_it_reads_does_not_grow(stage: Stage) -> None:
    """T9, for a client that was once seen to say some 60 tokens in its newest question alone, and else never."""
    agent = lead(stage, goose, short=True)
    dialogue = main_requests(stage.front.exchanges)
    require_reads_do_not_grow(dialogue, settled=6)
    assert list(calls_in(dialogue)) == [agent.tool] * (TURNS // 2)


@pytest.mark.timeout(1800)
def test_aider_goes_on_over_a_kill_and_reads_again_what_it_puts_behind_the_dialogue(stage: Stage) -> None:
    """T9, for a client that calls no tool."""
    lead(stage, aider, short=True)
    require_reads_do_not_grow(stage.front.exchanges, settled=TURNS // 2)
    assert len(stage.front.exchanges) == TURNS


def lead(stage: Stage, make: Callable[[Front, Path], Agent], *, short: bool) -> Agent:
    """Ten turns, a call in each second one, and a kill right after the fifth."""
    front = stage.begin(*([] if short else ["--model", f"demo={larger_context(stage.folder, FULL_PROMPTS)}"]))
    with closing(make(front, stage.folder)) as agent:
        for turn in range(TURNS):
            if turn == TURNS // 2:
                stage.kill()
            front.calls = agent.called(turn) if turn % 2 else None
            agent.ask(f"Question {turn}: what does it say?", goes_on=turn > 0)
    return agent


LONG = "The file has twelve lines. " * 220
"""Fills a context in a few turns."""


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("make", "positions"),
    [(claude_code, 8_192), (opencode, 16_384), (pi, 8_192)],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_full_context_makes_it_shorten_its_history_and_go_on(
    stage: Stage, make: Callable[[Front, Path, int], Agent], positions: int
) -> None:
    """QC6. opencode goes on in the same turn, and its status tells of the error."""
    front = stage.begin("--model", f"demo={larger_context(stage.folder, positions)}")
    agent = make(front, stage.folder, positions)
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
    agent = codex(front, stage.folder, 16_384)
    front.calls, front.arguments = agent.tool, {agent.tool: {"cmd": "seq 3000"}}
    agent.ask("Count.", goes_on=False, may_fail=True)
    first, refused, *_ = front.exchanges
    assert (first.status, refused.status) == (200, 400)
    agent.ask("And now?", goes_on=True)
    last = front.exchanges[-1]
    assert last.status == 200
    assert len(json.dumps(last.body)) < len(json.dumps(refused.body))
