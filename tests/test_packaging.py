"""The built wheel: one name at the top level, and everything that the tree has (QC4)."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torpor

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("memvid", "snapshot", "daemon", "socket_api", "cli")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Built from a copy, because setuptools leaves its build folder in the source tree.
    source = tmp_path_factory.mktemp("source")
    for folder in FOLDERS:
        # Bytecode left out: what other tests compile meanwhile has another name a moment later.
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    at_root = ("__init__.py", "errors.py", "places.py", "records.py", "spellings.py", "tokenizer_files.py")
    for name in (*at_root, "py.typed", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    out = tmp_path_factory.mktemp("dist")
    # With the setuptools of this environment: a test fetches nothing.
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(source)]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    (path,) = out.glob("*.whl")
    return path


@pytest.mark.one_in(2)
def test_the_wheel_puts_nothing_but_torpor_at_the_top_level(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        top = {name.split("/")[0] for name in archive.namelist()}
    assert top == {"torpor", f"torpor-{torpor.__version__}.dist-info"}


@pytest.mark.one_in(1)
def test_the_wheel_holds_every_module_and_the_demo_model_qc4(wheel: Path) -> None:
    expected = {
        f"torpor/{path.relative_to(ROOT)}"
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    } | {
        "torpor/__init__.py",
        "torpor/errors.py",
        "torpor/places.py",
        "torpor/tokenizer_files.py",
        "torpor/records.py",
        "torpor/spellings.py",
        "torpor/py.typed",
    }
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if name.startswith("torpor/")}
        assert packed == expected
        for name in packed:
            assert archive.read(name) == (ROOT / name.removeprefix("torpor/")).read_bytes(), name
    assert "torpor/daemon/demo_model/model.safetensors" in packed


def test_shipped_weights_are_at_most_12_mb(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        assert archive.getinfo("torpor/daemon/demo_model/model.safetensors").file_size <= 12_000_000
