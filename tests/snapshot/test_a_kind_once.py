"""A kind of cache costs an adapter, and its row in the table of `snapshot/kinds.py`: then sessions of a model that
keeps it sleep and wake to the bit, at any token, in forks and in branches; their blocks are verified, exported and
analyzed; a stripped one is read again; and a version of Torpor without the adapter refuses such a model by the name of
its cache.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from torpor.tests.changed_copy import copy_package, environment_of, put, put_import, require_sound

CACHE = '''
import mlx.core as mx
from mlx_lm.models.cache import _BaseCache, create_attention_mask


class Joined(_BaseCache):
    """Keys and values side by side, in one array."""

    def __init__(self):
        self.both, self.offset = None, 0

    def update_and_fetch(self, keys, values):
        new = mx.concatenate([keys, values], axis=-1)
        self.both = new if self.both is None else mx.concatenate([self.both, new], axis=-2)
        self.offset, dim = self.both.shape[-2], keys.shape[-1]
        return self.both[..., :dim], self.both[..., dim:]

    def make_mask(self, *args, **options):
        return create_attention_mask(*args, offset=self.offset, **options)

    def empty(self):
        return self.both is None

    @property
    def nbytes(self):
        return 0 if self.both is None else self.both.nbytes
'''
ADAPTER = '''

class Joined(Kind):
    """Keys and values side by side, in exactly as many rows as tokens."""

    name = "joined/1"
    by_token = True

    def is_empty(self, cache: Any) -> bool:
        return cache.both is None

    def spans(self, cache: Any) -> dict[str, mx.array]:
        return {"kv": cache.both}

    def fill(self, cache: Any, token_count: int, spans: Arrays, record: Record | None) -> None:
        cache.both, cache.offset = spans["kv"], token_count

    def most_capacity(self, settings: Mapping[str, int], token_count: int, at_once: int) -> int:
        return token_count

    def truncate(self, cache: Any, token_count: int) -> None:
        if token_count < cache.offset:
            cache.both, cache.offset = cache.both[..., :token_count, :], token_count

    def keep(self, cache: Any, *, one_token: bool) -> tuple[Undo, list[mx.array]]:
        both, offset = cache.both, cache.offset
        return lambda: set_all(cache, both=both, offset=offset), []
'''
ROW = '"joined_cache.Joined": Joined(), '
PROGRAM = """
import asyncio, json, sys
from pathlib import Path
from torpor.daemon.options.serve_options import ServeOptions
from torpor.daemon.service import Service
from mlx_lm.models import qwen3
from joined_cache import Joined

qwen3.Model.make_cache = lambda self: [Joined() for _ in self.layers]
store = Path(sys.argv[1])
TEXT = "def double(value):\\n    return value * 2\\n\\n\\n" * 30


async def opened(work):
    service = await Service.open(ServeOptions(store=store, scrub_rate=0))
    try:
        return await work(service)
    finally:
        await service.close()


async def lived(service):
    await service.append("notes", text=TEXT, create=True)
    await service.generate("notes", max_tokens=8)
    await service.sleep("notes")
    return (await service.generate("notes", max_tokens=8, prove=True)).logits_blake3


async def woken(service):
    at_version = await service.wake("notes", version=1)
    assert at_version.tokens_prefilled == 0, at_version
    again = await service.generate("notes", max_tokens=8, prove=True)
    await service.sleep("notes")
    back = await service.wake("notes", version=1, at_token=300)
    assert back.tokens_prefilled == 1, back
    await service.fork("notes@1", "other")
    await service.wake("other")
    root = await service.tree("other")
    (child,) = (await service.branch(root.branch)).branches
    written = (await service.advance([child.branch], max_tokens=4)).written
    assert len(written[0].tokens) == 4
    analysis = await service.analyze("notes")
    await service.sleep("other")
    await service.delete("notes")
    await service.maintain("strip", session="other")
    read = await service.wake("other")
    again_to_the_bit = read.provenance.recomputed is None
    assert read.tokens_prefilled == read.token_count and again_to_the_bit, "read again, to the very logits"
    return again.logits_blake3, json.loads(analysis.artifact)


proofs = asyncio.run(opened(lived))
again, analysis = asyncio.run(opened(woken))
assert again == proofs, "to the bit, in another process's place"
assert "joined/1" in json.dumps(analysis), analysis
print("a kind once")
"""


def put_kind(package: Path) -> None:
    table = package / "snapshot" / "kinds.py"
    put(package / "snapshot" / "kinds_by_token.py", ADAPTER)
    put_import(table, "from .kinds_by_token import Joined")
    put(table, ROW, behind="_KIND_OF_MODEL_CLASS: dict[str, Kind] = {")


def test_what_a_kind_costs_has_its_place_in_the_code(tmp_path: Path) -> None:
    """Each commit checks this, though few try the kind."""
    put_kind(package := copy_package(tmp_path))
    require_sound(package)


@pytest.mark.one_in(2)
@pytest.mark.timeout(180)
def test_a_kind_is_added_by_its_adapter_and_works_everywhere(tmp_path: Path) -> None:
    put_kind(copy_package(tmp_path))
    (tmp_path / "joined_cache.py").write_text(CACHE)
    environment = environment_of(tmp_path)
    store = tmp_path / "store"

    def run(program: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", program, str(store)]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=150)

    done = run(PROGRAM)
    assert done.stdout == "a kind once\n", done.stderr
    for command in (["verify"], ["export-kv", "other", str(tmp_path / "other.safetensors")]):
        told = subprocess.run(
            [sys.executable, "-m", "torpor.cli.main", *command, "--store", str(store)],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert told.returncode == 0, told
    assert b"layers.0.kv" in (tmp_path / "other.safetensors").read_bytes()[:4096]

    environment["PYTHONPATH"] = str(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "joined_cache.py").rename(tmp_path / "elsewhere" / "joined_cache.py")
    refused = run(PROGRAM)
    assert "Caches of kind Joined cannot be slept: there is no adapter for them" in refused.stderr
