"""The documents are true: their examples run, by a new user with an empty home and `torpor` on the path; their links
and the paths that they name exist; their tables are those of the code."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from torpor.cli.reach.background import is_running

ROOT = Path(__file__).resolve().parent.parent
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def blocks(name: str, marker: str) -> str:
    """The fenced blocks of a page that follow a marker comment, one after the other."""
    found = re.findall(rf"<!-- {marker}\b.*?-->\n```\w+\n(.*?)```", text_of(name), re.DOTALL)
    assert found, f"{name} has no block marked {marker!r}"
    return "".join(found)


@pytest.fixture
def home() -> Iterator[dict[str, str]]:
    """The environment of somebody who has just installed torpor; what they left running is ended."""
    # Short, because a socket's path has to fit into 104 bytes on macOS.
    folder = Path(tempfile.mkdtemp(prefix="torpor-"))
    (folder / "run").mkdir(mode=0o700)
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("XDG_", "TORPOR_", "PYTHON"))},
        "HOME": str(folder),
        "XDG_RUNTIME_DIR": str(folder / "run"),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "NO_COLOR": "1",
    }
    try:
        yield environment
    finally:
        subprocess.run(["torpor", "stop"], env=environment, check=False, capture_output=True, timeout=60)
        shutil.rmtree(folder)


def run(script: str, interpreter: list[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run a block with its text as standard input, in the folder that the README is in."""
    return subprocess.run(
        interpreter, input=script, text=True, env=environment, cwd=ROOT, capture_output=True, timeout=240, check=False
    )


def run_shell(script: str, environment: dict[str, str]) -> str:
    """What a block of lines wrote, each of which must have ended well."""
    script = script.replace("/mnt/disk", environment["HOME"])
    done = run(script, ["bash", "-e", "-o", "pipefail"], environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def told_in(block: str) -> list[tuple[str, str]]:
    """The commands behind `$ ` in a block, each with what it shows below."""
    commands = re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]
    return [(command, shown) for command, _, shown in (each.partition("\n") for each in commands)]


def masked(shown: str) -> list[str]:
    """The lines of what a command shows, without what differs at each run, and with one blank for many."""
    shown = re.sub(r"\b[0-9a-f]{12}\b", "ID", shown)
    shown = re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d", "TIME", shown)
    shown = re.sub(r"\b[\d.]+ (?:B|[KMG]iB)\b", "SIZE", shown)
    return [" ".join(line.split()) for line in shown.splitlines()]


# --- examples


@pytest.mark.one_in(1)
@pytest.mark.timeout(600)
def test_the_shell_lines_of_the_readme_run_as_they_stand_and_again(home: dict[str, str]) -> None:
    for _ in range(2):
        said = run_shell(blocks("README.md", "shell"), home)
        assert "torpor://default/notes" in said
        assert "asleep" in said


@pytest.mark.one_in(5)
@pytest.mark.timeout(600)
def test_the_python_of_the_readme_runs_as_it_stands_and_again_and_starts_the_daemon(home: dict[str, str]) -> None:
    for _ in range(2):
        done = run(blocks("README.md", "python"), [sys.executable, "-"], home)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "0 tokens prefilled" in done.stdout


@pytest.mark.one_in(4)
@pytest.mark.timeout(600)
def test_the_tutorial_runs_from_its_first_line_to_its_last(home: dict[str, str]) -> None:
    """As somebody types it who reads between the lines: the daemon has written behind the session before it sleeps."""
    reads = "until torpor show notes@1 >/dev/null 2>&1; do sleep 0.5; done\ntorpor sleep notes\n"
    said = run_shell(blocks("docs/tutorial.md", "shell").replace("torpor sleep notes\n", reads, 1), home)
    assert " 0 of them prefilled" in said, "the first kill came after a sleep"
    assert re.search(r"awake at version [0-9]+: [0-9,]+ tokens, [1-9][0-9]* of them prefilled", said), (
        "the second did not"
    )
    done = run(blocks("docs/tutorial.md", "python"), [sys.executable, "-"], home)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.one_in(4)
@pytest.mark.timeout(600)
def test_budgets_and_retention_runs_and_quantises_something(home: dict[str, str]) -> None:
    said = run_shell(blocks("docs/how-to/budgets-and-retention.md", "upkeep"), home)
    assert re.search(r"^quantized\b.*default/book@[0-9]+", said, re.MULTILINE), said


@pytest.mark.one_in(4)
@pytest.mark.timeout(600)
def test_it_is_told_why_a_request_was_slow_with_a_daemon_and_without(home: dict[str, str]) -> None:
    said = run_shell(blocks("docs/how-to/look-into-memory.md", "causes"), home)
    assert len(re.findall(r"chat  clock: diverged at token [0-9]+ of [0-9]+, in message 0", said)) == 2
    assert re.search(r"^clock\t1\t[1-9]", said, re.MULTILINE), said


@pytest.mark.one_in(4)
@pytest.mark.timeout(600)
def test_a_session_is_moved_and_a_store_backed_up_as_told(home: dict[str, str]) -> None:
    assert "copy" in run_shell(blocks("docs/how-to/move-a-session.md", "upkeep"), home)


@pytest.mark.one_in(4)
@pytest.mark.timeout(600)
def test_a_framework_is_connected_as_told_and_reads_only_what_is_new(home: dict[str, str]) -> None:
    run_shell(blocks("docs/how-to/framework.md", "shell"), home)
    done = run(blocks("docs/how-to/framework.md", "python"), [sys.executable, "-"], home)
    assert done.returncode == 0, done.stdout + done.stderr
    first, second = re.findall(r"^(\d+) tokens read:", done.stdout, re.MULTILINE)
    assert int(second) < int(first), "the second turn reads its own message alone"


@pytest.mark.one_in(2)
@pytest.mark.timeout(600)
def test_what_is_shown_of_memory_is_what_the_commands_show(home: dict[str, str]) -> None:
    """But for ids, times and sizes, and for blanks."""
    for command, shown in told_in(blocks("docs/how-to/look-into-memory.md", "look")):
        assert (command, masked(run_shell(command, home))) == (command, masked(shown))


@pytest.mark.one_in(4)
@pytest.mark.timeout(600)
def test_branches_are_searched_as_told_and_the_best_goes_on(home: dict[str, str]) -> None:
    for _ in range(2):
        done = run(blocks("docs/how-to/branches.md", "python"), [sys.executable, "-"], home)
        assert done.returncode == 0, done.stdout + done.stderr
        attempts = re.findall(r"^(True|False) \S+ (.*)", done.stdout, re.MULTILINE)
        assert [kept for kept, _ in attempts] == ["True", "False", "False", "False"]
        assert len({text for _, text in attempts}) > 1, "they differ"
        assert "goes on:" in done.stdout


@pytest.mark.one_in(3)
def test_stop_puts_agents_to_sleep_and_leaves_no_process(home: dict[str, str]) -> None:
    started = run("torpor serve --detach --json", ["bash"], home)
    assert started.returncode == 0, started.stdout + started.stderr
    pid = int(re.search(r'"pid": ?(\d+)', started.stdout)[1])  # type: ignore[index]
    assert run("torpor append kept 'a line to remember'", ["bash"], home).returncode == 0
    assert run("torpor stop", ["bash"], home).returncode == 0
    assert not is_running(pid)
    listed = run("torpor ls --json", ["bash"], home)
    assert '"torpor://default/kept"' in listed.stdout


# --- words, links and paths


def test_the_readme_is_short() -> None:
    assert len(text_of("README.md").split()) <= 700


def anchors(page: Path) -> set[str]:
    """The fragments by which GitHub finds a page's headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(name: str) -> Iterator[str]:
    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"```.*?```", "", text_of(name), flags=re.DOTALL)):
        if target.startswith(("http:", "https:")):
            continue
        path, _, anchor = target.partition("#")
        page = (ROOT / name).parent / path if path else ROOT / name
        if not page.exists() or (anchor and anchor not in anchors(page)):
            yield f"{name}: {target}"


def test_every_link_leads_somewhere() -> None:
    assert [broken for name in NAMES for broken in broken_links(name)] == []


def test_every_source_file_that_is_named_exists() -> None:
    file = re.compile(r"\b((?:memvid|snapshot|daemon|socket_api|cli|bench|tests|scripts)/[\w/]+\.py)\b")
    pages = [name for name in NAMES if name != "CHANGELOG.md"]
    assert [(name, path) for name in pages for path in file.findall(text_of(name)) if not (ROOT / path).exists()] == []


def test_the_page_for_contributors_is_one_page() -> None:
    assert len(text_of("AGENTS.md").splitlines()) <= 80
    assert len(text_of("CONTRIBUTING.md").splitlines()) == 1


MOST_DECISIONS, MOST_LINES, WIDTH = 40, 25, 120


def test_decisions_are_few_and_short() -> None:
    """What, why, and what was rejected: how a thing works is said elsewhere. No line is long to save another one."""
    pages = {page.name: page.read_text() for page in (ROOT / "docs" / "decisions").glob("[0-9]*.md")}
    assert len(pages) <= MOST_DECISIONS
    for name, text in pages.items():
        lines = text.splitlines()
        assert len(lines) <= MOST_LINES, name
        assert max(map(len, lines)) <= WIDTH, name
        assert "**Decision.**" in text, name


def test_each_decision_stands_in_the_list() -> None:
    listed = re.findall(r"^\d+\. \[[^\]]+\]\((\d\d-[\w-]+\.md)\)", text_of("docs/decisions/README.md"), re.MULTILINE)
    assert listed == sorted(page.name for page in (ROOT / "docs" / "decisions").glob("[0-9]*.md"))


# --- tables made from the code


def test_the_reference_is_fresh() -> None:
    """`make reference` writes what is stale."""
    spec = importlib.util.spec_from_file_location("reference_tables", ROOT / "scripts" / "reference.py")
    assert spec is not None
    assert spec.loader is not None
    tables = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tables)
    assert [str(page.relative_to(ROOT)) for page, _ in tables.stale_pages()] == []
    commands = text_of("docs/reference/commands.md")
    for name in ("demo", "wake", "repair"):
        chapter = re.compile(rf"\n## `torpor {name}`\n.*?(?=\n## |\Z)", re.DOTALL)
        again = tables.page_with_chapters(chapter.sub("", commands))
        assert re.findall("^## .*", again, re.MULTILINE) == re.findall("^## .*", commands, re.MULTILINE), name
    untold = re.findall(r"^\| `(\w+)` \|.*\|  \|$", text_of("docs/reference/errors.md"), re.MULTILINE)
    assert not untold, "an error without a docstring"
    assert "jq -r '.sessions[].session'" in commands, "markup goes, and nothing else"
    assert tables.page_with_tables("<!-- generated: events -->\n<!-- end of events -->").count("| `sleep_ended` |") == 1
