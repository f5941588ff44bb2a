"""Sessions of every kind of cache that read turn by turn, and looks at what they were."""

from __future__ import annotations

from torpor.tests.daemon.session_rig import Rigged, tokens_of

# Cut by token; windows beside plain caches; recurrences beside plain ones; recurrences and windows; recurrences alone.
KINDS = ["qwen3", "quantised", "gemma3_text", "lfm2", "recurrent_gemma", "mamba2"]
TOKENS = tokens_of(1, 2000)


async def read_turns(rig: Rigged, name: str, turns: list[int]) -> None:
    await rig.service.create(name)
    start = 0
    for count in turns:
        await rig.service.append(name, tokens=TOKENS[start : start + count])
        start += count


async def look_at_the_first_of_two_versions(rig: Rigged, at: int | None) -> None:
    """Of 300 tokens, and of 350."""
    await read_turns(rig, "s", [300])
    await rig.sleep("s")
    await rig.service.append("s", tokens=TOKENS[300:350])
    await rig.sleep("s")
    await rig.wake("s", 1, at_token=at)
