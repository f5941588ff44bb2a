"""A command on a terminal, recorded as an SVG that plays once: each line appears when it came, and what is above
scrolls out. Waiting is cut to a second and a half, and progress bars are left out.

    .venv/bin/python scripts/record_terminal.py docs/images/demo.svg .venv/bin/torpor demo
"""

from __future__ import annotations

import os
import pty
import re
import struct
import sys
import termios
import time
from fcntl import ioctl
from html import escape
from itertools import pairwise
from pathlib import Path

COLUMNS, ROWS = 100, 26
CELL_PX, LINE_PX, EDGE_PX = 8.4, 18, 14
MOST_S = 1.5
"""From one line to the next."""
COLORS = {1: "#ff7b72", 2: "#7ee787", 3: "#e3b341", 4: "#79c0ff", 5: "#d2a8ff", 6: "#76e3ea"}
_STYLE = re.compile(r"\x1b\[([0-9;]*)m")
_OTHER = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")

Line = tuple[float, str]


def recorded(command: list[str]) -> list[Line]:
    """The lines that a command leaves on a terminal, and the seconds when each was whole."""
    lines: list[Line] = []
    rest, begun = "", time.monotonic()

    def read(end: int) -> bytes:
        nonlocal rest
        data = os.read(end, 1 << 16)
        *whole, rest = (rest + data.decode(errors="ignore")).split("\n")
        lines.extend((time.monotonic() - begun, line.rstrip("\r").rpartition("\r")[2]) for line in whole)
        return data

    def sized(end: int) -> bytes:
        ioctl(end, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        return read(end)

    os.environ |= {"TERM": "xterm-256color", "COLUMNS": str(COLUMNS)}
    if pty.spawn(command, sized) != 0:
        sys.exit(f"{' '.join(command)} did not end well")
    return [(at, line) for at, line in lines if "━" not in line]


def shortened(lines: list[Line]) -> list[Line]:
    """The same without long waits."""
    found, at = [], 0.5
    for (before, _), (now, text) in pairwise([(0.0, ""), *lines]):
        at += min(now - before, MOST_S)
        found.append((at, text))
    return found


def spans(text: str) -> str:
    """A line as SVG: bold, dim, and the six colors."""
    parts = _STYLE.split(_OTHER.sub(lambda found: found[0] if found[0].endswith("m") else "", text))
    style, told = {"weight": "", "fill": ""}, []
    for at, part in enumerate(parts):
        if at % 2:
            for code in map(int, filter(None, (part or "0").split(";"))):
                if code in (0, 22, 39):
                    style = {"weight": "", "fill": ""} if code == 0 else style | {"fill": ""}
                elif code == 1:
                    style["weight"] = ' font-weight="700"'
                elif code == 2:
                    style["fill"] = ' fill="#8b949e"'
                elif code % 10 in COLORS and code // 10 in (3, 9):
                    style["fill"] = f' fill="{COLORS[code % 10]}"'
        elif part:
            told.append(f"<tspan{style['weight']}{style['fill']}>{escape(part)}</tspan>")
    return "".join(told)


def drawn(lines: list[Line], title: str) -> str:
    """The picture."""
    width, height = COLUMNS * CELL_PX + 2 * EDGE_PX, ROWS * LINE_PX + 2 * EDGE_PX
    whole = lines[-1][0]
    steps = [
        f"{100 * at / whole:.2f}% {{ transform: translateY({-LINE_PX * max(0, number + 1 - ROWS)}px) }}"
        for number, (at, _) in enumerate(lines)
    ]
    texts = [
        f'<text y="{LINE_PX * (number + 1) - 5}" style="animation-delay: {at:.2f}s">{spans(text)}</text>'
        for number, (at, text) in enumerate(lines)
        if text.strip()
    ]
    seen = f'viewBox="0 0 {width:g} {height}" role="img" aria-label="{escape(title)}"'
    return f"""<svg xmlns="http://www.w3.org/2000/svg" {seen}>
<style>
text {{ font: 14px ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace; fill: #e6edf3; white-space: pre; }}
text {{ animation: appear 0.01s both; }}
.all {{ animation: scroll {whole:.2f}s step-end both; }}
@keyframes appear {{ from {{ opacity: 0 }} }}
@keyframes scroll {{ 0% {{ transform: none }} {" ".join(steps)} }}
@media (prefers-reduced-motion: reduce) {{ text, .all {{ animation-duration: 0s; animation-delay: 0s !important; }} }}
</style>
<rect width="{width:g}" height="{height}" rx="8" fill="#0d1117"/>
<svg x="{EDGE_PX}" y="{EDGE_PX}" width="{width - 2 * EDGE_PX:g}" height="{ROWS * LINE_PX}"><g class="all">
{chr(10).join(texts)}
</g></svg>
</svg>
"""


def main() -> None:
    """Record a command."""
    out, *command = sys.argv[1:]
    picture = drawn(shortened(recorded(command)), " ".join(command))
    Path(out).parent.mkdir(parents=True, exist_ok=True)
    Path(out).write_text(picture, encoding="utf-8")
    print(f"{out}: {len(picture.encode()):,} bytes")


if __name__ == "__main__":
    main()
