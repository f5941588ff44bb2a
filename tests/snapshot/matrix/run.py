"""`make cache-kinds`: the matrix of cache kinds, every row of it, into build/cache-kinds.json and a document.

    python tests/snapshot/matrix/run.py [--row ROW] [--dtype DTYPE] [--jobs N] [--json PATH] [--document PATH]
        [--resume]

Each row is in the JSON file as soon as it is done, so `--resume` goes on with a run that was ended. Ends with 1 where a
row is not as it should be. What mlx-lm itself cannot run on this machine is listed, and fails nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

from torpor.tests.snapshot.matrix.architectures import DTYPES, Case, cases
from torpor.tests.snapshot.matrix.report import document
from torpor.tests.snapshot.matrix.rows import Row, run_row

ROOT = Path(__file__).resolve().parents[3]


def main() -> int:
    """Run what is asked for, print every row, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--row", action="append", help="only this row; may be given more than once")
    parser.add_argument("--dtype", action="append", choices=sorted(DTYPES), help="only in this type")
    parser.add_argument("--jobs", type=int, default=2, help="rows at a time")
    parser.add_argument("--json", type=Path, default=ROOT / "build" / "cache-kinds.json")
    parser.add_argument("--document", type=Path, help="where to write the document, for a whole run")
    parser.add_argument("--resume", action="store_true", help="keep the rows that the JSON file has")
    asked = parser.parse_args()
    wanted = [case for case in cases() if not asked.row or case.name in asked.row]
    if asked.row and len(wanted) != len(set(asked.row)):
        parser.error(f"there are no rows {sorted(set(asked.row) - {case.name for case in wanted})}")
    dtypes = asked.dtype or list(DTYPES)
    if asked.document and (asked.row or asked.dtype):
        parser.error("a document is written of a whole run only")
    started, done = time.monotonic(), Done(asked.json, keep=asked.resume)
    with ThreadPoolExecutor(asked.jobs) as pool:
        rows = list(pool.map(lambda each: done.row(*each), [(case, dtype) for case in wanted for dtype in dtypes]))
    if asked.document:
        asked.document.write_text(document(rows), encoding="utf-8")
    wrong = [row for row in rows if not row.is_right and not row.cannot_run]
    idle = [row for row in rows if row.cannot_run]
    print(
        f"{len(rows)} rows in {time.monotonic() - started:.0f} s: {len(rows) - len(wrong) - len(idle)} right, "
        f"{len(wrong)} wrong, {len(idle)} that mlx-lm cannot run here."
    )
    return 1 if wrong else 0


class Done:
    """The rows that are done, in a file. keep: those that it has already."""

    def __init__(self, path: Path, *, keep: bool) -> None:
        self._path = path
        self._lock = threading.Lock()
        kept = json.loads(path.read_text(encoding="utf-8")) if keep and path.exists() else []
        self._rows = {(each["name"], each["dtype"]): Row(**each) for each in kept}

    def row(self, case: Case, dtype: str) -> Row:
        """A row, which is run unless it is done."""
        key = (case.name, dtype)
        if key not in self._rows:
            found = _run(case, dtype)
            with self._lock:
                self._rows[key] = found
                self._path.parent.mkdir(parents=True, exist_ok=True)
                partial = self._path.with_suffix(".partial")
                partial.write_text(json.dumps([asdict(row) for row in self._rows.values()], indent=1), encoding="utf-8")
                partial.replace(self._path)
        return self._rows[key]


def _run(case: Case, dtype: str) -> Row:
    row = run_row(case, dtype)
    if row.is_right:
        print(f"{row.name} {dtype}: right", flush=True)
    else:
        why = row.cannot_run or row.failed or "; ".join(f"{check}: {found}" for check, found in row.checks.items())
        print(f"{row.name} {dtype}: {'CANNOT RUN' if row.cannot_run else 'WRONG'}: {why}", flush=True)
    return row


if __name__ == "__main__":
    sys.exit(main())
