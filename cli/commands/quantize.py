"""`torpor quantize`: keep a sleeping session in fewer bits. Only the daemon does this, for it needs the model."""

from __future__ import annotations

from typing import Annotated, Literal

from ..reach.daemon_link import connect
from ..reach.options import DryRunOption, JsonOption, SessionArgument, SocketOption, option
from ..view.output import Output
from .maintenance_report import write_report
from .upkeep import PATIENCE_S

BitsOption = Annotated[Literal["8", "4"], option("--bits", "In how many bits each number is kept. Default: 8.")]


def quantize(
    session: SessionArgument,
    bits: BitsOption = "8",
    dry_run: DryRunOption = False,
    socket: SocketOption = None,
    as_json: JsonOption = False,
) -> int:
    """It writes a new version of the session. The exact one stays, and can be woken, until [cyan]torpor prune[/]
    removes it: only then is there less on the disk. Text, last logits and random numbers stay exact. A last version
    that is pinned or has a tag is left. [cyan]torpor wake[/] and [cyan]show[/] say of the session that it is lossy.

    [bold]Examples[/]

    [cyan]torpor quantize notes --dry-run[/]
    [cyan]torpor quantize notes --bits 4[/]
    [cyan]torpor prune notes --keep-last 1[/]
    """
    output = Output(as_json=as_json)
    with connect(socket, timeout_s=PATIENCE_S) as daemon, output.progress("quantize"):
        report = daemon.maintain("quantize", session=session, bits=8 if bits == "8" else 4, dry_run=dry_run)
    return write_report(output, "quantize", report)
