"""Reading and writing tokens, as steps for the engine.

Rules:
- The ledger and the caches always have one length between two steps. A token enters the ledger when its KV is in
  every layer's cache and its logits are evaluated, not before (QC9).
- `read` is all or nothing, unless it is to keep whole blocks of what is given up; `write` commits token by token. An
  error or a closing of the steps leaves the state at its last committed token.
- The logits of the last position are kept: the next token can be drawn at any time, after a wake too, with no
  model call before it.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import mlx.core as mx
from blake3 import blake3

from ...memvid.format.blocks import BLOCK_TOKENS
from ...memvid.units import format_count, format_plural
from ...snapshot import memory
from ...snapshot.caches import arrays_of, without_last
from ...snapshot.checkpoints import Checkpoint, checkpoint_of
from ...snapshot.passes import MAX_PASS_TOKENS, SEGMENTED, tokens_of
from ...snapshot.state import LiveState
from ..api.dialogue import Channel, ToolCall
from ..api.logprobs import TokenLogprobs
from ..api.reading import FinishReason
from ..api.sampling import Sampling
from ..errors import ContextOverflow, InvalidTokens
from ..models import canary
from ..models.chat_template import Root
from ..models.grammars import Matcher, require_some
from ..models.models import LoadedModel
from ..tasks.pieces import Pieces
from .alone import logits_after, raise_as_failure
from .asking import Decode
from .channels import Piece, Shown
from .constrained import Constrained
from .engine import SOON, Steps, WritingSteps
from .guiding import Bias, Guide, biased
from .logprobs import Logprobs
from .sampler import Draw, draw

DEFAULT_MAX_TOKENS = 512
"""The most tokens of a request without `max_tokens`."""
# Tokens read between two turns of the engine. Fixed for a device, because results can differ in the last bits when a
# prompt is fed in other chunk sizes. A chunk is the longest gap of a stream beside a read. On a CPU short ones cost
# little: 6,000 tokens of the demo model take 6.7 s in chunks of 256, and 7.5 s in chunks of 128 or 64. Beside three
# such reads the 99th percentile of a stream's gaps is 361, 254 and 149 ms (bench/loop.py). A GPU wants long chunks.
PREFILL_CHUNK_TOKENS = 64 if mx.default_device() == mx.Device(mx.cpu) else MAX_PASS_TOKENS
_CHECKED_AT_ONCE = 16_384
"""Token ids: a millisecond or two."""

_ASKED_AHEAD: Final = 32
"""Tokens before the end of its room at which an answer asks for more: it comes before they are written."""

_SHOWN_AT_ONCE: Final = 64
"""Tokens of an answer that are shown again in one piece."""

_ROOMIER: Final = {
    "session": "fold the session into a smaller one (torpor fold)",
    "branch": "go on from a branch that holds less",
}

OnTokens = Callable[[int, int], None]
OnToken = Callable[[int | None, Piece], None]


def require_room(
    model: LoadedModel, length: int, wanted_tokens: int, of: Literal["session", "branch"] = "session"
) -> None:
    """Refuse tokens that do not fit the context behind a ledger of that length, before anything is computed (QC1,
    QX15). Raises ContextOverflow: with both sizes; the session or branch is as it was."""
    if length + wanted_tokens > model.context_tokens:
        room = max(0, model.context_tokens - length)
        fitting = f"At most {format_count(room)} more fit" if room else "No more fit"
        way = f"{', or' if room else ';'} {_ROOMIER[of]}" if length else "; a shorter text fits"
        raise ContextOverflow(
            f"The {of} holds {format_plural(length, 'token')} and {format_count(wanted_tokens)} more were asked for, "
            f"but the context of model {model.name!r} ends at {format_count(model.context_tokens)}. "
            f"{fitting}{way}.",
            token_count=length,
            wanted_tokens=wanted_tokens,
            context_tokens=model.context_tokens,
        )


def count_to_write(model: LoadedModel, length: int, wanted: int | None, *, fitting: bool = False) -> int:
    """The most tokens to write behind a ledger of that length: as many as are wanted, or else the default as far as it
    fits. fitting: what is wanted counts only as far as it fits, too."""
    if wanted is not None and not fitting:
        return wanted
    return max(1, min(wanted or DEFAULT_MAX_TOKENS, model.context_tokens - length))


def require_valid(model: LoadedModel, tokens: Sequence[int]) -> Pieces[None]:
    """Refuse token ids outside the vocabulary (threat 10), and an empty list. In pieces, as there may be a million.
    Raises InvalidTokens: with the first such id."""
    if not tokens:
        raise InvalidTokens("There is nothing to read: the text has no tokens.")
    for start in range(0, len(tokens), _CHECKED_AT_ONCE):
        if start:
            yield
        piece = tokens[start : start + _CHECKED_AT_ONCE]
        wrong = next((token for token in piece if not 0 <= token < model.layout.vocabulary), None)
        if wrong is not None:
            raise InvalidTokens(
                f"Token {wrong} is outside the vocabulary of model {model.name!r}, 0 to {model.layout.vocabulary - 1}.",
                token=wrong,
                vocabulary=model.layout.vocabulary,
            )


def read(
    model: LoadedModel, state: LiveState, tokens: Sequence[int], on_tokens: OnTokens, *, by_block: bool = False
) -> Steps[None]:
    """Read tokens to the end of the ledger: all of them, or none if it fails or is given up. on_tokens: called with the
    tokens read, and all.

    by_block: where it is given up, whole blocks of what was read stay: 256 tokens each, or the length of a model call
    where that is longer. Of caches that cannot be cut, all up to the last checkpoint stays. The calls that read the
    rest are then the same as without the break.

    Raises GenerationFailed: the model failed."""
    yield from require_valid(model, tokens)
    require_room(model, len(state.tokens), len(tokens))
    before, done, whole = len(state.tokens), 0, 0
    undo_all = put_back = state.kept()
    try:
        for size, wants_logits in reading(model, state, len(tokens)):
            chunk = tokens[done : done + size]
            done += size
            if wants_logits:
                logits = logits_after(model, state, chunk)
                take_checkpoint(model, state, before + done, chunk[-1], logits)
            else:
                model.extend(chunk, state)
                mx.eval(arrays_of(state.caches))
            if done < len(tokens):
                if by_block and (done - whole >= BLOCK_TOKENS if model.layout.by_token else wants_logits):
                    state.tokens.extend(tokens[whole:done])
                    state.last_logits = logits if wants_logits else None
                    whole, put_back = done, state.kept()
                    if not model.layout.by_token:  # two copies of whole state are reserved, and no third
                        undo_all = put_back
                on_tokens(done, len(tokens))
                # The last token alone is short, and a caller waits for its logits.
                yield SOON if done == len(tokens) - 1 else None
    except GeneratorExit:
        put_back()
        if whole and state.last_logits is None:
            _find_logits_or(undo_all, model, state)
        raise
    except BaseException as error:
        undo_all()
        raise_as_failure(error, before)
        raise
    state.tokens.extend(tokens[whole:])
    state.last_logits = logits
    on_tokens(len(tokens), len(tokens))


def _find_logits_or(undo_all: Callable[[], None], model: LoadedModel, state: LiveState) -> None:
    try:
        find_logits(model, state)
    except BaseException:
        undo_all()
        raise


def reading(model: LoadedModel, state: LiveState, count: int) -> Iterator[tuple[int, bool]]:
    """The model calls that read `count` tokens behind a state: the size of each, and whether its logits are needed.

    The last token is read alone: only its logits are needed, and the others' are never computed. So is the last one
    before each checkpoint.
    """
    before = len(state.tokens)
    position, end = before, before + count
    while position < end:
        stop = end if model.layout.by_token else min(end, state.checkpoints.next_due(position))
        while position < stop - 1:
            size = min(PREFILL_CHUNK_TOKENS, stop - 1 - position)
            yield size, False
            position += size
        yield 1, True
        position = stop


def take_checkpoint(model: LoadedModel, state: LiveState, position: int, last: int, logits: mx.array) -> None:
    """Keep the whole state behind the token `last`, if a checkpoint is due and the model's caches need it."""
    if not model.layout.by_token and state.checkpoints.is_due(position):
        probe = canary.take(model, state, last)
        state.checkpoints.add(checkpoint_of(state.caches, position, logits, state.random_key, state.passes, probe))


@dataclass(slots=True)
class Written:
    """The output of a generation so far; correct at every moment, even when cancelled. text, reasoning, calls: what it
    said in each channel.

    proofs: for each token the BLAKE3-256 of the float32 logits before it, if asked for. ended: all is written; else it
    goes on once there is more room. shown: what the client sees of it, once it has begun, behind the ledger `context`.
    bound: what holds it to its grammar, if it has one. logprobs: of each token, if asked for; telling: makes them.
    """

    text: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    proofs: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason = "length"
    ended: bool = False
    shown: Shown | None = None
    bound: Constrained | None = None
    telling: Logprobs | None = None
    context: array[int] = field(default_factory=lambda: array("I"))

    @property
    def channel(self) -> Channel:
        """Where the last token was, and where the next one begins."""
        return self.shown.channel if self.shown is not None else "text"

    def facts(self, order: WriteOrder) -> dict[str, Any]:
        """Its fields of the result."""
        return {
            "text": self.text,
            "reasoning": self.reasoning,
            "tool_calls": tuple(self.calls),
            "tokens": tuple(self.tokens),
            "finish_reason": self.finish_reason,
            "stopped_by": self.shown.stopped_by if self.shown is not None else None,
            "logprobs": tuple(self.logprobs) if order.logprobs is not None else None,
            "logits_blake3": tuple(self.proofs) if order.prove else None,
            "seed": order.sampling.seed if order.seeded else None,
        }

    def logprobs_of(self, last: int | None) -> TokenLogprobs | None:
        """Those of the last token; None for None, and where they were not asked for."""
        return self.logprobs[-1] if last is not None and self.logprobs else None

    def add(self, piece: Piece) -> None:
        """Add what was said."""
        if piece.call is not None:
            self.calls.append(piece.call)
        elif piece.channel == "reasoning":
            self.reasoning += piece.text
        else:
            self.text += piece.text


@dataclass(frozen=True, slots=True)
class WriteOrder:
    """The order of a generation. keep_end: whether the end token goes into the ledger, as in a chat. alone: never in
    one model call with other sessions. seeded: whether it draws by its own random numbers, and leaves the session's as
    they are. root: of the conversation that it is a turn of; None if all that is written is text. begun: committed
    tokens at the end of the ledger that belong to it: they are shown again first. matcher: at the beginning of the
    grammar that the answer is held to; only for this order. one_call: whether the answer ends behind its first call.
    answer_id: names the answer; empty for none. logprobs: how many of the likeliest tokens to tell for each; None for
    no log-probabilities, and for an order with `begun`, whose logits are gone. guide: changes the logits before a token
    is drawn, and measures what is committed. bias: the `logit_bias` of its sampling."""

    max_tokens: int
    sampling: Sampling
    stop: tuple[str, ...] = ()
    prove: bool = False
    keep_end: bool = False
    alone: bool = False
    seeded: bool = False
    root: Root | None = None
    begun: Sequence[int] = ()
    matcher: Matcher | None = None
    one_call: bool = False
    answer_id: bytes = b""
    logprobs: int | None = None
    guide: Guide | None = None
    bias: Bias = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "bias", Bias.of(self.sampling.logit_bias))


class Room:
    """How far an answer may grow. end: the tokens of its session that there is room for; None: any number. is_last:
    whether there will be no more, so that the answer ends there."""

    end: int | None = None
    is_last = False

    def ask(self) -> None:
        """Ask for more, shortly before the end. Called on the engine's thread."""

    def ends_at(self, held: int) -> bool:
        """Whether there is none for another token."""
        if self.end is not None and held >= self.end - _ASKED_AHEAD:
            self.ask()
        return self.end is not None and held >= self.end


def write(
    model: LoadedModel,
    state: LiveState,
    order: WriteOrder,
    written: Written,
    on_token: OnToken,
    room: Room | None = None,
) -> WritingSteps[None]:
    """Draw and commit tokens until an end token, a stop string, the only call, the end of the grammar or the limit.
    Where the room
    ends before, it stops with `written.ended` false, and steps with the same `written` go on. Raises GenerationFailed:
    the model failed. InvalidConstraint: the grammar did. Tokens committed before stay."""
    begun, room = [] if written.shown else order.begun, room or Room()
    before = len(state.tokens) - len(begun)
    require_room(model, before, order.max_tokens - len(written.tokens))
    if written.shown is None:
        _begin(model, order, written, state.tokens[:before])
    ends = False
    for at, token in enumerate(begun):
        if written.bound is not None:
            written.bound.accept(token, written.channel)
        ends = _show(model, order, written, token, on_token)
        if not at % _SHOWN_AT_ONCE:
            yield None
    while not ends and len(written.tokens) < order.max_tokens:
        if room.ends_at(len(state.tokens)):
            if room.is_last:
                break
            return
        token_id = yield from _draw_and_commit(model, state, order, written)
        if token_id in model.end_tokens and not order.keep_end:
            written.finish_reason = "stop"
            break
        ends = _show(model, order, written, token_id, on_token)
    assert written.shown is not None
    is_cut = written.finish_reason == "length"
    _tell(written, None, written.shown.finish(is_cut=is_cut), on_token)
    if written.calls and written.finish_reason == "stop":
        written.finish_reason = "tool_calls"
    written.ended = True


def _begin(model: LoadedModel, order: WriteOrder, written: Written, context: array[int]) -> None:
    """Make ready what shows the answer, and what holds it."""
    written.context, matcher = context, order.matcher
    is_plain = matcher is not None and matcher.is_plain
    written.shown = Shown(
        model, context, order.root, order.stop, is_plain=is_plain, one_call=order.one_call, answer=order.answer_id
    )
    written.bound = Constrained(matcher, model, context, order.root) if matcher is not None else None
    written.telling = Logprobs(model, order.logprobs) if order.logprobs is not None else None


def _show(model: LoadedModel, order: WriteOrder, written: Written, token: int, on_token: OnToken) -> bool:
    """Show a committed token. Whether it ends the answer."""
    assert written.shown is not None
    ended, channel = token in model.end_tokens, written.channel
    written.tokens.append(token)
    written.context.append(token)
    pieces = () if ended else written.shown.push(token)
    _tell(written, token, pieces, on_token, channel)
    if ended or written.shown.is_over or (written.bound is not None and written.bound.is_at_end):
        written.finish_reason = "stop"
        return True
    return False


def _tell(
    written: Written, token: int | None, pieces: Iterable[Piece], on_token: OnToken, channel: Channel = "text"
) -> None:
    """Tell a token with its pieces. channel: where the one before it was."""
    for piece in pieces:
        written.add(piece)
        on_token(token, piece)
        token = None
    if token is not None:
        on_token(token, Piece(channel if written.channel == "text" else written.channel))


def logits_digest(logits: mx.array) -> str:
    """BLAKE3-256, as hex, of evaluated float32 logits `[vocabulary]`."""
    bits = memory.contiguous(logits)
    mx.eval(bits)
    return blake3(memory.readable(bits)).hexdigest()


def find_logits(model: LoadedModel, state: LiveState) -> None:
    """Read the last token once more, for the logits of a state restored without them; computes one token.

    The caches keep the token's old rows, bit for bit: a token read alone may differ from one read in a chunk, and later
    sleeps refer to the snapshot's blocks.

    Raises GenerationFailed: the model failed; the state is not to be used."""
    length, passes = len(state.tokens), state.passes.copy()
    try:
        with without_last(state.caches, length):
            logits = logits_after(model, state, state.tokens[-1:])
    except BaseException as error:
        raise_as_failure(error, length)
        raise
    finally:
        state.passes = passes
    state.last_logits = logits


def next_draw(state: LiveState, order: WriteOrder, written: Written) -> Draw:
    """The next token. Where the grammar refuses it only after the draw, another one is drawn."""
    assert state.last_logits is not None
    logits, allowed = state.last_logits, written.bound.allowed(written.channel) if written.bound is not None else None
    answer_at, biases = len(state.tokens) - len(written.tokens), [order.bias]
    if (guide := order.guide) is not None:
        logits, answer_at, biases = guide.head(logits), guide.answer_at, [order.bias, guide.steer]
    logits, allowed = biased(logits, allowed, biases)
    while True:
        choice = draw(order.sampling, logits, state.tokens, state.random_key, allowed, answer_at=answer_at)
        if written.bound is None or written.bound.accept(choice.token, written.channel):
            return choice
        assert allowed is not None
        allowed[choice.token] = False
        require_some(allowed)


def _draw_and_commit(model: LoadedModel, state: LiveState, order: WriteOrder, written: Written) -> WritingSteps[int]:
    """Draw one token, commit it, and note its proof and its log-probabilities. An end token that is not kept is only
    drawn."""
    assert state.last_logits is not None
    before = len(state.tokens)
    proof = logits_digest(state.last_logits) if order.prove else ""
    try:
        choice, head = next_draw(state, order, written), state.last_logits
        head = head if order.guide is None else order.guide.head(head)
        logprobs = written.telling.of(head, choice.token) if written.telling is not None else None
    except Exception as error:
        raise_as_failure(error, before)
        raise
    if choice.token in model.end_tokens and not order.keep_end:
        return choice.token
    takes_checkpoint = not model.layout.by_token and state.checkpoints.is_due(before + 1)

    def keep_checkpoint(logits: mx.array) -> None:
        state.random_key = choice.next_key
        take_checkpoint(model, state, before + 1, choice.token, logits)

    logits = yield Decode(
        model, state, choice.token, order.alone or takes_checkpoint, keep_checkpoint if takes_checkpoint else None
    )
    state.random_key = choice.next_key
    state.tokens.append(choice.token)
    state.last_logits = logits
    if order.guide is not None:
        order.guide.commit(head, choice.token)
    if order.prove:
        written.proofs.append(proof)
    if logprobs is not None:
        written.logprobs.append(logprobs)
    return choice.token


def replay(
    model: LoadedModel, state: LiveState, tokens: Sequence[int], passes: Sequence[int], *, ends: bool = True
) -> Steps[None]:
    """Read a session's tokens again, in model calls of the same sizes, so that the same bits result. passes: the sizes,
    or `SEGMENTED`; they add up to the tokens. ends: the session ends there, so the last token is read alone, as in
    `read`, and its logits are kept.

    Raises GenerationFailed: the model failed; the state is not to be used."""
    done, last = 0, tokens_of(passes[-1])
    split = last > 1 and ends
    for size in (*passes[:-1], *((last - 1,) if split else ()), 1 if split else passes[-1]):
        chunk = tokens[done : done + tokens_of(size)]
        done += len(chunk)
        try:
            if size == SEGMENTED:
                model.begin_branch(state)
            if ends and done == len(tokens):
                state.last_logits = logits_after(model, state, chunk)
            else:
                model.extend(chunk, state)
                mx.eval(arrays_of(state.caches))
        except Exception as error:
            raise_as_failure(error, len(state.tokens))
            raise
        state.tokens.extend(chunk)
        yield None


def read_again(model: LoadedModel, state: LiveState, tokens: Sequence[int], end: Checkpoint) -> Steps[bool]:
    """Bring a state with the first of `tokens` to their end, in the same calls as before. Gives whether the last logits
    equal those of `end`, the record there, to the bit.

    Raises GenerationFailed: the model failed; the state is not to be used."""
    start = len(state.tokens)
    yield from replay(model, state, tokens[start:], list(end.passes.between(start, len(tokens))))
    state.random_key = end.random_key
    assert state.last_logits is not None
    return bool(mx.array_equal(state.last_logits.view(mx.uint32), end.logits.view(mx.uint32)).item())
