"""The downloads of models, shown one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from ...memvid.units import format_bytes
from .output import OnProgress, Output, plain


@contextmanager
def downloads_on(output: Output) -> Iterator[Callable[[str, int, int], None]]:
    """Gives the function that takes reports: the name of a model, the bytes of it that are there, and those of all. For
    each model a line stays; its bar goes."""
    with ExitStack() as shown:
        bars: dict[str, OnProgress] = {}

        def on_download(model: str, done: int, total: int) -> None:
            output.notice({"event": "download", "model": model, "done_bytes": done, "total_bytes": total})
            if model not in bars:
                shown.close()
                here = f", {format_bytes(done)} of it is here" if done * 100 > total else ""
                output.remark(f"[dim]downloading[/] {plain(model)} [dim]({format_bytes(total)}{here})[/]")
                bars[model] = shown.enter_context(output.progress(f"downloading {plain(model)}", unit="bytes"))
            bars[model](done, total)
            if done == total:
                shown.close()

        yield on_download
