"""The list of commands, each with a sentence; those of every day; and what other tools call them.

Owns these sentences: a command's own help begins with its sentence and goes on with the docstring of its function. The
first words of it stand in `torpor --help`. Imports no command.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Command:
    """One command: its heading in help, its name, its function and its sentence."""

    panel: str
    name: str
    function: str  # as a dotted name in this folder
    summary: str

    @property
    def brief(self) -> str:
        """The first words of its sentence, for a list of commands."""
        return re.split(r"[.:;](?: |$)|, (?:and|or) ", self.summary)[0]


_SYSTEM = "Daemon and machine"
_AT_WORK = "Work with sessions"
_AT_REST = "Sleep and wake"
_LOOK = "Look (no daemon)"
_STORE = "Look after a store"

# fmt: off
COMMANDS = (
    Command(_SYSTEM, "demo", "demo.demo.demo",
            "See it happen: a session sleeps, its process is killed, and it goes on in another, bit for bit."),
    Command(_SYSTEM, "serve", "serve.serve.serve",
            "Serve sessions on a Unix socket until Ctrl-C, SIGTERM or [cyan]torpor stop[/]."),
    Command(_SYSTEM, "serve-ray", "serve.serve_ray.serve_ray",
            "Serve sessions over HTTP from several daemons as one, which Ray starts, ends and replaces."),
    Command(_SYSTEM, "ensure", "serve.ensure.ensure",
            "Start a daemon in the background if none answers, and return once it does; leave one that answers as it "
            "is."),
    Command(_SYSTEM, "launch", "launch.launch.launch",
            "Start a coding agent on this daemon: Claude Code, Codex and others, with nothing to set up."),
    Command(_SYSTEM, "stop", "serve.stop.stop", "Stop the daemon, after it has put every awake session to sleep."),
    Command(_SYSTEM, "restart", "serve.restart.restart", "Stop the daemon, and start it with the options that it had."),
    Command(_SYSTEM, "config", "serve.config.config", "Show a daemon's settings and where each is from; check a file."),
    Command(_SYSTEM, "service", "serve.service.service",
            "Install a daemon as a service of this user, under systemd or launchd; show it, or remove it."),
    Command(_SYSTEM, "events", "commands.events.events",
            "Show the daemon's events from now on: reads and writes, sleeps, wakes, evictions, waits."),
    Command(_SYSTEM, "top", "commands.top.top",
            "Watch the daemon: memory, disk, models, queue, sessions; with keys to sort, filter, sleep and wake."),
    Command(_SYSTEM, "inspect", "commands.inspect_page.inspect",
            "Open the inspector, a page of the daemon that shows what memory holds, shares and costs."),
    Command(_SYSTEM, "logs", "commands.logs.logs", "Show the end of the daemon's log, and follow it with -f."),
    Command(_SYSTEM, "stats", "commands.stats.stats",
            "Show figures of all sessions, by label: their number, tokens, memory and disk, and their hits."),
    Command(_SYSTEM, "models", "commands.models.models",
            "List the served models, and which are in memory; load one before it is needed, or unload one."),
    Command(_SYSTEM, "mcp", "commands.mcp.mcp",
            "Give a program that speaks MCP sessions as tools, on standard input and output."),
    Command(_SYSTEM, "completion", "commands.completion.completion", "Write what has a shell complete command lines."),
    Command(_SYSTEM, "doctor", "serve.doctor.doctor",
            "Examine this machine: versions, device, the BLAS and its speed, the daemon and the store."),
    Command(_AT_WORK, "chat", "commands.chat.chat", "Talk with a session; it remembers, also after it slept."),
    Command(_AT_WORK, "append", "commands.append.append",
            "Have a session read a text: it becomes part of the context, and nothing is written."),
    Command(_AT_WORK, "generate", "commands.generate.generate",
            "Let a session go on writing at the end of what it has read."),
    Command(_AT_WORK, "set", "commands.settings.set_",
            "Change how a session draws its tokens, from now on. Settings that are not named stay."),
    Command(_AT_WORK, "analyze", "commands.analyze.analyze",
            "Measure the keys and values of one version: norms, coherence, rank, outliers, drift from its parent."),
    Command(_AT_WORK, "fork", "commands.fork.fork",
            "Make a new session that begins as another one stands, or as it stood at an earlier version or token."),
    Command(_AT_WORK, "diverge", "commands.diverge.diverge",
            "Let a session go on in several ways side by side, and keep the best, if you like."),
    Command(_AT_WORK, "fold", "commands.fold.fold",
            "Go on from a session whose context is full: a new one begins with its system text, a summary, and its "
            "last turns if --tail asks for them."),
    Command(_AT_WORK, "rm", "commands.rm.rm",
            "Delete sessions for good: from memory and from disk, with every version; or one version, as NAME@3."),
    Command(_AT_WORK, "clear", "commands.clear.clear",
            "Delete all sessions of a label for good: from memory, and from disk with every version. No new session "
            "takes over their tokens."),
    Command(_AT_WORK, "forget", "commands.forget.forget",
            "Forget a session: every version goes, awake or asleep, and its bytes leave the disk."),
    Command(_AT_WORK, "why", "commands.why.why",
            "Show how much of its prefix each of a session's last requests reused, and why not all; with --all, what "
            "all requests cost, by cause."),
    Command(_AT_REST, "sleep", "commands.sleep.sleep",
            "Put sessions to sleep: their state goes to disk and their memory is freed."),
    Command(_AT_REST, "save", "commands.sleep.save", "Save sessions: their state goes to disk, and they stay awake."),
    Command(_AT_REST, "wake", "commands.wake.wake",
            "Wake a session: its state comes back from disk, proven to be the one that slept, and no token is read "
            "again."),
    Command(_AT_REST, "warm", "commands.warm.warm",
            "Wake sessions ahead of their next request, so that it does not wait: by name, or by label."),
    Command(_AT_REST, "push", "commands.remote.push",
            "Send the newest versions of sessions to the daemon's remote, and wait until they are durable there."),
    Command(_AT_REST, "pull", "commands.remote.pull",
            "Take the newest versions that the daemon's remote has of sessions into the store."),
    Command(_AT_REST, "quantize", "commands.quantize.quantize",
            "Keep the keys and values of a sleeping session in 8 or 4 bits. What is lost does not come back."),
    Command(_LOOK, "ls", "commands.ls.ls", "List sessions, with their tokens and bytes."),
    Command(_LOOK, "log", "commands.log.log",
            "Show the history of sessions: their versions, where each came from, and what it added."),
    Command(_LOOK, "show", "commands.show.show",
            "Show one session: its state, its versions, the model it belongs to, and the end of its text."),
    Command(_LOOK, "blocks", "commands.blocks.blocks",
            "Show the blocks of a version: what each holds, its bytes, how it is kept, and how many need it."),
    Command(_LOOK, "who", "commands.who.who", "Show which versions need a block, another version's blocks, or a pack."),
    Command(_LOOK, "diff", "commands.diff.diff",
            "Show how two sessions or versions differ: in their tokens, their text, their blocks and their settings."),
    Command(_LOOK, "cat", "commands.cat.cat",
            "Write the text of a session or of a version, as the model saw it; or its tokens, or its manifest."),
    Command(_LOOK, "verify", "commands.verify.verify",
            "Check a store: structure and references, and with --deep every byte against its digest."),
    Command(_LOOK, "du", "commands.du.du",
            "Show the disk space of a store and of each session, and how much of it could be freed."),
    Command(_LOOK, "export", "commands.transfer.export",
            "Write one version of a session, with all that it needs, to one file: to keep, or to take elsewhere."),
    Command(_LOOK, "export-kv", "commands.export_kv.export_kv",
            "Write the arrays of one version, bit for bit, to a .safetensors file that other tools open."),
    Command(_LOOK, "backup", "commands.backup.backup",
            "Copy the sleeping sessions, with tags and pins, into a folder that is a store itself."),
    Command(_STORE, "import", "commands.transfer.import_",
            "Take a session into the store from a file that [cyan]torpor export[/] has written."),
    Command(_STORE, "tag", "commands.marks.tag",
            "Give a version a name, the newest one if none is named. [cyan]SESSION@TAG[/] then means that version."),
    Command(_STORE, "untag", "commands.marks.untag", "Take a name from the version that has it. The version stays."),
    Command(_STORE, "pin", "commands.marks.pin", "Pin a version, the newest one if none is named: it is never pruned."),
    Command(_STORE, "unpin", "commands.marks.unpin",
            "Take the pin from a version. The version stays until a prune finds it."),
    Command(_STORE, "prune", "commands.maintenance.prune",
            "Remove earlier versions of sessions. A version that either option keeps stays; give one of the two."),
    Command(_STORE, "repack", "commands.maintenance.repack",
            "Give back the disk space that no session needs, and gather what lies scattered."),
    Command(_STORE, "strip", "commands.maintenance.strip",
            "Keep the tokens and the text of a sleeping session, and let its keys and values go."),
    Command(_STORE, "repair", "commands.maintenance.repair",
            "Mend a damaged store, as far as possible: nothing is given up, nothing is made up."),
)
# fmt: on

DAILY: Final = (
    *("ensure", "launch", "chat", "ls", "show", "log"),
    *("why", "fork", "sleep", "wake", "doctor", "stop"),
)
"""The commands of every day, which stand first in `torpor --help`."""

EXIT_STATUS: Final = "exit-status"  # the topic of `torpor help` that is no command

LOOKING: Final = frozenset({"show", "log", "why", "blocks", "cat", "diff", "du"})
"""The commands that take the beginning of a session's name for it, as they change nothing."""

ELSEWHERE: Final = {
    **dict.fromkeys(("list", "dir", "ps", "sessions", "find"), "ls"),
    **dict.fromkeys(("info", "describe", "get"), "show"),
    **dict.fromkeys(("history", "versions", "snapshots", "reflog"), "log"),
    **dict.fromkeys(("delete", "remove", "del", "destroy"), "rm"),
    **dict.fromkeys(("watch", "monitor", "memory"), "top"),
    **dict.fromkeys(("dashboard", "ui", "web", "open"), "inspect"),
    **dict.fromkeys(("health", "check"), "doctor"),
    **dict.fromkeys(("start", "up", "run"), "ensure"),
    **dict.fromkeys(("kill", "down", "shutdown", "quit"), "stop"),
    **dict.fromkeys(("checkpoint", "commit", "snapshot"), "save"),
    **dict.fromkeys(("suspend", "hibernate"), "sleep"),
    **dict.fromkeys(("resume", "restore", "attach"), "wake"),
    **dict.fromkeys(("recover", "mend"), "repair"),
    **dict.fromkeys(("settings", "options"), "config"),
    **dict.fromkeys(("compare", "delta"), "diff"),
    "summarize": "fold",
    "blame": "who",
    **dict.fromkeys(("gc", "compact", "vacuum"), "repack"),
    **dict.fromkeys(("fsck", "scrub"), "verify"),
    **dict.fromkeys(("usage", "df", "size"), "du"),
    **dict.fromkeys(("read", "add", "ingest"), "append"),
    **dict.fromkeys(("ask", "talk"), "chat"),
    **dict.fromkeys(("save-as", "cp", "copy", "clone", "branch"), "fork"),
}
"""What other tools call a command, and its name here."""

_RENAMED: Final = (
    "A session keeps its name. `torpor fork OLD NEW` has NEW begin as OLD stands; `torpor rm OLD` lets OLD go, and its "
    "history."
)
_BACK: Final = (
    "`torpor wake NAME@2` goes on from an earlier version; `torpor fork NAME@2 NEW` has a new session begin there. "
    "`torpor log NAME --since yesterday` tells which version is of when."
)
UNBUILT: Final = {
    **dict.fromkeys(("rename", "mv", "move"), _RENAMED),  # docs/decisions/03-bundle-id-covers-the-manifest.md
    **dict.fromkeys(("checkout", "reset", "revert", "rollback", "undo"), _BACK),
    **dict.fromkeys(("tree", "graph"), "`torpor log --graph` draws it: where each version came from."),
    "tags": "`torpor log` shows tags and pins, of all sessions or of those that are named.",
    **dict.fromkeys(("grep", "search"), "`torpor cat NAME | grep TEXT` looks into a session."),
    **dict.fromkeys(("trace", "profile"), "`torpor events --perfetto FILE` writes a trace of what happens."),
    "status": "`torpor top` shows what the daemon does; `torpor ls` lists sessions; `torpor doctor` examines all.",
}
"""What there is no command for, and what does the same."""


def command_named(name: str) -> Command | None:
    """The command of that name; None if there is none."""
    return next((command for command in COMMANDS if command.name == name), None)
