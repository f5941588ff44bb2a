"""What branches read and write is told of as what sessions do: by their session, and by the verb."""

from __future__ import annotations

from torpor.daemon.api.branching import BranchReading
from torpor.daemon.api.sampling import Sampling
from torpor.tests.daemon.session_rig import Rigged, tokens_of


async def test_what_branches_read_and_write_stands_in_the_diary(rig: Rigged) -> None:
    await rig.service.create("s")
    await rig.service.append("s", tokens=tokens_of(1, 30))
    root = (await rig.service.tree("s")).branch
    one, other = (each.branch for each in (await rig.service.branch(root, count=2)).branches)
    await rig.service.prefill(
        [BranchReading(one, tokens=tokens_of(2, 5)), BranchReading(other, tokens=tokens_of(3, 4))]
    )
    written = (await rig.service.advance([one, other], max_tokens=3)).written
    await rig.service.guide([one], sampling=Sampling(temperature=1.0))
    await rig.service.diverge(one, count=3, max_tokens=2)
    rows = {row.key: row for row in (await rig.service.causes()).rows}
    assert rows["prefill"].read_tokens == 9
    assert rows["advance"].written_tokens == sum(len(each.tokens) for each in written) > 0
    assert 3 <= rows["diverge"].written_tokens <= 6
    assert rows["advance"].write_seconds > 0 < rows["prefill"].read_seconds
    assert {row.key for row in (await rig.service.causes(by="session")).rows} == {"torpor://default/s"}
