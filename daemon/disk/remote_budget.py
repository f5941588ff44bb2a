"""What a day may use of a remote, and what it has used."""

from __future__ import annotations

from ...memvid.folder.used_days import UsedDays
from ..api.process import RemoteUse
from ..options.current import CurrentOptions


class RemoteBudget:
    """used: what the days have used."""

    def __init__(self, used: UsedDays, options: CurrentOptions) -> None:
        self._used = used
        self._options = options

    @property
    def is_used_up(self) -> bool:
        """Whether that of this day is: what nobody waits for is not done until the next one."""
        budget = self._options.now.remote_daily_budget
        return budget is not None and budget.is_used_up(self._used.today())

    @property
    def why_anew(self) -> str | None:
        """Why less than all of this day may be held against it; None where it is not, or there is none."""
        return None if self._options.now.remote_daily_budget is None else self._used.why_anew

    def use_today(self, url: str, waiting: int, problem: str | None, *, sealed: bool) -> RemoteUse:
        """What was used of the remote. waiting: sessions that wait for the next day. problem, sealed: as in
        `RemoteUse`."""
        used, budget = self._used.today(), self._options.now.remote_daily_budget
        told = None if budget is None else budget.told()
        return RemoteUse(url, used.bytes_sent, used.requests, used.dollars, told, waiting, problem, sealed)
