"""The contract of each verb over every front that has it. What a verb does to a model is proved in tests/daemon; here,
that each front asks for all of it, and tells all of it (`fronts_rig.py` compares)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from torpor.daemon.api.sampling import Sampling, TokenBias
from torpor.daemon.api.session import SessionInfo
from torpor.daemon.api.verbs import VERBS
from torpor.tests.socket_api.fronts.fronts_rig import COVERED, FRONTS, OF_THE_PROCESS, ROUTE_OF, Front, contract
from torpor.tests.socket_api.real_daemon import tokens_of, until

PAST = tokens_of(7, 40)
SAID = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
DRAWN = Sampling(temperature=0.9, seed=5)


@pytest.fixture
def session(there: Front, name: str) -> str:
    """A session that has read something, and is labelled with its own name."""
    there.create(name, sampling=DRAWN, labels=[name])
    there.append(name, tokens=PAST)
    return name


@pytest.fixture
def asleep(there: Front, session: str) -> str:
    """The same, asleep in its first version."""
    there.sleep(session)
    return session


def test_every_verb_has_a_contract_over_every_front_that_has_it() -> None:
    for each in FRONTS:
        missing = (ROUTE_OF if each == "http" else VERBS).keys() - OF_THE_PROCESS - COVERED[each]
        assert not missing, f"ask for it over {each}, in a contract of this file"


# --- sessions


@contract("create", "list", "show", "set")
def test_a_session_is_made_listed_shown_and_set(front: Front, there: Front, name: str) -> None:
    def as_made(info: SessionInfo) -> SessionInfo:
        return replace(info, used_ns=0)

    told = front.create(name, labels=["a"], sampling=Sampling(temperature=0.5, seed=2**64 - 1), durability="none")
    made = as_made(told)
    assert told.used_ns > 10**18
    assert (made.session, made.labels, made.sampling.seed) == (f"torpor://default/{name}", ("a",), 2**64 - 1)
    assert made in [as_made(each) for each in front.list_sessions().sessions]
    assert front.list_sessions("another").sessions == ()
    assert as_made(front.show(name).info) == made
    changed = front.set(name, sampling=Sampling(temperature=0.0), labels=["b"])
    assert (changed.sampling.temperature, changed.sampling.seed, changed.labels) == (0.0, 2**64 - 1, ("b",))
    assert as_made(there.show(name).info) == as_made(changed)
    assert front.refusal("create", name) == "session_exists"


@contract("sleep", "save", "wake")
def test_a_session_is_saved_sleeps_and_wakes(front: Front, there: Front, session: str) -> None:
    assert front.save(session).version == 1
    there.append(session, tokens=PAST)
    receipt = front.sleep(session)
    assert (receipt.version, receipt.token_count) == (2, 80)
    woken = front.wake(session, strict=True)
    assert (woken.bundle_id, woken.tokens_prefilled) == (receipt.bundle_id, 0)
    there.sleep(session)
    look = front.wake(f"{session}@1")
    assert (look.version, look.token_count) == (1, 40)
    there.sleep(session)
    assert front.wake(session, version=2, at_token=50).token_count == 50
    assert front.refusal("wake", session, version=1) == "session_awake"


@pytest.mark.one_in(1)
@contract("fork", "fold")
def test_a_session_is_forked_and_folded(front: Front, there: Front, asleep: str) -> None:
    assert front.fork(asleep, f"{asleep}-whole").token_count == 40
    part = front.fork(f"{asleep}@1", f"{asleep}-part", at_token=16, labels=["x"])
    assert (part.token_count, there.show(f"{asleep}-part").info.labels) == (16, ("x",))
    folded = front.fold(asleep, f"{asleep}-folded", summary="short", tail=4, labels=["y"])
    assert (folded.summary, folded.tail_tokens) == ("short", 4)
    assert front.fold(asleep, f"{asleep}-summed", summarize=3).summary


@pytest.mark.one_in(1)
@contract("history")
def test_a_session_tells_its_history_and_its_kin(front: Front, there: Front, asleep: str) -> None:
    there.fork(asleep, f"{asleep}-part", at_token=16)
    there.append(asleep, tokens=PAST)
    found = front.history([asleep])
    assert [(each.uri.name, each.way, each.added_tokens) for each in found.entries] == [
        (f"{asleep}-part", "forked", 0),
        (asleep, "began", 40),
    ]
    assert found.entries[0].origin.bundle_id == found.entries[1].bundle_id
    assert [(each.session, each.token_count, each.added_tokens) for each in found.in_memory] == [
        (f"torpor://default/{asleep}", 80, 40)
    ]
    assert front.history(asleep, limit=1).left_out == 1
    assert front.history(namespace="another").entries == ()
    assert front.history(since_ns=2**62).entries == ()
    assert front.refusal("history", ["nobody"]) == "session_not_found"


@contract("why", "causes", "delete")
def test_a_session_says_why_it_was_read_anew_and_is_deleted(front: Front, there: Front, asleep: str) -> None:
    there.generate(asleep, text="and so", max_tokens=1)
    assert [each.verb for each in front.why(asleep).requests] == ["append", "generate"]
    costs = {each.key: each for each in front.causes(since="1h", by="session", namespace="default").rows}
    assert costs[f"torpor://default/{asleep}"].written_tokens == 1
    assert costs.keys() <= {each.key for each in front.causes(by="session").rows}
    there.save(asleep)
    assert front.delete(f"{asleep}@1").versions_deleted == 1
    assert front.delete(asleep).versions_deleted == 1
    assert front.refusal("show", asleep) == "session_not_found"


@pytest.mark.one_in(1)
@contract("contents")
def test_the_contents_of_a_version_are_told_page_by_page(front: Front, there: Front, asleep: str) -> None:
    page = front.contents(f"{asleep}@1", start=3, end=30, most=10, tokens=True)
    assert (page.start, page.end, page.following, page.tokens) == (3, 13, 13, tuple(PAST[3:13]))
    assert "".join(page.token_texts) == page.passages[0].text
    assert front.contents(f"{asleep}:35", start=20).end == 35
    assert '"block_tokens": 40' in (front.contents(asleep, manifest=True).manifest or "")
    there.append(asleep, tokens=PAST)
    assert (front.contents(asleep).token_count, front.contents(asleep).changed) == (80, True)
    assert front.refusal("contents", "nobody") == "session_not_found"


@contract("difference")
def test_two_memories_are_compared(front: Front, there: Front, asleep: str) -> None:
    there.fork(f"{asleep}:30", f"{asleep}-part")
    there.append(f"{asleep}-part", tokens=PAST[:10])
    found = front.difference(asleep, f"{asleep}-part", tokens=True)
    assert (found.common_tokens, found.one.differs_at, found.other.token_count) == (30, 30, 40)
    assert (found.one.alone_blocks, found.other.changed) == (2, True)
    assert sum(line.startswith("-") for line in found.lines) == found.lines_removed
    assert front.difference(f"{asleep}@1", asleep).is_none
    assert front.refusal("difference", asleep, "nobody") == "session_not_found"


@pytest.mark.one_in(1)
@contract("blocks")
def test_the_blocks_of_a_version_are_told_with_who_needs_them(front: Front, there: Front, asleep: str) -> None:
    found = front.blocks(f"{asleep}@1", deep=True)
    assert (found.token_count, [(each.kind, each.start, each.tokens) for each in found.blocks]) == (
        40,
        [("span", 0, 40), ("state", 40, 0)],
    )
    assert found.stored_bytes == found.beside_bytes + sum(each.stored_bytes for each in found.blocks)
    assert (found.shared_bytes + found.alone_bytes, found.deep) == (found.stored_bytes, True)
    assert {each.condition for each in found.blocks} == {"whole"}
    there.fork(asleep, f"{asleep}-twin")
    after = front.blocks(asleep)
    assert [each.sessions_needing - 1 for each in after.blocks] == [each.sessions_needing for each in found.blocks]
    assert (after.shared_bytes + after.alone_bytes, after.common_tokens) == (after.stored_bytes, 40)
    there.wake(asleep, at_token=16)
    there.append(asleep, tokens=PAST[:4])
    back = front.blocks(asleep)
    assert (back.common_tokens, [each.tokens for each in back.blocks]) == (16, [40])
    assert [(each.start, each.end) for each in back.rest] == [(16, 20)]
    assert front.refusal("blocks", "nobody") == "session_not_found"


@contract("plan_wake", "warm", "stats", "clear")
def test_sessions_of_a_label_are_planned_warmed_counted_and_cleared(front: Front, there: Front, asleep: str) -> None:
    plan = front.plan_wake(asleep, version=1, at_token=30, strict=True)
    assert (plan.already_awake, plan.token_count) == (False, 30)
    assert [each.hit for each in front.warm([asleep]).sessions] == [False]
    assert front.warm(asleep).sessions[0].hit, "one stands for a list of it"
    assert front.warm(label=asleep, namespace="default").sessions[0].info.name == asleep
    assert front.plan_wake(asleep).already_awake
    (figures,) = front.stats(asleep, namespace="default").labels
    assert (figures.label, figures.sessions, figures.tokens) == (asleep, 1, 40)
    assert front.stats().total.sessions >= 1
    assert front.clear(asleep, dry_run=True).sessions == (f"torpor://default/{asleep}",)
    assert there.show(asleep)
    assert front.clear(asleep, namespace="default").written_bytes > 0
    assert there.refusal("show", asleep) == "session_not_found"


# --- reading and writing


@pytest.mark.one_in(1)
@contract("append", "generate", "chat")
def test_a_session_reads_and_writes(front: Front, there: Front, name: str) -> None:
    read = front.append(name, tokens=[0, *PAST, 4095], create=True, labels=["x"])
    assert (read.tokens_added, there.show(name).info.labels) == (42, ("x",))
    assert front.append(name, text="one two").token_count > 42
    assert front.append(name, messages=SAID[1:]).tokens_added
    there.fork(name, f"{name}-same")
    asked: dict[str, Any] = {"text": "x", "stop": ["END"], "prove": True, "sampling": Sampling(top_k=3, seed=1)}
    written = front.generate(name, max_tokens=5, logprobs=2, **asked)
    assert len(written.logits_blake3) == len(written.tokens) == len(written.logprobs)
    assert there.generate(f"{name}-same", max_tokens=5, **asked).tokens == written.tokens
    assert front.generate(name, max_tokens=1, tokens=[5, 6], priority="background").prefilled_tokens >= 2
    assert front.chat(name, "hi", role="user", max_tokens=2).tokens
    told = front.chat(f"{name}-told", messages=SAID, on_divergence="rewind", create=True, max_tokens=2, stop="END")
    assert told.session == f"torpor://default/{name}-told"


@contract("append", "generate", "chat")
def test_what_a_context_cannot_hold_is_refused_with_its_sizes(front: Front, session: str) -> None:
    assert front.refusal("append", session, tokens=[1] * 9000) == "context_overflow"
    assert front.refusal("generate", session, max_tokens=9000) == "context_overflow"
    assert front.refusal("chat", session, "many words " * 9000) == "context_overflow"


@contract("converse", "measure", "recall", "disown")
def test_a_transcript_is_measured_answered_recalled_and_disowned(front: Front, name: str) -> None:
    answer_id, said = f"{abs(hash(name)):032x}"[-32:], [*SAID, {"role": "user", "content": name}]
    tools = [
        {
            "name": "add",
            "description": "adds",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
        }
    ]
    measured = front.measure(name, said, tools=tools, volatile="It is 12:00.")
    assert (measured.cached_tokens, measured.model) == (0, "demo")
    answered = front.converse(
        name,
        said,
        tools=tools,
        max_tokens=3,
        sampling=Sampling(seed=3),
        answer_id=answer_id,
        durable=True,
        labels=["x"],
        volatile="It is 12:00.",
        checkpoints=[1],
        keep_awake_s=1.5,
    )
    assert answered.token_count == measured.tokens + len(answered.tokens)
    recalled = front.recall(answer_id=answer_id, namespace="default")
    assert recalled.messages[-1].answer_id == answer_id
    assert [each.role for each in front.recall(name).messages] == ["system", "system", "user", "user", "assistant"]
    assert front.disown(answer_id)
    assert front.refusal("recall", answer_id=answer_id) == "answer_not_found"


# --- the store, and the process


@pytest.mark.one_in(1)
@contract("mark", "maintain")
def test_versions_are_marked_and_maintained(front: Front, there: Front, asleep: str) -> None:
    marked = front.mark(f"{asleep}@1", tag="before", move=True)
    assert (marked.version, marked.tags, marked.pinned) == (1, ("before",), False)
    assert front.mark(asleep, pinned=True).pinned
    assert front.mark(asleep, untag="before").tags == ()
    there.append(asleep, tokens=PAST)
    there.save(asleep)
    assert front.mark(f"{asleep}@1", pinned=False).version == 1
    pruned = front.maintain("prune", session=asleep, keep_last=1, dry_run=True).actions
    assert [each.version for each in pruned if each.session] == [1]
    assert front.maintain("repack", session=asleep, cold_after_days=30).operation == "repack"
    assert front.maintain("prune", session=asleep, keep_days=7.5).operation == "prune"
    assert front.maintain("forget", session=asleep, dry_run=True).dry_run


@contract("analyze")
def test_a_version_is_analyzed(front: Front, asleep: str) -> None:
    assert front.analyze(f"{asleep}@1", kind="probe", labels=["a", "b"]).token_count == 40


@contract("import_bundle")
def test_versions_are_imported_and_a_store_is_repaired(front: Front, asleep: str) -> None:
    assert front.maintain("repair").operation == "repair"
    assert front.refusal("import_bundle", "ab" * 32, session=f"{asleep}-other")


@contract("push", "pull", "remote")
def test_a_daemon_without_a_remote_says_how_to_get_one(front: Front, asleep: str) -> None:
    """With one: tests/daemon/test_remote.py, and those beside it."""
    assert front.refusal("push", asleep) == front.refusal("pull", asleep) == front.refusal("remote") == "no_remote"
    assert front.refusal("sleep", asleep, remote=True) == front.refusal("save", asleep, remote=True) == "no_remote"


@pytest.mark.one_in(1)
@contract("status", "usage")
def test_the_process_tells_its_state_and_the_store_its_space(front: Front, asleep: str) -> None:
    assert [each.name for each in front.status().models] == ["demo"]
    uri = f"torpor://default/{asleep}"
    until(
        lambda: uri in [each.session for each in front.usage("default").sessions]
    )  # the last count is told for a moment
    found = front.usage("default")
    assert [each.token_count for each in found.sessions if each.session == uri] == [40]
    assert found.file_bytes == found.alone_bytes + found.shared_bytes + found.rest_bytes
    assert front.usage(namespace="another").sessions == ()


@contract("load_model", "unload_model")
def test_the_process_loads_models(front: Front) -> None:
    assert front.load_model("demo").resident
    assert front.refusal("load_model", "other") == front.refusal("unload_model", "other")


@pytest.mark.one_in(1)
@contract("unload_model")
def test_a_model_is_unloaded_and_its_sessions_sleep(front: Front, there: Front, session: str) -> None:
    assert not front.unload_model("demo").resident
    assert there.show(session).info.state == "asleep"


# --- branches


@pytest.mark.one_in(1)
@contract("tree", "branch", "prefill", "produce", "commit", "advance", "guide", "branches", "diverge", "keep")
def test_branches_grow_from_a_session(front: Front, there: Front, session: str) -> None:
    root = front.tree(session, priority="background").branch
    one, other = (each.branch for each in front.branch(root, count=2, seeds=[1, 2]).branches)
    read = front.prefill([{"branch": one, "text": " and so"}, {"branch": other, "tokens": PAST}]).branches
    assert read[1].position == 80
    (drawn,) = front.produce([one], logprobs=3, logits=True).produced
    assert len(drawn.logits) == 4 * 4096
    (after,) = front.commit([{"branch": one, "token": drawn.token, "step": drawn.step}]).branches
    assert after.measured_tokens == 1
    written = front.advance([one, other], max_tokens=4, stop=["END"], logprobs=1).written
    assert [each.branch for each in written] == [one, other]
    bias = [{"token": 9, "bias": 1.5}, {"token": 10}]
    guided = front.guide([one], sampling=Sampling(top_k=9, logit_bias=bias), steer=bias, constraint={"regex": "a+"})
    assert (guided.branches[0].steered_tokens, guided.branches[0].constrained) == (2, True)
    assert guided.branches[0].sampling.logit_bias[1] == TokenBias(10)
    assert not front.guide([one], free=True).branches[0].constrained
    attempts = front.diverge(other, count=3, max_tokens=2, seeds=[1, 2, 3], by="mean_logprob").attempts
    assert sum(each.kept for each in attempts) == 1
    assert {one, other} < {each.branch for each in front.branches(root).branches}
    assert front.keep(one, f"{session}-kept", labels=["x"], subtree=True).labels == ("x",)
    positions = {each.branch: each.position for each in front.branches(one).branches}
    assert there.show(f"{session}-kept").info.token_count == positions[one]
    assert front.refusal("keep", one, session) == "session_exists"
    assert front.refusal("produce", [2**62]) == "branch_not_found"


@contract("prune", "retain")
def test_branches_are_pruned_and_one_is_retained(front: Front, session: str) -> None:
    root = front.tree(session).branch
    one, other = (each.branch for each in front.branch(root, count=2, seeds=[1, 2]).branches)
    assert front.refusal("prune", [root]) == "branch_has_children"
    assert front.prune([other], subtree=True).pruned == (other,)
    assert front.retain(one).parent is None
    assert front.prune([one]).pruned == (one,)
