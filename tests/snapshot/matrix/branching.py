"""Two branches of one prompt on a small network, against the network alone with mlx-lm's own caches.

The control is computed before Torpor has looked at the network, in calls of the same sizes. Branches that attend to
segments say the same but for the last bits. Those that gather their keys and values, or have copies, say the very same.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from torpor.daemon.engine import generation
from torpor.daemon.engine.asking import Decode
from torpor.daemon.engine.decoding import Decoder
from torpor.daemon.models.sharing import Route, difference
from torpor.snapshot.caches import arrays_of
from torpor.snapshot.canary import TOLERANCE
from torpor.snapshot.forking import fork
from torpor.snapshot.passes import UNREPEATABLE
from torpor.snapshot.state import LiveState
from torpor.tests.snapshot.matrix import live
from torpor.tests.snapshot.matrix.live import SmallModel
from torpor.tests.snapshot.matrix.rows import OK

import mlx.core as mx  # isort: skip  # after torpor, which chooses the BLAS

PROMPT_TOKENS = 180
"""Past the windows, and past what Torpor tries a network with; within the third segment."""

OWN_TOKENS = (1, 9)
"""That each branch reads behind the prompt."""

STEPS = 12
"""Tokens that each branch then decodes: both go on into the fourth segment."""

ROUTES: tuple[Route, ...] = ("shared", "gathered", "copied")


def found_in(model: SmallModel) -> str:
    """`ok` with the routes of the caches that the network fills, or what differs."""
    prompt, own = live.prompt(model, PROMPT_TOKENS), [live.prompt(model, 1000 + count)[:count] for count in OWN_TOKENS]
    steps = [live.prompt(model, 2000 + count)[:STEPS] for count in OWN_TOKENS]
    wanted = [_said_by_itself(model, [prompt, mine], its) for mine, its in zip(own, steps, strict=True)]
    session = live.new_state(model)
    live.read(model, session, prompt)
    root = fork(session, model.branch_caches())
    routes = _routes_of(model)

    def branches() -> list[LiveState]:
        return [_branch(model, root, mine) for mine in own]

    alone = [_decoded(model, [state], [its])[0] for state, its in zip(branches(), steps, strict=True)]
    company = branches()
    together = _decoded(model, company, steps)
    in_batch = any(UNREPEATABLE in list(state.passes) for state in company)
    told = {"alone": _differing(model, alone, wanted, exact="shared" not in routes)}
    if not in_batch:
        told["together"] = _differing(model, together, alone, exact=True)
    elif model.sharing.in_rounds:
        told["together"] = "decoded in no round"
    else:
        told["together"] = _differing(model, together, alone, exact=False)
    return "; ".join(f"{which}: {what}" for which, what in told.items() if what) or ", ".join([OK, *routes])


def _routes_of(model: SmallModel) -> list[Route]:
    filled = {entry.path for entry in model.layout.entries if entry.in_use}
    found = {route for path, route in model.sharing.routes.items() if path in filled}
    return [route for route in ROUTES if route in found]


def _branch(model: SmallModel, root: LiveState, own: Sequence[int]) -> LiveState:
    state = fork(root, model.branch_caches())
    live.read(model, state, own)
    return state


def _decoded(model: SmallModel, states: Sequence[LiveState], steps: Sequence[Sequence[int]]) -> list[list[mx.array]]:
    """The logits of each state behind each of its tokens, all states in one round."""
    decoder, found = Decoder(32), [[state.last_logits] for state in states]
    for step in range(STEPS):
        asked = [Decode(model, state, mine[step]) for state, mine in zip(states, steps, strict=True)]
        for state, mine, its, logits in zip(states, steps, found, decoder.decode(asked), strict=True):
            assert isinstance(logits, mx.array), f"a branch decodes nothing: {logits}"
            state.tokens.append(mine[step])
            its.append(logits)
    return found


def _said_by_itself(model: SmallModel, texts: Sequence[Sequence[int]], steps: Sequence[int]) -> list[mx.array]:
    """As `_decoded`, by the network alone, in calls as a reading makes them: the last token of a text by itself."""
    caches, found = model.case.caches(model.network), []
    for text in (*texts, *([token] for token in steps)):
        size = generation.PREFILL_CHUNK_TOKENS
        cuts = [*range(0, len(text) - 1, size), len(text) - 1, len(text)]
        for start, end in pairwise(cuts):
            logits = model.network(mx.array(text[start:end])[None], cache=caches)
            mx.eval(logits, arrays_of(caches))
        found.append(_kept(logits[0, -1]))
    return found[len(texts) - 1 :]


def _kept(logits: mx.array) -> mx.array:
    """Float32, evaluated."""
    wide = logits.astype(mx.float32)
    mx.eval(wide)
    return wide


def _differing(
    model: SmallModel, found: Sequence[Sequence[mx.array]], wanted: Sequence[Sequence[mx.array]], *, exact: bool
) -> str:
    """How far the first branch is off that is off; empty if none is."""
    tolerance, most = TOLERANCE[model.compute_dtype], STEPS // 4 if _may_choose_others(model) else 0
    for row, (mine, its) in enumerate(zip(found, wanted, strict=True), 1):
        off = [difference(one, other) for one, other in zip(mine, its, strict=True)]
        same = all(np.array_equal(_bits(one), _bits(other)) for one, other in zip(mine, its, strict=True))
        if (exact and not same) or sum(not each <= tolerance for each in off) > most:
            return f"branch {row} is off by up to {max(off):.2g}"
    return ""


def _may_choose_others(model: SmallModel) -> bool:
    """Whether the last bits may decide which of two experts a token has: in half precision some weigh the same."""
    experts = any("Switch" in type(module).__name__ for module in model.network.modules())
    return experts and model.compute_dtype != "float32"


def _bits(logits: mx.array) -> np.ndarray:
    return np.array(logits).view(np.uint32)
