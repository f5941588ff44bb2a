"""The codes are what clients and scripts go by: each is said once, and does not change."""

from __future__ import annotations

from torpor.daemon import errors
from torpor.daemon.errors import DaemonError
from torpor.errors import TorporError


def test_every_refusal_has_a_code_of_its_own() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, DaemonError)]
    assert {kind.__name__: kind.code for kind in kinds} == {
        "DaemonError": "daemon_error",
        "InvalidSampling": "invalid_sampling",
        "InvalidConstraint": "invalid_constraint",
        "SessionExists": "session_exists",
        "AnswerNotFound": "answer_not_found",
        "SessionBusy": "session_busy",
        "StopDeadline": "stop_deadline",
        "UnknownModel": "unknown_model",
        "ModelNotLoaded": "model_not_loaded",
        "NotRecomputable": "not_recomputable",
        "InvalidConfiguration": "invalid_configuration",
        "ModelInUse": "model_in_use",
        "ModelChanged": "model_changed",
        "ModelUnavailable": "model_unavailable",
        "AdapterUnavailable": "adapter_unavailable",
        "AdapterMismatch": "adapter_mismatch",
        "ContextOverflow": "context_overflow",
        "EmptyContext": "empty_context",
        "InvalidTokens": "invalid_tokens",
        "TemplateUnusable": "template_unusable",
        "InvalidTranscript": "invalid_transcript",
        "TranscriptDiverged": "transcript_diverged",
        "InvalidFold": "invalid_fold",
        "GenerationFailed": "generation_failed",
        "ServiceClosed": "service_closed",
        "MemoryBudgetExceeded": "memory_budget_exceeded",
        "MemoryBusy": "memory_busy",
        "EngineBusy": "engine_busy",
        "SessionAwake": "session_awake",
        "NoRemote": "no_remote",
        "TooManySubscribers": "too_many_subscribers",
        "UnknownEvent": "unknown_event",
        "BranchNotFound": "branch_not_found",
        "InvalidBranches": "invalid_branches",
        "BranchHasChildren": "branch_has_children",
        "TooManyBranches": "too_many_branches",
        "StaleStep": "stale_step",
        "StaleLogits": "stale_logits",
        "LogitsLent": "logits_lent",
        "InvalidLogits": "invalid_logits",
    }
    assert issubclass(DaemonError, TorporError)
