"""What a text names in a store, and who needs it: a block or a version by the first digits of its id, a manifest or a
pack by its path or id. Changes nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

from ..answers import Finding
from ..errors import AmbiguousVersion, NothingNamed, StoreClosed, StoreError
from ..folder.folder import id_in, manifest_name
from ..folder.store_file import BUNDLES, PACKS, VERSIONS
from ..index.queries import packs_with_beginning
from ..limits import MIN_ID_DIGITS
from ..writing.core import StoreCore
from .needers import Needers, needers_of, view_of

_DIGITS: Final = frozenset("0123456789abcdef")
_MOST_LISTED: Final = 8


@dataclass(frozen=True, slots=True)
class Thing:
    """What was named: its id, and its file by its name in the store; of a block the pack that has it, or nothing."""

    kind: Literal["block", "version", "pack"]
    id: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind} {self.id}"


@dataclass(frozen=True, slots=True)
class Needed:
    """A thing, its blocks with what is stored of each, and who needs these. beside_bytes: of its file what is no block.
    problems: packs that cannot be read."""

    thing: Thing
    sizes: dict[bytes, int]
    beside_bytes: int
    needers: Needers
    problems: tuple[Finding, ...]


def find(core: StoreCore, text: str) -> Thing:
    """The one thing that a text names.

    Raises:
        NothingNamed: nothing of the store is named so. AmbiguousVersion: several things are.
    """
    core.require_open()
    core.look_again()
    named = _by_path(core, text)
    digits = text.lower()
    found = [named] if named is not None else []
    if named is None and len(digits) >= MIN_ID_DIGITS and _DIGITS.issuperset(digits):
        found = sorted(set(_by_id(core, digits)), key=str)
    if not found:
        raise NothingNamed(
            f"No block, version or pack of the store {core.path} is named {text!r}. Give {MIN_ID_DIGITS} or more "
            "digits of an id, as `torpor blocks NAME` has them, or the path of a manifest or a pack.",
            named=text,
        )
    if len(found) > 1:
        told = [str(each) for each in found]
        more = f" and {len(told) - _MOST_LISTED} more" if len(told) > _MOST_LISTED else ""
        raise AmbiguousVersion(
            f"{text} begins the ids of several things: {', '.join(told[:_MOST_LISTED])}{more}. Give more digits.",
            selector=text,
            candidates=told,
        )
    return found[0]


def needed(core: StoreCore, thing: Thing) -> Needed:
    """Who needs a thing. Raises StoreIoError, UnsafePath, StoreClosed, and the errors of a manifest or pack that cannot
    be read."""
    if thing.kind == "version":
        blocks = {entry.id for entry in core.read_manifest(thing.id).blocks}
        beside = core.folder.bytes_of(manifest_name(thing.id))
    elif thing.kind == "pack":
        view = view_of(core, thing.name)
        blocks, beside = set(view.blocks), view.size_bytes - view.frames_bytes
    else:
        blocks, beside = {bytes.fromhex(thing.id)}, 0
    needers = needers_of(core, blocks)
    sizes, problems = dict.fromkeys(blocks, 0), list[Finding]()
    names = [thing.name] if thing.kind == "pack" else core.index.packs_with(blocks, stripped=True)
    for name in names:
        try:
            view = view_of(core, name)
        except StoreClosed:
            raise
        except StoreError as error:
            problems.append(Finding.of(core.folder.path_of(name), error))
            continue
        for block_id in blocks.intersection(view.blocks):
            is_head = bool(needers.of[block_id]) and block_id not in needers.whole
            sizes[block_id] = sizes[block_id] or view.bytes_of(block_id, stripped=is_head)
    return Needed(thing, sizes, beside, needers, tuple(problems))


def _by_path(core: StoreCore, text: str) -> Thing | None:
    """The manifest or pack of a path: from here, from the store's folder, or the name of the file alone."""
    root, bare = os.path.realpath(core.path), os.path.basename(text)
    paths = [os.path.realpath(each) for each in (text, os.path.join(root, text))]
    within = [os.path.relpath(path, root) for path in paths if path.startswith(f"{root}/")]
    for name in (*within, *(f"{folder}/{bare}" for folder in (VERSIONS, PACKS, BUNDLES) if "." in bare)):
        folder, _, file = name.partition("/")
        if folder == VERSIONS and core.folder.has_manifest(id_in(name)):
            return Thing("version", id_in(file), name)
        if folder in (PACKS, BUNDLES) and name in core.folder.list_packs():
            return Thing("pack", id_in(file), name)
    return None


def _by_id(core: StoreCore, digits: str) -> Iterator[Thing]:
    there = core.folder.list_versions()
    for bundle_id in there | core.index.bundle_ids(digits):
        if bundle_id.startswith(digits):
            yield Thing("version", bundle_id, manifest_name(bundle_id))
    for name in core.folder.list_packs():
        if id_in(name).startswith(digits):
            yield Thing("pack", id_in(name), name)
    blocks = {each for bundle_id in there for each in core.needs.of(bundle_id) if each.hex().startswith(digits)}
    for name in packs_with_beginning(core.index, digits):
        try:
            blocks.update(each for each in view_of(core, name).blocks if each.hex().startswith(digits))
        except StoreClosed:
            raise
        except StoreError:
            continue  # a damaged pack tells no names; manifests may
    for block_id in blocks:
        packs = core.index.packs_of(block_id, stripped=True)
        yield Thing("block", block_id.hex(), packs[0] if packs else "")
