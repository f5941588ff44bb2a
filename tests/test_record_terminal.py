"""The recording of a command in the README: what a terminal showed at the end, as text, in the order of its lines."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import record_terminal

SCRIPT = Path(record_terminal.__file__)


def test_a_command_is_recorded_as_a_picture_of_its_last_lines(tmp_path: Path) -> None:
    """What a line was before it was written over, and bars of progress, are not in it."""
    printed = r"\033[1mbold\033[0m <b> & more\nbefore\r\033[2K\033[32mafter\033[0m\n━━━ 50 percent\nlast\n"
    out = tmp_path / "new" / "picture.svg"
    done = subprocess.run(
        [sys.executable, SCRIPT, out, "printf", printed], capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, done.stderr
    texts = ["".join(each.itertext()) for each in ET.parse(out).iter("{http://www.w3.org/2000/svg}text")]
    assert texts == ["bold <b> & more", "after", "last"]
    assert 'fill="#7ee787">after' in out.read_text()


def test_a_command_that_fails_leaves_no_picture(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, SCRIPT, tmp_path / "p.svg", "false"], capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 1
    assert "false did not end well" in done.stderr
    assert not (tmp_path / "p.svg").exists()


def test_waiting_is_cut_and_the_order_stays() -> None:
    lines = record_terminal.shortened([(0.1, "a"), (90.0, "b"), (90.2, "c")])
    assert [text for _, text in lines] == ["a", "b", "c"]
    assert lines[1][0] - lines[0][0] == record_terminal.MOST_S
    assert 0 < lines[2][0] - lines[1][0] < 0.3
