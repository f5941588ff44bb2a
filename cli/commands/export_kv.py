"""`torpor export-kv`: the arrays of one version as a `.safetensors` file."""

from __future__ import annotations

from typing import Annotated

from ...memvid.units import format_bytes, format_plural
from ..errors import Interrupted
from ..reach.artifacts import KindOption, LabelOption, OverwriteOption, require_file
from ..reach.interrupts import ignore_interrupts
from ..reach.options import JsonOption, SocketOption, StoreOption, VersionArgument, argument
from ..reach.store_view import choose_store, open_store
from ..view.output import Output, plain

TargetArgument = Annotated[str, argument("FILE", "The file to write, such as notes.safetensors.")]


def export_kv(
    version: VersionArgument,
    target: TargetArgument,
    kind: KindOption = None,
    label: LabelOption = None,
    overwrite: OverwriteOption = False,
    socket: SocketOption = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Keys and values are layers.N.k and layers.N.v, of heads x tokens x dim over the whole session; tokens is the
    ledger. Every block is checked on the way. What an awake session has read since its last version is not in it. Such
    a file cannot be imported: torpor export writes one that can.

    [bold]Examples[/]

    [cyan]torpor export-kv notes notes.safetensors[/]
    [cyan]torpor export-kv notes@before-refactor /tmp/kv.safetensors --json[/]
    """
    output = Output(as_json=as_json)
    require_file(target, "export-kv")
    place = choose_store(store, socket)
    with open_store(place) as opened:
        row = opened.resolve_version(version, look=True)
        try:
            with output.progress("exporting", unit="bytes") as on_progress:
                report = opened.export_tensors(
                    row.uri,
                    row.bundle_id,
                    target,
                    kind=kind,
                    labels=label or None,
                    replacing=overwrite,
                    on_progress=on_progress,
                )
        except KeyboardInterrupt:
            raise Interrupted(f"Interrupted. {target} is there whole or not at all.") from None
        ignore_interrupts()
    if output.told("export-kv", report):
        return
    output.line(
        f"{plain(report.session)}  version {report.version} exported: {format_plural(report.tensors, 'tensor')} of"
        f" {format_plural(report.token_count, 'token')}, {format_bytes(report.file_bytes)} in {plain(report.path)}"
    )
    if report.unread_tokens:
        output.remark(
            f"{format_plural(report.unread_tokens, 'token')} behind these have no arrays yet, as the daemon had to stop"
            " before they were written: wake the session, put it to sleep, and export it again"
        )
