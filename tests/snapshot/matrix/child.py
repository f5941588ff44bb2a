"""One process of a row: `sleep` reads sessions, puts them into a store and goes on without them; `wake` takes them out.

    python child.py sleep ROW DTYPE FOLDER
    python child.py wake ROW DTYPE FOLDER

`sleep` leaves what it saw in FOLDER/slept.json, `wake` what it found of it in FOLDER/woken.json: for each check the
word `ok` or what differs. An architecture that mlx-lm cannot run here says why in FOLDER/cannot_run.json.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torpor.daemon.engine.generation import find_logits
from torpor.memvid.format.blocks import BlockEntry
from torpor.memvid.store import Store
from torpor.memvid.uri import SessionUri
from torpor.snapshot import capture, restore
from torpor.snapshot.caches import can_truncate, truncate
from torpor.snapshot.state import LiveState, token_array
from torpor.tests.snapshot import stored_rig
from torpor.tests.snapshot.matrix import branching, live
from torpor.tests.snapshot.matrix.architectures import cases, digest_of_weights
from torpor.tests.snapshot.matrix.live import SmallModel
from torpor.tests.snapshot.matrix.rows import BRANCHES, OK

import mlx.core as mx  # isort: skip  # after torpor, which chooses the BLAS


@dataclass(frozen=True, slots=True)
class Session:
    """A session of every row. read: how many of its tokens are read at once, as a prompt is; the others are read one by
    one, as what a model writes is. back: the earlier tokens that it is woken at."""

    tokens: int
    read: int
    back: tuple[int, ...] = ()

    def uri(self, at: int | None = None) -> SessionUri:
        """Where it sleeps, and where what was made of it from an earlier token on does."""
        return SessionUri("matrix", f"of-{self.tokens}" if at is None else f"of-{self.tokens}-from-{at}")


@dataclass(frozen=True, slots=True)
class Last:
    """The snapshot that a session was woken from, and of how many of its tokens: what its next sleep refers to."""

    bundle_id: str
    entries: tuple[BlockEntry, ...]
    tokens: int


# Windows are of 64 tokens at most. One session stays within them, and the last one is long enough for whole state to be
# kept at an earlier token, and has gone round its windows token by token.
SESSIONS = (
    Session(1, 1),
    Session(48, 48, (30,)),
    Session(255, 255),
    Session(256, 256),
    Session(257, 257, (200, 250)),
    Session(620, 550, (512, 540, 610)),
)


def main(role: str, row: str, dtype: str, folder: Path) -> None:
    """Play the role."""
    case = next(case for case in cases() if case.name == row)
    try:
        model = live.model_of(case, dtype)
    except live.CannotRun as error:
        _leave(folder / "cannot_run.json", {"why": str(error), "classes": error.classes})
        return
    if role == "sleep":
        with Store.open(folder / "store", writable=True) as store:
            found = {"sessions": {str(session.tokens): _sleep(model, store, session) for session in SESSIONS}}
        _leave(folder / "slept.json", _facts(model) | found)
    else:
        slept = json.loads((folder / "slept.json").read_text(encoding="utf-8"))
        with Store.open(folder / "store", writable=True) as store, ThreadPoolExecutor(2) as pool:
            checks = dict(_woken(model, store, pool, slept))
        _leave(folder / "woken.json", _facts(model) | {"checks": checks})
    mx.clear_streams()


def _facts(model: SmallModel) -> dict[str, Any]:
    return {
        "caches": [[entry.path, entry.kind, entry.in_use] for entry in model.layout.entries],
        "layout": str(model.layout),
        "classes": live.classes_of(model.new_caches()),
        "parameters": model.parameters,
        "weights": digest_of_weights(model.network),
    }


def _sleep(model: SmallModel, store: Store, session: Session) -> dict[str, Any]:
    """Read a session, put it to sleep, and go on with it, and with what it was at earlier tokens."""
    state = _read(model, session)
    before = live.seen(state)
    _write(store, model, session.uri(), state)
    assert live.seen(state) == before, "a sleep changes the session"
    back = {}
    for at in session.back:
        earlier = _never_slept(model, session, at)
        back[str(at)] = _told(model, earlier)
    return {**_told(model, state), "back": back}


def _told(model: SmallModel, state: LiveState) -> dict[str, Any]:
    return {"seen": asdict(live.seen(state)), "gone_on": asdict(live.go_on(model, state))}


def _read(model: SmallModel, session: Session) -> LiveState:
    tokens, state = live.prompt(model, session.tokens), live.new_state(model)
    live.read(model, state, tokens[: session.read])
    for token in tokens[session.read :]:
        live.read(model, state, [token])
    return state


def _never_slept(model: SmallModel, session: Session, at: int) -> LiveState:
    """What a session was after its first tokens: the session itself, cut back, where its caches allow that; else one
    that has read those tokens, in the same model calls."""
    state = _read(model, session)
    passes = state.passes
    if can_truncate(state.caches, at):
        truncate(state.caches, at)
        cut = LiveState(state.tokens[:at], state.caches, None, live.first_key(), passes.cut(at))
        find_logits(model, cut)
        return cut
    again = live.new_state(model)
    live.replay(model, again, live.prompt(model, session.tokens)[:at], list(passes.between(0, at)))
    return again


def _write(store: Store, model: SmallModel, uri: SessionUri, state: LiveState, last: Last | None = None) -> None:
    snapshot = capture.cut(
        state, model.layout, durable=last.entries if last else (), unchanged_tokens=last.tokens if last else 0
    )
    stored_rig.write(
        store, uri, model.identity, snapshot.drafts(), snapshot.token_count, before=last, reused=snapshot.reused
    )


def _woken(
    model: SmallModel, store: Store, pool: ThreadPoolExecutor, slept: dict[str, Any]
) -> Iterator[tuple[str, str]]:
    """Each check and what came of it."""
    same = digest_of_weights(model.network) == slept["weights"]
    for session in SESSIONS:
        wanted = slept["sessions"][str(session.tokens)]
        yield str(session.tokens), _attempt(model, store, pool, session, None, wanted) if same else "other weights"
        for at, earlier in wanted["back"].items():
            yield f"{at} of {session.tokens}", _attempt(model, store, pool, session, int(at), earlier)
    yield BRANCHES, _branched(model)


def _branched(model: SmallModel) -> str:
    try:
        return branching.found_in(model)
    except Exception as error:  # as below
        return f"{type(error).__name__}: {error}".splitlines()[0]


def _attempt(
    model: SmallModel, store: Store, pool: ThreadPoolExecutor, session: Session, at: int | None, wanted: dict[str, Any]
) -> str:
    """Wake, compare, go on, compare; then sleep and wake what came of it, and compare again."""
    try:
        state, last = _wake(model, store, pool, session.uri(), at)
        computed = state.computed_tokens
        found = _differences(live.seen(state), wanted["seen"])
        if at is None and computed:
            found.append(f"{computed} tokens computed")
        gone_on = live.go_on(model, state)
        found += _differences_on_the_way(gone_on, wanted["gone_on"])
        _write(store, model, session.uri(at), state, last)
        again, _ = _wake(model, store, pool, session.uri(at), None)
        found += [f"{what} after a second sleep" for what in _differences(live.seen(again), asdict(gone_on.end))]
    except Exception as error:  # whatever it is, it is what this check came to
        return f"{type(error).__name__}: {error}".splitlines()[0]
    if found:
        return ", ".join(found) + " differ"
    return OK if not computed else f"{OK}, {computed} computed"


def _wake(
    model: SmallModel, store: Store, pool: ThreadPoolExecutor, uri: SessionUri, at: int | None
) -> tuple[LiveState, Last]:
    """A session as it is, or its first version at one of its tokens; and what its next sleep refers to."""
    with store.open_session(uri, None if at is None else 1) as reader:
        plan = restore.plan_wake(
            reader, model.identity, model.layout, model=model.name, context_tokens=model.context_tokens, at=at
        )
        filling = restore.allocate(plan)
        filling.run(reader, pool)
        state = filling.assemble(model.new_caches(), live.first_key())
        behind = token_array(plan.tokens)[plan.resumed_tokens :]
        if behind:
            live.replay(model, state, behind, list(plan.passes.between(plan.resumed_tokens, plan.target_tokens)))
        elif not plan.has_logits:
            find_logits(model, state)
        return state, Last(reader.bundle_id, reader.entries, plan.target_tokens)


def _differences(found: live.Seen, wanted: dict[str, str]) -> list[str]:
    return [name for name, digest in asdict(found).items() if digest != wanted[name]]


def _differences_on_the_way(found: live.GoneOn, wanted: dict[str, Any]) -> list[str]:
    differing = [name for name in ("tokens", "logits") if getattr(found, name) != wanted[name]]
    return [f"{name} that follow" for name in differing] + [
        f"{name} after {live.GREEDY_TOKENS} tokens" for name in _differences(found.end, wanted["end"])
    ]


def _leave(path: Path, found: Any) -> None:
    path.write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], Path(sys.argv[4]))
