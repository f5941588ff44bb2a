"""Turns that can be told from the tokens of a session, and what is wrong with a session beside what was told of it."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

from torpor.socket_api import Client, RemoteError

FIRST_TOKEN, DIGITS = 300, 2000
"""Two tokens are the number of a turn: plain ones of the demo model."""

NO_ANSWER: Final = ("lease_held", "lease_lost", "remote_unreachable", "remote_unclear", "head_replayed")
"""Refusals: the turn was not told. It may be there all the same, once."""


@dataclass(frozen=True, slots=True)
class Told:
    """A turn that was answered: how many tokens the session had then; from when to when it was asked for, by one
    clock; and at which machine."""

    turn: int
    token_count: int
    begun_s: float
    told_s: float
    machine: int


@dataclass(frozen=True, slots=True)
class Turns:
    """size: tokens of each turn."""

    size: int = 40

    def tokens(self, turn: int) -> list[int]:
        """What a turn appends: its number, and tokens that follow from it."""
        number = [FIRST_TOKEN + turn // DIGITS, FIRST_TOKEN + turn % DIGITS]
        return [*number, *random.Random(turn).choices(range(FIRST_TOKEN, 4000), k=self.size - 2)]

    def turns_in(self, tokens: Sequence[int]) -> list[int] | None:
        """The turns of which a session consists; None: it has other tokens."""
        turns = [
            (tokens[at] - FIRST_TOKEN) * DIGITS + tokens[at + 1] - FIRST_TOKEN
            for at in range(0, len(tokens) - 1, self.size)
        ]
        return turns if [token for turn in turns for token in self.tokens(turn)] == list(tokens) else None

    def ask(self, client: Client, name: str, turn: int, machine: int) -> Told:
        """Append a turn to a session. Raises as `Client.append`: it was not told."""
        begun = time.monotonic()
        answer = client.append(name, tokens=self.tokens(turn), create=True)
        return Told(turn, answer.token_count, begun, time.monotonic(), machine)

    def judge(self, name: str, lines: Sequence[Sequence[int]], told: Sequence[Told]) -> list[str]:
        """What is wrong with the turns of a session, beside those that were told. lines: the turns of the session, and
        of each fork that was made where it had gone on at two places."""
        wrong = []
        places = [{turn: at for at, turn in enumerate(line)} for line in lines]
        for line, its in zip(lines, places, strict=True):
            if len(its) != len(line):
                wrong.append(f"{name} has turns twice: {sorted(turn for turn in its if line.count(turn) > 1)}")
        for each in told:
            ends = [(its[each.turn] + 1) * self.size for its in places if each.turn in its]
            if not ends:
                wrong.append(f"{name} was told turn {each.turn} by machine {each.machine}, and it is lost")
            elif each.token_count not in ends:
                wrong.append(f"{name} was told turn {each.turn} with {each.token_count} tokens, and it ends elsewhere")
        for its, (one, other) in itertools.product(places, itertools.permutations(told, 2)):
            if one.told_s < other.begun_s and its.get(one.turn, -1) > its.get(other.turn, len(its)):
                wrong.append(f"{name} has turn {other.turn} before turn {one.turn}, which was told before it began")
        return wrong


def wake_in_time(client: Client, name: str, deadline_s: float, codes: Collection[str] = NO_ANSWER) -> None:
    """Wake a session, once it may be. codes: refusals behind which it is tried again. Raises the last refusal."""
    until = time.monotonic() + deadline_s
    while True:
        try:
            client.wake(name)
            return
        except RemoteError as error:
            if error.code not in codes or time.monotonic() > until:
                raise
            time.sleep(0.1)


def tokens_of(client: Client, name: str) -> list[int]:
    """All tokens of a session that is awake."""
    tokens: list[int] = []
    while True:
        page = client.contents(name, start=len(tokens), tokens=True)
        tokens += page.tokens
        if page.following is None:
            return tokens
