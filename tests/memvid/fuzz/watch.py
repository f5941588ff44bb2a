"""One execution under watch: what it took, whether its refusal was a typed one, and what to call it when it was not."""

from __future__ import annotations

import resource
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Final

MAX_CPU_SECONDS: Final = 1.0
MAX_WALL_SECONDS: Final = 20.0
MAX_GROWN_MIB: Final = 192
_RSS_UNIT: Final = 1 if sys.platform == "darwin" else 1024


class Broken(AssertionError):
    """Something was accepted that a second look refutes; the text says which property."""


class Hung(BaseException):
    """The execution did not come back in MAX_WALL_SECONDS. Not an Exception: no code under test may swallow it."""


def peak_rss_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _RSS_UNIT / (1 << 20)


def limit_address_space(extra_mib: int = 1024) -> None:
    """Make a wild allocation fail at once, instead of being noticed afterwards."""
    if sys.platform != "linux":
        return
    with open("/proc/self/statm") as statm:
        now = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + (extra_mib << 20), resource.getrlimit(resource.RLIMIT_AS)[1]))


@dataclass
class Finding:
    """What went wrong with an input. `kind` is the same for the same fault: it decides what counts as new."""

    kind: str
    text: str
    data: bytes


@dataclass
class Watch:
    """Counts executions and collects findings, the first input of each kind only."""

    check: Callable[[bytes], str]
    typed: type[Exception]
    executions: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    findings: dict[str, Finding] = field(default_factory=dict)
    last_outcome: str = ""
    slowest_seconds: float = 0.0
    slowest: bytes = b""
    base_rss_mib: float = field(default_factory=peak_rss_mib)
    _rss_mib: float = field(default_factory=peak_rss_mib)

    def execute(self, data: bytes) -> Finding | None:
        """Run one input; the finding if it was one, new or not."""
        self._rss_mib = max(self._rss_mib, peak_rss_mib())  # what the change of the input took is not the reader's
        began = time.thread_time()
        finding = None
        try:
            outcome = self.check(data)
        except self.typed as error:
            outcome = str(getattr(error, "code", "typed"))
        except (Exception, Hung) as error:
            outcome = "FINDING"
            finding = Finding(_kind(error), "".join(traceback.format_exception(error))[-4000:], data)
        seconds = time.thread_time() - began
        self.executions += 1
        self.outcomes[outcome] += 1
        self.last_outcome = outcome
        if seconds > self.slowest_seconds:
            self.slowest_seconds, self.slowest = seconds, data
        if finding is None and seconds > MAX_CPU_SECONDS:
            finding = Finding(f"slow:{outcome}", f"{seconds:.2f} s of processor time, then {outcome}", data)
        rss = peak_rss_mib()
        if finding is None and rss > self.base_rss_mib + MAX_GROWN_MIB and rss > self._rss_mib + 8:
            finding = Finding(f"memory:{outcome}", f"the peak went from {self._rss_mib:.0f} to {rss:.0f} MiB", data)
        self._rss_mib = max(rss, self._rss_mib)
        if finding is not None:
            self.findings.setdefault(finding.kind, finding)
        return finding

    def summary(self) -> dict[str, Any]:
        return {
            "executions": self.executions,
            "outcomes": dict(self.outcomes.most_common()),
            "slowest_seconds": round(self.slowest_seconds, 4),
            "slowest_bytes": len(self.slowest),
            "rss_before_mib": round(self.base_rss_mib, 1),
            "rss_peak_mib": round(self._rss_mib, 1),
            "findings": sorted(self.findings),
        }


def _kind(error: BaseException) -> str:
    """The error's class and the innermost place of our own code: the same fault by whatever input."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "memvid" in frame.filename and "/tests/" not in frame.filename]
    places = ours or frames
    where = f"{places[-1].filename.rsplit('/', 1)[-1]}:{places[-1].name}" if places else "?"
    what = str(error).split(":")[0][:60] if isinstance(error, Broken) else ""
    return ":".join(part for part in (type(error).__name__, where, what) if part)


def _on_alarm(_number: int, _frame: FrameType | None) -> None:
    raise Hung(f"no answer in {MAX_WALL_SECONDS:.0f} s")


def with_alarm(execute: Callable[[bytes], Finding | None]) -> Callable[[bytes], Finding | None]:
    """The same, given up after MAX_WALL_SECONDS; for engines that have no such limit of their own."""
    signal.signal(signal.SIGALRM, _on_alarm)

    def run(data: bytes) -> Finding | None:
        signal.setitimer(signal.ITIMER_REAL, MAX_WALL_SECONDS)
        try:
            return execute(data)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    return run
