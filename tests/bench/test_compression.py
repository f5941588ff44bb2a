"""The benchmark of the codecs, on a few slots: it measures what the store does, and believes no codec."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import pytest
import torpor.snapshot  # noqa: F401  # chooses the BLAS before MLX is imported

ROOT = Path(__file__).resolve().parents[2]

sys.path.insert(0, str(ROOT / "bench"))
try:
    import compression
finally:
    sys.path.remove(str(ROOT / "bench"))


def sample() -> compression.Sample:
    source = random.Random(1)
    slots = [b"".join(source.randbytes(1) + b"\x3f" for _ in range(20_000)) for _ in range(2)]
    return compression.Sample("random low bytes", "bfloat16", [*slots, source.randbytes(400)])


@pytest.fixture
def _without_blosc2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "blosc2", None)


@pytest.mark.one_in(2)
@pytest.mark.usefixtures("_without_blosc2")
def test_each_codec_is_measured_and_reported_without_blosc2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slots = sample()
    results = compression.measure(slots, compression.ways(), rounds=2)
    compression.report([(slots, results)], tmp_path)
    assert "blosc2: not installed" in capsys.readouterr().out
    assert (tmp_path / "compression.png").stat().st_size > 1000
    document = json.loads((tmp_path / "compression.json").read_text())
    assert document["blosc2"] == "not installed"
    codecs = document["samples"][0]["codecs"]
    assert set(codecs) == {"copy", "planes"}
    assert codecs["copy"]["stored_over_raw"] == 1
    # Half of each element is noise; the slot of pure noise stays as it is.
    assert 0.5 < codecs["planes"]["stored_over_raw"] < 0.52
    for found in codecs.values():
        assert found["compress_mb_s"]["runs"] == found["decompress_mb_s"]["runs"] == 2
        assert 0 < found["compress_mb_s"]["lowest"] <= found["compress_mb_s"]["median"]


def test_a_codec_that_gives_back_anything_else_ends_the_benchmark() -> None:
    def restore(stored: bytes, target: bytearray, _dtype: str) -> None:
        target[:] = stored[:-1] + b"\0"

    liar = compression.Way("liar", lambda slot, _: slot[:-1] + b"\xff", restore)
    with pytest.raises(SystemExit, match="liar"):
        compression.measure(sample(), [liar], rounds=1)
