"""The parts of a model's identity: the name, the side and the policy of each.

Every part is named, so that a refusal can say which one differs. A part is of the *meaning* (of tokens and of the
numbers in the cache) or of the *representation* (how they are held, and what computed them). Its policy decides:

- `must_match`: a snapshot with another value is refused.
- `convertible`: refused too, unless the caller converts this part to the other form, exactly or with a known loss.
- `may_differ`: the KV is as good as before; reported at wake, and refused only by a strict caller.

The digest that names blocks and bundles covers the parts of the first two policies (`Identity`). Those of the third are
kept beside it, in the session map: a new version of a library must not make blocks unshareable or sleepers unwakeable.
Policies are not stored, so a later version may loosen one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NoReturn

from ..memvid.answers import PartDiffers
from ..memvid.format.identity import Identity
from ..memvid.format.manifest import ELSEWHERE
from ..memvid.limits import MAX_TOKENS
from .errors import IdentityMismatch, MalformedSnapshot
from .layout import PLAIN, serving

Side = Literal["meaning", "representation"]
Policy = Literal["must_match", "convertible", "may_differ"]

# The arrangement of slots in blocks and in the state record. Raise it if that changes for a cache that could be slept
# before. The kind has the version of a slot's content.
STATE_LAYOUT: Final = "1"
# characters of a value in a sentence; the error's details have all of it
_SHOWN_CHARS = 80
_DIGEST_CHARS = 64
_DIGEST_CHARS_SHOWN = 12
# characters of a backend part in a snapshot; we write no longer text
MAX_CIRCUMSTANCE_CHARS: Final = 1024


@dataclass(frozen=True, slots=True)
class Part:
    """why: the harm of a difference, or why there is none. remedy: advice to a person about a difference.

    decides_bits: whether it may change later results; if not, `strict` ignores it.
    """

    name: str
    side: Side
    policy: Policy
    why: str
    remedy: str
    decides_bits: bool = True


PARTS: Final = (
    Part(
        "weights", "meaning", "must_match",
        "other weights compute other keys and values from the same tokens",
        "point the model at the weights it was slept with",
    ),
    Part(
        "config", "meaning", "must_match",
        "the same weights in another architecture are another model",
        "restore the model's config.json",
    ),
    Part(
        "rope", "meaning", "must_match",
        "positions are turned into the keys: under another base or scaling the stored ones stand elsewhere",
        "restore the RoPE settings in the model's config.json",
    ),
    Part(
        "tokenizer", "meaning", "must_match",
        "to another tokenizer the ledger is another text",
        "restore the model's tokenizer files",
    ),
    Part(
        "template", "meaning", "must_match",
        "the next turn would be written in another form than the turns in the cache",
        "restore the model's chat template",
    ),
    Part(
        "adapter", "meaning", "must_match",
        "an adapter changes what every layer behind it computes, and fusing it changes the last bits",
        "load the model with the adapter it was slept with, fused or not as then",
    ),
    Part(
        "compute_dtype", "representation", "convertible",
        "the bytes are of another type; widening them is exact, narrowing them rounds",
        "run the daemon on a device that computes in the stored type",
    ),
    Part(
        "kv_format", "representation", "convertible",
        "plain and quantized keys and values are other bytes; quantizing loses, and going back does not undo it",
        "serve the model with the KV bits and group it was slept with",
    ),
    Part(
        "cache_layout", "representation", "convertible",
        "it spells type, format and shapes out, so it follows the parts above; each block's slots are compared besides",
        "use a version of mlx-lm that lays the cache out in the stored way",
    ),
    Part(
        "state_layout", "representation", "must_match",
        "slots that are arranged in another order would be filled with each other's bytes",
        "use a version of torpor that arranges the state in the stored way",
    ),
    Part(
        "device", "representation", "may_differ",
        "stored numbers are the same on any device; what is computed from them may differ in the last bits",
        "run the daemon on the kind of device it was slept on",
    ),
    Part(
        "blas", "representation", "may_differ",
        "as for the device",
        "give the daemon the BLAS it was slept with (TORPOR_BLAS)",
    ),
    Part(
        "processor", "representation", "may_differ",
        "as for the device; a BLAS chooses its kernels by the processor, and splits sums by the number of its cores",
        "run the daemon on the processor it was slept on, with as many cores",
    ),
    Part(
        "mlx", "representation", "may_differ",
        "as for the device; a kernel may add up in another order",
        "install the version of mlx it was slept with",
    ),
    Part(
        "mlx_lm", "representation", "may_differ",
        "a model's code changes rarely, and then its cache_layout mostly changes with it",
        "install the version of mlx-lm it was slept with",
    ),
    Part(
        "numpy", "representation", "may_differ",
        "as for the device; on a CPU it takes the exponentials in the attention of branches",
        "install the version of numpy it was slept with",
    ),
    Part(
        "torpor", "representation", "may_differ",
        "what must not differ between versions has a version of its own: format, slot kinds, state_layout",
        "install the version of torpor it was slept with",
    ),
    Part(
        "adapter_path", "representation", "may_differ",
        "where an adapter lies decides nothing; what it is, the part adapter says",
        "load the adapter from the folder it was in",
        decides_bits=False,
    ),
)  # fmt: skip
_PARTS: Final = {part.name: part for part in PARTS}
CIRCUMSTANCES: Final = frozenset(part.name for part in PARTS if part.policy == "may_differ")
"""The parts in the session map, as `backend`, and not in the identity."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """The parts that differ between a snapshot and a live model, in the order of `PARTS`, unknown parts last.

    A part that only one of them has differs like any other, by its policy; an unknown part must match (GM9).
    """

    differing: tuple[PartDiffers, ...]

    @property
    def is_same(self) -> bool:
        return not self.differing

    def refused(self, *, conversions: Collection[str] = (), strict: bool = False) -> tuple[PartDiffers, ...]:
        """Those that prevent a wake that converts the parts in `conversions`.

        strict: refuse even a `may_differ` part, if it decides bits.
        """
        return tuple(
            each
            for each in self.differing
            if (policy := policy_of(each.field)) == "must_match"
            or (policy == "convertible" and each.field not in conversions)
            or (policy == "may_differ" and strict and _PARTS[each.field].decides_bits)
        )


def compare(stored: Mapping[str, str], live: Mapping[str, str]) -> Comparison:
    """Compare parts by name."""
    known = [part.name for part in PARTS if part.name in stored.keys() | live.keys()]
    unknown = sorted((stored.keys() | live.keys()) - _PARTS.keys())
    return Comparison(
        tuple(
            PartDiffers(name, stored.get(name), live.get(name))
            for name in [*known, *unknown]
            if stored.get(name) != live.get(name)
        )
    )


def policy_of(name: str) -> Policy:
    """The policy of a part; an unknown part must match."""
    part = _PARTS.get(name)
    return part.policy if part else "must_match"


def require_same(
    stored: Identity, live: Identity, *, model: str, conversions: Collection[str] = ()
) -> tuple[PartDiffers, ...]:
    """Refuse a snapshot of another identity than the resident model's; return the differences that the caller is to
    convert.

    conversions: names of convertible parts that the caller can convert.

    Raises:
        IdentityMismatch: `mismatched_fields` lists every part that differs, with both values and its policy.
    """
    comparison = compare(dict(stored.parts), dict(live.parts))
    if comparison.refused(conversions=conversions):
        _refuse(comparison.differing, model)
    return comparison.differing


def require_circumstances(
    stored: object, live: Mapping[str, str], *, model: str, strict: bool
) -> tuple[PartDiffers, ...]:
    """Return the differences between a snapshot's backend, from its session map, and the present one.

    stored: the value in the map; a value that is not our text counts as missing.

    Raises:
        IdentityMismatch: something differs, and `strict` refuses that.
    """
    comparison = compare(circumstances_in(stored), live)
    if strict:
        require_nothing_differs(comparison.differing, model=model)
    return comparison.differing


def require_nothing_differs(differing: tuple[PartDiffers, ...], *, model: str) -> None:
    """Refuse `may_differ` parts for a strict caller.

    Raises:
        IdentityMismatch: something differs that decides bits.
    """
    if Comparison(differing).refused(strict=True):
        _refuse(differing, model)


def decide_bits(differing: tuple[PartDiffers, ...]) -> bool:
    """Whether these differences may change the bits of later results."""
    return bool(Comparison(differing).refused(strict=True))


def circumstances_in(stored: object) -> dict[str, str]:
    """The known parts of a stored map with short text; anybody may have written the others."""
    if not isinstance(stored, Mapping):
        return {}
    return {
        name: value
        for name, value in stored.items()
        if name in CIRCUMSTANCES and isinstance(value, str) and len(value) <= MAX_CIRCUMSTANCE_CHARS
    }


def tokens_from_elsewhere(session: Mapping[str, Any]) -> int:
    """How many of a snapshot's first tokens another backend computed than the one in its session map (`backend`), maybe
    with other bits: the session was woken there and went on. 0 if one backend computed all.

    Raises:
        MalformedSnapshot: the value in the map is no such number.
    """
    count = session.get(ELSEWHERE, 0)
    if type(count) is not int or not 0 <= count <= MAX_TOKENS:
        raise MalformedSnapshot(f"The snapshot says of {count!r} tokens that they were computed elsewhere.")
    return count


def _refuse(differing: Sequence[PartDiffers], model: str) -> NoReturn:
    told = "; ".join(f"{each.field} was {_shown(each.stored)} and is {_shown(each.live)}" for each in differing)
    remedies = [_remedy(each, model) for each in differing if each.field in _PARTS and not _follows(each, differing)]
    raise IdentityMismatch(
        f"The snapshot was made under another identity than model {model!r} has now: {told}. "
        f"To wake it, {'; '.join(remedies) or 'use the model it was made with'}.",
        mismatched_fields=[
            {"field": each.field, "stored": each.stored, "live": each.live, "policy": policy_of(each.field)}
            for each in differing
        ],
        model=model,
    )


def _remedy(difference: PartDiffers, model: str) -> str:
    how = serving(difference.stored or PLAIN, model) if difference.field == "kv_format" else None
    if how is not None:
        return f"stop the daemon and start it {how} (`torpor stop`, `torpor serve`)"
    return _PARTS[difference.field].remedy


def _follows(difference: PartDiffers, differing: Sequence[PartDiffers]) -> bool:
    """Whether a part differs only because the part that it derives from differs: one remedy mends both."""
    return difference.field == "cache_layout" and any(
        each.field != "cache_layout" and policy_of(each.field) != "may_differ" for each in differing
    )


def _shown(value: str | None) -> str:
    if value is None:
        return "not there"
    words = [
        word[:_DIGEST_CHARS_SHOWN] + "…" if len(word) == _DIGEST_CHARS and word.isalnum() else word
        for word in value.split(" ")
    ]
    text = " ".join(words)
    return text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "…"
