"""Handlers for recall and disown: answers by their ids."""

from __future__ import annotations

from dataclasses import replace

from ...memvid.uri import SessionUri
from ..api.events import ignore
from ..api.recalling import DisownRequest, DisownResult, RecalledMessage, RecallRequest, RecallResult
from ..chat.conversing import Dialogue
from ..errors import AnswerNotFound
from ..parts.parts import Parts
from ..prefixes.heads import Head
from .answering import answers
from .session import require_no_look


@answers(RecallRequest)
async def recall(parts: Parts, request: RecallRequest) -> RecallResult:
    """Raises SessionNotFound, AnswerNotFound, the errors of a damaged bundle and of the model's load."""
    if request.session is not None:
        dialogue = await parts.sessions.recalling.dialogue(parts.sessions.resolve(request.session))
        result = await _result(parts, dialogue, 0, len(dialogue.text_map.turns) - 1)
        unsaid = () if dialogue.unsaid is None else (_unsaid(dialogue, dialogue.unsaid),)
        return replace(result, messages=(*result.messages, *unsaid))
    assert request.answer_id is not None
    heads = await find_answer(parts, request.namespace, request.answer_id)
    # A fold has the answer behind a summary, and so fewer tokens before it than the session in which it was given.
    best = min(heads, key=lambda head: (-head.at, not head.is_last, str(head.uri)))
    dialogue = await parts.sessions.recalling.dialogue(best.uri, past_look=True)
    turns, answer = dialogue.text_map.turns, bytes.fromhex(request.answer_id)
    last = max((at for at, turn in enumerate(turns) if turn.answer == answer), default=None)
    if last is None:
        raise answer_not_found(request.answer_id)
    before = next((at for at in range(last - 1, -1, -1) if turns[at].answer), -1)
    return await _result(parts, dialogue, before + 1, last)


@answers(DisownRequest, queued=True)
async def disown(parts: Parts, request: DisownRequest) -> DisownResult:
    """Raises AnswerNotFound, and the errors of a wake. SessionAwake: a session with it is only looked at; sessions
    before that one have lost the id."""
    heads, done = await find_answer(parts, request.namespace, request.answer_id), list[str]()
    while heads:  # a fork that is made meanwhile has the answer, too
        for head in heads:
            async with parts.sessions.woken(str(head.uri), ignore, create=False, durable=True) as (_, live):
                require_no_look(parts, live)
                text_map = live.chat.text_map.without_answers([bytes.fromhex(request.answer_id)])
                live.chat = replace(live.chat, text_map=text_map)
                live.dirty = True
                if parts.store.disk.find_session(head.uri) is not None:
                    # a fork of an older version asks the newest for what is disowned
                    await parts.sessions.keep_whole(live)
            done.append(str(head.uri))
        heads = parts.sessions.heads.behind(request.namespace, bytes.fromhex(request.answer_id))
    return DisownResult(request.answer_id, tuple(done))


def _unsaid(dialogue: Dialogue, text: str) -> RecalledMessage:
    """The system text that stands before the next message."""
    end = len(dialogue.tokens)
    return RecalledMessage("system", text, start=end, end=end, number=len(dialogue.text_map.turns))


async def find_answer(parts: Parts, namespace: str | None, answer_id: str) -> list[Head]:
    """The heads behind an answer. Raises AnswerNotFound."""
    await parts.sessions.heads.learned()
    heads = parts.sessions.heads.behind(namespace, bytes.fromhex(answer_id))
    if not heads:
        raise answer_not_found(answer_id)
    return heads


def answer_not_found(answer_id: str) -> AnswerNotFound:
    return AnswerNotFound(
        f"There is no answer {answer_id}. It was never given, or it or its session was deleted. Send the whole"
        " dialogue.",
        answer_id=answer_id,
    )


async def _result(parts: Parts, dialogue: Dialogue, first: int, last: int) -> RecallResult:
    claim = parts.sessions.claim(SessionUri(dialogue.uri.namespace, "recall"))
    async with parts.models.loading.using(dialogue.model, claim) as model:
        messages = await parts.sessions.recalling.messages(model, dialogue, first, last)
    after = dialogue.text_map.turns[first - 1].answer.hex() or None if first else None
    return RecallResult(str(dialogue.uri), dialogue.model, tuple(messages), after)
