"""Branches of a service without a model: enough for the wire. Branch 1 is the root; each commit counts its position."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any

from torpor.daemon.api.branching import (
    AdvanceRequest,
    AdvanceResult,
    Attempt,
    BranchesRequest,
    BranchesResult,
    BranchInfo,
    BranchRequest,
    BranchText,
    CommitRequest,
    DivergeRequest,
    DivergeResult,
    GuideRequest,
    KeepRequest,
    PrefillRequest,
    Produced,
    ProduceRequest,
    ProduceResult,
    PruneRequest,
    PruneResult,
    RetainRequest,
    TreeRequest,
)
from torpor.daemon.api.creating import CreateRequest
from torpor.daemon.api.records import Request
from torpor.daemon.api.sampling import Sampling
from torpor.daemon.api.session import SessionInfo
from torpor.records import Result

ROOT = BranchInfo(1, None, (), 3, 3, 0, Sampling(), 0, 0, False, 0, None, 64)


class FakeBranches:
    """The branches, by number. create: makes the session of a kept one."""

    def __init__(self, create: Callable[[CreateRequest], Awaitable[SessionInfo]]) -> None:
        self._create = create
        self.branches: dict[int, BranchInfo] = {}
        self.answers: Mapping[type[Request], Callable[[Any], Awaitable[Result]]] = {
            TreeRequest: self._tree,
            BranchRequest: self._branch,
            PrefillRequest: self._prefill,
            ProduceRequest: self._produce,
            CommitRequest: self._commit,
            AdvanceRequest: self._advance,
            DivergeRequest: self._diverge,
            GuideRequest: self._guide,
            PruneRequest: self._prune,
            RetainRequest: self._retain,
            KeepRequest: self._keep,
            BranchesRequest: self._branches,
        }

    async def _tree(self, request: TreeRequest) -> BranchInfo:
        self.branches[1] = ROOT
        return ROOT

    async def _branch(self, request: BranchRequest) -> BranchesResult:
        parent, made = self.branches[request.branch], []
        for _ in range(request.count):
            made.append(replace(parent, branch=len(self.branches) + 1, parent=parent.branch))
            self.branches[made[-1].branch] = made[-1]
        return BranchesResult(tuple(made))

    async def _prefill(self, request: PrefillRequest) -> BranchesResult:
        return self._grown({each.branch: len(each.tokens or each.text or "") for each in request.readings})

    async def _produce(self, request: ProduceRequest) -> ProduceResult:
        return ProduceResult(tuple(Produced(each, 0, 7, "t7 ", ends=False) for each in request.branches))

    async def _commit(self, request: CommitRequest) -> BranchesResult:
        return self._grown({each.branch: 1 for each in request.commits})

    async def _advance(self, request: AdvanceRequest) -> AdvanceResult:
        return AdvanceResult(tuple(BranchText(each, "t7 ", (7,), "length", None, None, 4) for each in request.branches))

    async def _diverge(self, request: DivergeRequest) -> DivergeResult:
        made = await self._branch(BranchRequest(request.branch, count=request.count))
        return DivergeResult(
            tuple(
                Attempt(each.branch, "t7 ", (7,), "length", None, None, 4, kept=True, measure=-1.0)
                for each in made.branches
            )
        )

    async def _guide(self, request: GuideRequest) -> BranchesResult:
        return self._grown(dict.fromkeys(request.branches, 0))

    async def _prune(self, request: PruneRequest) -> PruneResult:
        return PruneResult(tuple(each for each in request.branches if self.branches.pop(each, None)), 64)

    async def _retain(self, request: RetainRequest) -> BranchInfo:
        self.branches = {request.branch: replace(self.branches[request.branch], parent=None)}
        return self.branches[request.branch]

    async def _keep(self, request: KeepRequest) -> SessionInfo:
        return await self._create(CreateRequest(request.name))

    async def _branches(self, request: BranchesRequest) -> BranchesResult:
        return BranchesResult(tuple(self.branches.values()))

    def _grown(self, by: Mapping[int, int]) -> BranchesResult:
        for branch, count in by.items():
            now = self.branches[branch]
            self.branches[branch] = replace(now, position=now.position + count, step=now.step + 1)
        return BranchesResult(tuple(self.branches[branch] for branch in by))
