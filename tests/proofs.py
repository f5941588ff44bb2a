"""What the tests prove, by names, and what of it a change has lost.

    python tests/proofs.py BEFORE [AFTER]

BEFORE and AFTER are commits; without AFTER the files as they lie are meant. A proof is an id of an invariant or of a
threat in the name or the docstring of a test, a mutant, a scenario, a sweep, a fault that is planted, a target of the
fuzzer, or an input that is kept. What BEFORE has and AFTER has not is named, and the status is 1 then. An id that fewer
tests bear is told, and is not lost. What may go, with its subject, stands in GONE with its reason.

The files are parsed and not run, so the harness of an old commit need not work any more. A name that no display of the
source holds as a text is not found.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]

GONE: Final[dict[tuple[str, str], str]] = {}
"""Proofs that went with what they were about, by kind and name, and why."""

CALLS: Final = {"Mutant": "mutant", "Scenario": "scenario", "Fault": "fault", "Plant": "plant"}
"""What a call of such a name makes: its first argument is the name of a proof."""

DISPLAYS: Final = {
    "SWEEPS": "sweep",
    "PAIRED": "scenario of two faults",
    "HOWS": "damage",
    "_OPERATIONS": "operation beside a damaged file",
    "PLANTS": "plant",
    "SOON_FOUND": "plant that make test hunts",
    "STEPS": "request that is killed",
}
"""What the keys of such a dictionary, or the members of such a tuple, are."""

_KEPT_INPUTS: Final = re.compile(r"/(corpus|data|release_fixtures)/")
_ID_IN_NAME: Final = re.compile(r"(?<![a-z0-9])(qc|qx|lv|br|lp|gm|ms|t)(\d+)(?![a-z0-9])")
_ID_IN_TEXT: Final = re.compile(r"\b(QC|QX|LV|BR|LP|GM|MS|T)(\d+)\b")
_THREATS: Final = re.compile(r"threats?[_ ]((?:\d+(?:,?[_ ])?(?:(?:and|to)[_ ])?)+)", re.IGNORECASE)

Proofs = dict[str, Counter[str]]
"""How often each kind has each name."""


def files_of(commit: str | None) -> dict[str, bytes]:
    """The files of tests/ by their path from the root, in a commit, or as they lie. Raises CalledProcessError."""
    if commit is None:
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "tests"],
            cwd=ROOT, capture_output=True, text=True, check=True,
        ).stdout.split("\0")  # fmt: skip
        return {name: (ROOT / name).read_bytes() for name in listed if name and (ROOT / name).is_file()}
    packed = subprocess.run(["git", "archive", commit, "tests"], cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        members = {member.name: archive.extractfile(member) for member in archive if member.isfile()}
        return {name: file.read() for name, file in members.items() if file is not None}


def proofs_in(files: Mapping[str, bytes]) -> Proofs:
    """What the files prove: how often each name stands there, by kind."""
    found: Proofs = {}
    for path, data in files.items():
        if not path.endswith(".py"):
            if _KEPT_INPUTS.search(path):
                found.setdefault("kept input", Counter())[path] += 1
            continue
        tree = ast.parse(data, path)
        for kind, name in (*_ids(tree, Path(path).name), *_named(tree)):
            found.setdefault(kind, Counter())[name] += 1
    return found


def ids_in(name: str, text: str) -> set[str]:
    """The ids in the name of a test and in its docstring."""
    found = {f"{family.upper()}{number}" for family, number in _ID_IN_NAME.findall(name.replace("_", " "))}
    found |= {f"{family}{number}" for family, number in _ID_IN_TEXT.findall(text)}
    for listed in (*_THREATS.findall(name), *_THREATS.findall(text)):
        numbers = [int(number) for number in re.findall(r"\d+", listed)]
        if re.search(r"\d[_ ]to[_ ]\d", listed):
            numbers = [*range(numbers[0], numbers[-1] + 1)]
        found |= {f"threat {number}" for number in numbers}
    return found


def _ids(tree: ast.Module, name: str) -> Iterator[tuple[str, str]]:
    """The ids of each test of a file, and those of its docstring, which are for all of them."""
    if not name.startswith("test_"):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
            yield "test", node.name
            yield from (("id", one) for one in ids_in(node.name, ast.get_docstring(node) or ""))
        elif isinstance(node, ast.Module | ast.ClassDef):
            yield from (("id", one) for one in ids_in("", ast.get_docstring(node) or ""))


def _named(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """What mutants, scenarios, sweeps, faults and targets of the fuzzer a file has."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name(id=maker), args=[ast.Constant(value=str(name)), *_]) if maker in CALLS:
                yield CALLS[maker], name
            case ast.Call(func=ast.Name(id=maker), args=[ast.Name(id=name), *_]) if maker in CALLS and name.isupper():
                yield CALLS[maker], name
            case ast.Call(func=ast.Name(id="_by_test"), args=[ast.Dict(values=by_test)]):
                yield from (("mutant", name) for mutants in by_test for name in _members(mutants))
            case ast.Assign(targets=[ast.Name(id=assigned)], value=value) if assigned in DISPLAYS:
                yield from ((DISPLAYS[assigned], name) for name in _members(value))
            case ast.AnnAssign(target=ast.Name(id=assigned), value=ast.expr() as value) if assigned in DISPLAYS:
                yield from ((DISPLAYS[assigned], name) for name in _members(value))
            case ast.ClassDef(name=fuzzed, body=body) if fuzzed.endswith("Target"):
                for statement in body:
                    match statement:
                        case ast.Assign(targets=[ast.Name(id="name")], value=ast.Constant(value=str(name))):
                            yield "target of the fuzzer", name


def _members(display: ast.expr) -> Iterator[str]:
    """The keys of a dictionary, or the members of a tuple, as far as they are texts or names of constants."""
    match display:
        case ast.Dict(keys=keys, values=values):
            for key, value in zip(keys, values, strict=True):
                yield from _members(value) if key is None else _names(key)
        case ast.DictComp(key=key, generators=[ast.comprehension(iter=names)]):
            yield from (f"{ast.unparse(key)}: {name}" for name in _members(names))
        case ast.Tuple(elts=members) | ast.List(elts=members):
            for member in members:
                yield from _names(member)


def _names(member: ast.expr) -> Iterator[str]:
    match member:
        case ast.Constant(value=str(name)):
            yield name
        case ast.Name(id=name) if name.isupper():
            yield name


def lost(before: Proofs, after: Proofs) -> list[tuple[str, str]]:
    """What was proven and is not any more, by kind and name. A test is none by itself: its ids are."""
    return [
        (kind, name)
        for kind, names in sorted(before.items())
        for name in sorted(names)
        if kind != "test" and name not in after.get(kind, ()) and (kind, name) not in GONE
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", help="a commit")
    parser.add_argument("after", nargs="?", help="another one; the files as they lie")
    wanted = parser.parse_args()
    before, after = proofs_in(files_of(wanted.before)), proofs_in(files_of(wanted.after))
    for kind in sorted({*before, *after}):
        names, others = before.get(kind, Counter()), after.get(kind, Counter())
        print(f"{kind}: {len(names)} before, {len(others)} after")
    for name, count in sorted(before.get("id", Counter()).items()):
        if 0 < after.get("id", Counter())[name] < count:
            print(f"  fewer tests bear {name}: {count} before, {after['id'][name]} after")
    missing = lost(before, after)
    for kind, name in missing:
        print(f"  LOST {kind}: {name}")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
