"""Where the recorded requests of each client go in a cluster, and by what; as a table of the cluster's page.

python -m torpor.tests.socket_api.cluster.routing      write the table, from the shapes beside the repository
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from torpor.socket_api.cluster.keys import key_of
from torpor.socket_api.cluster.passing import Answered
from torpor.tests.socket_api.http.replay import Shape, shapes_in

OURS: Final = Path(__file__).parents[1] / "http" / "shapes"
RECORDED: Final = Path(__file__).resolve().parents[4] / "shared" / "shapes"
PAGE: Final = Path(__file__).resolve().parents[3] / "docs" / "how-to" / "cluster.md"
_REGION: Final = re.compile(r"(?<=<!-- routes -->\n).*?(?=<!-- end of routes -->)", re.DOTALL)
_HEAD: Final = "| client | its requests go to | by |\n|---|---|---|\n"


def file_of(name: str) -> Path | None:
    """The recording of a client; None: it does not lie here."""
    return next((each for each in (OURS / f"{name}.json", RECORDED / f"{name}.json") if each.is_file()), None)


def places_of(shapes: list[Shape]) -> str:
    """A letter for each request: the replica it goes to, if each new conversation goes to another one."""
    answered, letters = Answered(), ""
    for shape in shapes:
        asked = key_of("default", shape.path.partition("?")[0], shape.headers, shape.body)
        place = answered.wanted(asked).was_at or "ABCDEFG"[len(set(letters))]
        answered.learn(asked, session=asked.session or f"torpor://default/{place}", replica=place, answer=None)
        letters += place
    return letters


def grounds_of(shapes: list[Shape]) -> list[str]:
    """What a client's conversations are told apart by: the headers and fields that it takes to name them, or else the
    beginning of the dialogue."""
    found: list[str] = []
    for shape in shapes:
        path = shape.path.partition("?")[0]
        session = key_of("d", path, shape.headers, shape.body).session
        if session is None:
            found.append("how the dialogue begins")
            continue
        headers, body, needed = dict(shape.headers), dict(shape.body), []
        for values, name in ((body, "prompt_cache_key"), *((headers, header) for header in shape.headers)):
            value = values.pop(name, None)
            if key_of("d", path, headers, body).session != session:
                values[name] = value
                needed.append(f"`{name}`")
        found += needed
    return list(dict.fromkeys(found))


def rows() -> Iterator[str]:
    """The rows of the table, of the recordings that lie beside the repository."""
    for file in sorted(RECORDED.glob("*.json")):
        if shapes := shapes_in(file, scale=0.02):
            yield f"| {file.stem} | {places_of(shapes)} | {', '.join(grounds_of(shapes))} |\n"


if __name__ == "__main__":
    PAGE.write_text(_REGION.sub(lambda _: _HEAD + "".join(rows()), PAGE.read_text()))
