"""`make cache-kinds`: the matrix of cache kinds, every row of it, into build/cache-kinds.json and a document.

    python tests/snapshot/matrix/run.py [--row ROW] [--dtype DTYPE] [--jobs N] [--json PATH] [--document PATH]

Ends with 1 where a row is not as it should be. What mlx-lm itself cannot run on this machine is listed, and fails
nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from matrix.architectures import DTYPES, Case, cases
from matrix.report import document
from matrix.rows import Row, run_row

ROOT = Path(__file__).resolve().parents[3]


def main() -> int:
    """Run what is asked for, print every row, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--row", action="append", help="only this row; may be given more than once")
    parser.add_argument("--dtype", action="append", choices=sorted(DTYPES), help="only in this type")
    parser.add_argument("--jobs", type=int, default=2, help="rows at a time")
    parser.add_argument("--json", type=Path, default=ROOT / "build" / "cache-kinds.json")
    parser.add_argument("--document", type=Path, help="where to write the document, for a whole run")
    asked = parser.parse_args()
    wanted = [case for case in cases() if not asked.row or case.name in asked.row]
    if asked.row and len(wanted) != len(set(asked.row)):
        parser.error(f"there are no rows {sorted(set(asked.row) - {case.name for case in wanted})}")
    dtypes = asked.dtype or list(DTYPES)
    if asked.document and (asked.row or asked.dtype):
        parser.error("a document is written of a whole run only")
    started = time.monotonic()
    with ThreadPoolExecutor(asked.jobs) as pool:
        running = [pool.submit(_run, case, dtype) for case in wanted for dtype in dtypes]
        rows = [each.result() for each in running]
    asked.json.parent.mkdir(parents=True, exist_ok=True)
    asked.json.write_text(json.dumps([asdict(row) for row in rows], indent=1), encoding="utf-8")
    if asked.document:
        asked.document.write_text(document(rows), encoding="utf-8")
    wrong = [row for row in rows if not row.is_right and not row.cannot_run]
    idle = [row for row in rows if row.cannot_run]
    print(
        f"{len(rows)} rows in {time.monotonic() - started:.0f} s: {len(rows) - len(wrong) - len(idle)} right, "
        f"{len(wrong)} wrong, {len(idle)} that mlx-lm cannot run here."
    )
    return 1 if wrong else 0


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
