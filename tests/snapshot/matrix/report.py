"""The document of a whole run: what the kinds of cache are, and the matrix, with no row left out."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from itertools import groupby
from typing import Any

from torpor.snapshot.checkpoints import CHECKPOINT_TOKENS, DEFAULT_BUDGET_BYTES
from torpor.tests.snapshot.matrix.rows import BRANCHES, Row, is_ok

# What stands in the table of kinds: the stored kind, mlx-lm's class, what is cut by token, what is whole state, and how
# far a session that has it can be woken at an earlier token without computing.
KINDS = (
    ("kv/1", "KVCache", "keys, values", "-", "any token"),
    ("kvq/1", "QuantizedKVCache", "keys and values as packed integers, their scales and biases", "-", "any token"),
    ("kvcat/1", "ConcatenateKVCache", "keys, values", "-", "any token"),
    (
        "ring/1",
        "RotatingKVCache",
        "-",
        "the rows of the window in the order in which they lie, tokens read, place of the next row",
        "any token while the window has not been passed; behind that where whole state was kept",
    ),
    (
        "chunk/1",
        "ChunkedKVCache",
        "-",
        "the rows of the current chunk and of what is left of the one before it, tokens read, first token held",
        "any token while nothing has been dropped at the front; behind that where whole state was kept",
    ),
    ("arrays/1", "ArraysCache", "-", "every array, and which there are", "where whole state was kept"),
    (
        "pooled/1",
        "LayerCache of deepseek_v41",
        "-",
        "window, latents of the closed groups, their index keys, rows of the open group, tokens read",
        "where whole state was kept",
    ),
)

_NOTES = f"""\
A `CacheList` is no kind: each cache in it is kept by itself. A cache that its model never fills is known as such and
kept empty. Kinds met in the matrix: {{met}}.

What a session of several kinds can do is what the least able of them can. Whole state is kept at the token at which the
session was put to sleep and, of models with caches that need it, every {CHECKPOINT_TOKENS} tokens, or less often where
more would take over {DEFAULT_BUDGET_BYTES >> 20} MiB."""

_CHECKS = """\
Each row is an architecture of mlx-lm's model folder with a small configuration and seeded random weights, in float32
and in bfloat16 (there with experts quantized to 8 bits, for MLX has no bfloat16 product of gathered matrices on a CPU).
A process reads sessions of pseudo-random tokens as the daemon does, puts each to sleep, and goes on with it: the
control that never slept. A new process builds the same network (the digest of its weights is compared), wakes the
sessions from the store, and compares, bit for bit:

- the ledger, all that the caches hold of it (looked at without the adapters that keep it), and the logits;
- the next 16 greedy tokens, the logits of each, and all that the caches hold after them;
- after a second sleep, which refers to the blocks of the first, and a second wake: ledger, caches and logits once more.

A plain wake must compute no token. The columns `1` to `620` are sessions of that many tokens. Windows and chunks are of
64 tokens, so `1` and `48` lie within them and the others are past them; only those of deepseek_v41 are of 32, and that
of mistral3 is of 100. The last 70 tokens of `620` were read one by one, which takes a window once round its ring.

The columns `30 of 48` to `610 of 620` are time travel: the session woken at an earlier token, gone on from there, and
slept as a session of its own. It is compared with one that never slept and stands at that token: one that was cut back,
where all its caches can be, and one that has read as far in the same model calls, where they cannot. In brackets stands
how many tokens had to be computed; one, where only the logits of the last token were missing.

The column `branches` is two branches of one prompt of 180 tokens, past all windows, as a tree of the daemon has them.
Each reads 1 or 9 tokens of its own, and decodes 12, alone and beside the other. They are compared with the network
alone, on mlx-lm's own caches. A cell names the ways that caches go ([decision
53](../decisions/53-branches-share-runs-and-attention-follows-segments.md)):

- *shared*: branches have memory together, and their attention goes segment by segment. It may differ from the network
  alone in the last bits: in float32 by 0.01 in a log-probability at most, in bfloat16 by 0.25, where a network with
  experts may choose another one at three of thirteen tokens.
- *gathered*: they have memory together, and it is copied into a row for each token. *Copied*: each has its own. Where
  none is shared, all is equal to the bit.

Beside the other, a branch must have the bits that it has alone. Those that mlx-lm decodes in a batch with padding are
compared as shared ones are.

A cell with one word in it is of both types.

`olmo` is read one token at a time, because mlx-lm's masks for it fit no more, and with an empty module in the place of
a package that mlx-lm only looks for. The configurations are in `tests/snapshot/matrix/architectures.py`; a test
compares their names with the modules of the installed mlx-lm, so that a new one cannot be forgotten."""


def document(rows: Sequence[Row]) -> str:
    """The whole text.

    Raises:
        ValueError: a kind has been met that the table does not tell of.
    """
    by_name = [(name, list(found)) for name, found in groupby(rows, key=lambda row: row.name)]
    return "\n".join(
        [
            "# Kinds of cache, and the architectures that keep them",
            "",
            "`make cache-kinds` writes this document; do not edit it.",
            "",
            "## Kinds",
            "",
            *_table(
                ("stored kind", "mlx-lm's class", "cut by token", "whole state", "earlier tokens without computing"),
                KINDS,
            ),
            "",
            _NOTES.format(met=_met(rows)),
            "",
            "## What is checked",
            "",
            _CHECKS,
            "",
            "## Totals",
            "",
            *_totals(rows),
            "",
            "## The matrix",
            "",
            *_matrix(by_name),
            "",
            *_reasons("What mlx-lm cannot run on this machine", [row for row in rows if row.cannot_run]),
            *_reasons("What is not as it should be", [row for row in rows if _is_wrong(row)]),
            "## How to run it",
            "",
            "`make cache-kinds` runs all of it and writes this document. `python tests/snapshot/matrix/run.py --row",
            "qwen3 --dtype float32` runs one row and writes no document. `make test` runs seven rows of different",
            "kinds, `make test-all` all of them.",
            "",
        ]
    )


def _is_wrong(row: Row) -> bool:
    return not row.is_right and not row.cannot_run


def _met(rows: Iterable[Row]) -> str:
    met = {kind for row in rows for _, kind, _ in row.facts.get("caches", ())}
    unknown = met - {kind[0] for kind in KINDS}
    if unknown:
        raise ValueError(f"the table of kinds does not tell of {sorted(unknown)}")
    return ", ".join(f"`{kind}`" for kind in sorted(met))


def _totals(rows: Sequence[Row]) -> list[str]:
    right = sum(row.is_right for row in rows)
    wrong = sum(_is_wrong(row) for row in rows)
    idle = sum(bool(row.cannot_run) for row in rows)
    checks = sum(len(row.checks) for row in rows)
    sound = sum(is_ok(found) for row in rows for found in row.checks.values())
    packages = ", ".join(f"{name} {version(name)}" for name in ("mlx", "mlx-lm", "numpy"))
    modules, names, dtypes = ({getattr(row, part) for row in rows} for part in ("module", "name", "dtype"))
    size = f"{len(modules)} architectures; {len(names)} with the caches that can be asked for in place of a model's own"
    return [
        f"- {size}; each in {len(dtypes)} types: {len(rows)} rows.",
        f"- {right} right, {wrong} wrong, {idle} that mlx-lm cannot run on this machine.",
        f"- {sound} of {checks} checks came to what they should.",
        f"- Branches: {_branches_of(rows)}.",
        f"- {packages}, CPython {platform.python_version()}, {platform.system()} {platform.machine()}, on the CPU.",
    ]


def _branches_of(rows: Sequence[Row]) -> str:
    """How many rows go each way."""
    found = Counter(_routes(row) for row in rows if is_ok(row.checks.get(BRANCHES, "")))
    return "; ".join(f"{routes}: {count} rows" for routes, count in found.most_common())


def _routes(row: Row) -> str:
    return row.checks[BRANCHES].partition(", ")[2].replace(", ", " and ")


def _matrix(by_name: Sequence[tuple[str, list[Row]]]) -> list[str]:
    found = dict.fromkeys(check for _, rows in by_name for row in rows for check in row.checks)
    columns = sorted(found, key=lambda check: check != BRANCHES)
    lines = []
    for name, rows in by_name:
        facts = next((row.facts for row in rows if row.facts), {})
        lines.append(
            (
                f"`{name}`" if ":" not in name else name,
                _caches(facts["caches"]) if "caches" in facts else ", ".join(facts.get("classes", ())),
                f"{facts['parameters']:,}" if "parameters" in facts else "",
                *(_cell(rows, column) for column in columns),
            )
        )
    return _table(("architecture", "caches", "parameters", *columns), lines)


def _cell(rows: Sequence[Row], column: str) -> str:
    """What both types came to: one word where they came to the same, each by its name where not."""
    found = [(row.dtype, _said(row, column)) for row in rows]
    said = {text for _, text in found}
    return said.pop() if len(said) == 1 else "; ".join(f"{dtype}: {text}" for dtype, text in found)


def _said(row: Row, column: str) -> str:
    if row.cannot_run:
        return "cannot run"
    if row.failed or column not in row.checks:
        return "**wrong**"
    check = row.checks[column]
    if not is_ok(check):
        return "**wrong**"
    if column == BRANCHES:
        return _routes(row)
    _, _, computed = check.partition(", ")
    return f"ok ({computed.split()[0]})" if computed else "ok"


def _caches(caches: Sequence[Any]) -> str:
    """The caches of a model's list by their kinds, equal ones together: `kv/1 x 2`; those of one `CacheList` in
    brackets."""
    lists: dict[str, list[str]] = {}
    for path, kind, in_use in caches:
        lists.setdefault(path.split(".")[0], []).append(kind if in_use else f"{kind} never filled")
    nested = {path.split(".")[0] for path, _, _ in caches if "." in path}
    counted = Counter(f"[{', '.join(kinds)}]" if place in nested else kinds[0] for place, kinds in lists.items())
    return ", ".join(text if count == 1 else f"{count} x {text}" for text, count in counted.items())


def _reasons(title: str, rows: Sequence[Row]) -> list[str]:
    if not rows:
        return []
    lines = [f"## {title}", ""]
    for row in rows:
        told = [row.cannot_run or row.failed] if row.cannot_run or row.failed else []
        told += [f"{check}: {found}" for check, found in row.checks.items() if not is_ok(found)]
        lines.append(f"- `{row.name}` in {row.dtype}: {'; '.join(told)}")
    return [*lines, ""]


def _table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> list[str]:
    told = [head, ["---"] * len(head), *lines]
    return [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in told]
