"""A copy of the package with code put into it, for tests of the code that an addition costs."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

ROOT = Path(__file__).parents[1]

Ask = Callable[..., subprocess.CompletedProcess[str]]


def copy_package(folder: Path, layers: Iterable[str] = ("memvid", "snapshot", "daemon", "socket_api", "cli")) -> Path:
    """Copy the package, or some layers of it, into a folder, from which Python imports it as `torpor`."""
    package = folder / "torpor"
    for name in layers:
        shutil.copytree(ROOT / name, package / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("__init__.py", "errors.py", "places.py", "records.py", "spellings.py"):
        shutil.copy(ROOT / name, package)
    return package


def put(file: Path, what: str, *, before: str = "", behind: str = "", instead_of: str = "") -> None:
    """Write something into a file: before a text that stands there once, behind it, or instead of it; or at the end."""
    text, at = file.read_text(), before or behind or instead_of
    if not at:
        file.write_text(text + what)
        return
    require_once(file, at)
    file.write_text(text.replace(at, behind + what + before))


def require_once(file: Path, text: str) -> None:
    """Whether a text stands in a file once."""
    count = file.read_text().count(text)
    assert count == 1, f"{text!r} stands in {file} {count} times"


def put_import(file: Path, what: str) -> None:
    """Write an import into a file, where no other import can move it."""
    put(file, f"{what}\n", behind="from __future__ import annotations\n")


def put_into_class(file: Path, name: str, what: str) -> None:
    """Write something at the end of a class."""
    lines = file.read_text().splitlines(keepends=True)
    tree = ast.parse("".join(lines))
    (end,) = [each.end_lineno for each in tree.body if isinstance(each, ast.ClassDef) and each.name == name]
    file.write_text("".join([*lines[:end], what, *lines[end:]]))


def require_sound(package: Path) -> None:
    """Whether each file that was changed compiles, and knows every name that it uses. To import them takes the seconds
    that MLX does: the tests that run the copy show that."""
    changed = [each for each in sorted(package.rglob("*.py")) if _is_changed(each, package)]
    assert changed
    names = ["ruff", "check", "--isolated", "--no-cache", "--select", "F811,F821,F822", "--quiet", *map(str, changed)]
    done = subprocess.run([sys.executable, "-m", *names], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def environment_of(folder: Path) -> dict[str, str]:
    """The environment of a program that imports the copy in a folder, and keeps what it keeps there."""
    homes = {f"XDG_{name}_HOME": str(folder / name.lower()) for name in ("CACHE", "DATA", "STATE", "CONFIG")}
    return {**os.environ, **homes, "PYTHONPATH": str(folder)}


@contextmanager
def serving(folder: Path, *options: str, **environment: str) -> Iterator[tuple[IO[str], Ask]]:
    """Serve the copy in a folder on its `t.sock`. Gives what the daemon tells, behind its first line, and what runs a
    program beside it, as `python -c`."""
    around = {**environment_of(folder), **environment}
    command = [sys.executable, "-m", "torpor.cli.main", "serve", "--store", str(folder / "store")]
    command += ["--socket", str(folder / "t.sock"), *options]

    def ask(program: str, *arguments: object) -> subprocess.CompletedProcess[str]:
        asking = [sys.executable, "-c", program, *map(str, arguments)]
        return subprocess.run(asking, env=around, capture_output=True, text=True, check=False, timeout=60)

    with subprocess.Popen(command, env=around, stdout=subprocess.PIPE, text=True) as daemon:
        try:
            assert daemon.stdout is not None
            assert "serves" in daemon.stdout.readline()
            yield daemon.stdout, ask
        finally:
            daemon.terminate()
            daemon.wait(timeout=60)


def _is_changed(file: Path, package: Path) -> bool:
    original = ROOT / file.relative_to(package)
    return not original.exists() or original.read_bytes() != file.read_bytes()
