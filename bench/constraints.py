"""Answers that are held to JSON schemas: whether each is valid, and what the mask of a token costs.

Schemas are made by chance from a fixed seed: objects in objects, fields that may be left out, lists, enumerations,
numbers with bounds, strings with lengths, patterns and letters of many scripts, choices between forms, references. The
demo model draws four answers to each, 16 at once, at temperatures from 0.3 to 2. Each answer is read by Python's JSON
and checked by `jsonschema`, which shares no code with the grammar's compiler. An answer that `max_tokens` cut is no
answer: it is counted apart, and another is drawn.

A mask is what `Constrained.allowed` gives before a token is drawn: which tokens the grammar allows next. Its time is
taken twice: by the clock, with whatever else the machine does, and as processor time of the engine's thread. The bound
is 1 ms at the 99th percentile.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

# In this order: torpor chooses the BLAS that MLX, which is imported after it, will use.
# isort: off
from torpor.daemon.api.constraints import Constraint
from torpor.daemon.api.sampling import Sampling
from torpor.daemon.engine.constrained import Constrained
from torpor.daemon.options.serve_options import ServeOptions
from torpor.daemon.service import Service
import jsonschema
import numpy as np
from figures import OURS, PEER, parser_for, plotted, save
# isort: on

ANSWERS, QUICK_ANSWERS = 10_000, 40
ANSWERS_A_SCHEMA = 4
AT_ONCE = 16
MAX_TOKENS = 250
DEEPEST = 2
BOUND_S = 1e-3
PERCENTILES = (50, 90, 99, 99.9, 100)
TEMPERATURES = (0.3, 0.7, 1.0, 1.5, 2.0)
WORDS = ("kind", "größe", "名前", "имя", "e-mail", "a b", 'quo"te', "back\\slash", "emoji 🦉", "café", "price", "rows")
PATTERNS = (r"^[A-Z]{2}-[0-9]{3}$", r"^(low|mid|high)$", r"^[a-f0-9]{8}$", r"^\d{4}-\d{2}$", r"^[α-ω]{1,5}$")
_FORMATS = ("ipv4", "uuid")


class Schemas:
    """Makes schemas by chance; the same for the same seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while True:
            shared = self._scalar()
            yield {**self._object(0), "$defs": {"shared": shared}}

    def _any(self, depth: int) -> dict[str, Any]:
        if depth >= DEEPEST:
            return self._scalar()
        kinds: Sequence[Callable[[], dict[str, Any]]] = (
            self._scalar,
            self._scalar,
            lambda: self._object(depth),
            lambda: self._list(depth),
            lambda: {"anyOf": [self._any(depth + 1) for _ in range(self._random.randint(2, 3))]},
            lambda: {"$ref": "#/$defs/shared"},
        )
        return self._random.choice(kinds)()

    def _object(self, depth: int) -> dict[str, Any]:
        names = self._random.sample(WORDS, self._random.randint(1, 3))
        return {
            "type": "object",
            "properties": {name: self._any(depth + 1) for name in names},
            "required": [name for name in names if self._random.random() < 0.6],
            "additionalProperties": False,
        }

    def _list(self, depth: int) -> dict[str, Any]:
        least = self._random.randint(0, 2)
        most = least + self._random.randint(0, 2)
        return {"type": "array", "items": self._any(depth + 1), "minItems": least, "maxItems": most}

    def _scalar(self) -> dict[str, Any]:
        lowest = self._random.randint(-1000, 1000)
        least = self._random.randint(0, 3)
        kinds: Sequence[dict[str, Any]] = (
            {"enum": [*self._random.sample(WORDS, 3), lowest, None, True, 2.5]},
            {"const": self._random.choice(WORDS)},
            {"type": "boolean"},
            {"type": ["null", "integer"], "minimum": lowest, "maximum": lowest + 50},
            {"type": "integer", "minimum": lowest, "maximum": lowest + self._random.randint(0, 5000)},
            {"type": "number", "exclusiveMinimum": lowest, "maximum": lowest + self._random.randint(1, 5)},
            {"type": "string", "minLength": least, "maxLength": least + self._random.randint(0, 12)},
            {"type": "string", "pattern": self._random.choice(PATTERNS)},
            {"type": "string", "format": self._random.choice(_FORMATS)},
        )
        return self._random.choice(kinds)


@dataclass
class Found:
    """What was drawn. wrong: answers that are not valid, with their schemas and why. wall_s, processor_s: of each
    mask."""

    valid: int = 0
    cut: int = 0
    tokens: int = 0
    wrong: list[dict[str, str]] = field(default_factory=list)
    schemas: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    wall_s: list[float] = field(default_factory=list)
    processor_s: list[float] = field(default_factory=list)

    def note(self, schema: dict[str, Any], text: str) -> None:
        """Check a whole answer."""
        try:
            told = json.loads(text)
            jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker()).validate(told)
        except (ValueError, jsonschema.ValidationError) as error:
            self.wrong.append({"schema": json.dumps(schema), "answer": text, "why": str(error)[:500]})
        else:
            self.valid += 1
            self.kinds.update(type(each).__name__ for each in _leaves(told))


def _leaves(told: Any) -> Iterator[Any]:
    if isinstance(told, dict):
        for each in told.values():
            yield from _leaves(each)
    elif isinstance(told, list):
        for each in told:
            yield from _leaves(each)
    else:
        yield told


def take_times(found: Found) -> None:
    """Take the time of each mask from now on, in this process."""
    allowed = Constrained.allowed

    def timed(self: Constrained, channel: Any) -> Any:
        begun, processor = time.perf_counter(), time.thread_time()
        try:
            return allowed(self, channel)
        finally:
            found.processor_s.append(time.thread_time() - processor)
            found.wall_s.append(time.perf_counter() - begun)

    Constrained.allowed = timed  # type: ignore[method-assign]


async def draw(answers: int, seed: int, folder: Path) -> Found:
    """Draw so many whole answers."""
    found, numbers, by_chance = Found(), count(), random.Random(seed)
    take_times(found)
    service = await Service.open(ServeOptions(store=folder / "store", scrub_rate=0))

    async def one(schema: dict[str, Any]) -> None:
        name = f"answer-{next(numbers)}"
        result = await service.generate(
            session=name,
            text="The answer, as JSON:\n",
            create=True,
            max_tokens=MAX_TOKENS,
            constraint=Constraint(json_schema=json.dumps(schema, ensure_ascii=False)),
            sampling=Sampling(by_chance.choice(TEMPERATURES), seed=by_chance.randrange(2**64)),
        )
        await service.delete(session=name)
        found.tokens += len(result.tokens)
        if result.finish_reason == "stop":
            found.note(schema, result.text)
        else:
            found.cut += 1

    async def keep_drawing(schemas: Iterator[dict[str, Any]]) -> None:
        while found.valid + len(found.wrong) < answers:
            schema = next(schemas)
            found.schemas += 1
            for _ in range(ANSWERS_A_SCHEMA):
                await one(schema)
            if not found.schemas % 100:
                print(f"{found.valid} valid, {len(found.wrong)} wrong, {found.cut} cut", file=sys.stderr, flush=True)

    try:
        schemas = iter(Schemas(seed))
        await asyncio.gather(*(keep_drawing(schemas) for _ in range(AT_ONCE)))
    finally:
        await service.close()
    return found


def report(found: Found, out: Path) -> None:
    """The figures as JSON and as a plot, and a few lines for a person."""
    times = {"wall": found.wall_s, "processor": found.processor_s}
    mask = {
        name: {f"p{each:g}": float(np.percentile(taken, each)) for each in PERCENTILES} for name, taken in times.items()
    }
    document = save(
        "constraints",
        {
            "answers": found.valid + len(found.wrong),
            "valid": found.valid,
            "cut": found.cut,
            "wrong": found.wrong,
            "schemas": found.schemas,
            "tokens": found.tokens,
            "values": dict(found.kinds),
            "masks": len(found.wall_s),
            "mask_seconds": mask,
            "bound_s": BOUND_S,
        },
        out,
    )
    title = f"99 of 100 masks take less than {1000 * mask['wall']['p99']:.2f} ms"
    with plotted(out / "constraints.png", document, title) as axes:
        for (name, taken), colour in zip(times.items(), (OURS, PEER), strict=True):
            parts = np.linspace(0, 99.99, 1000)
            axes.plot(parts, 1000 * np.percentile(taken, parts), color=colour, label=f"{name} time")
        axes.axhline(1000 * BOUND_S, color="tab:red", linestyle=":", label="bound at the 99th")
        axes.set(xlabel="percentile of masks", ylabel="milliseconds", yscale="log")
        axes.legend()
    print(f"{found.valid} of {found.valid + len(found.wrong)} answers to {found.schemas} schemas are valid", end="")
    print(f"; {found.cut} were cut; {found.tokens} tokens")
    for name, taken in mask.items():
        told = ", ".join(f"{each} {1e6 * seconds:.0f}" for each, seconds in taken.items())
        print(f"a mask, {name} time, in microseconds: {told}")


def main() -> int:
    """Measure and report; 1 if an answer is not valid."""
    parser = parser_for(__doc__, 1)
    parser.add_argument("--answers", type=int, help=f"{ANSWERS} unless told, {QUICK_ANSWERS} if quick")
    parser.add_argument("--seed", type=int, default=18, help="of the schemas and the draws")
    options = parser.parse_args()
    answers = options.answers or (QUICK_ANSWERS if options.quick else ANSWERS)
    with tempfile.TemporaryDirectory(prefix="torpor-bench-", dir=options.folder) as folder:
        found = asyncio.run(draw(answers, options.seed, Path(folder)))
    report(found, options.out)
    print(f"figures and plot in {options.out}")
    return 1 if found.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
