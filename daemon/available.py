"""`python -m torpor.daemon.available [BUDGET]`: the models in the hub's cache, and the memory that each would take, as
one JSON object on standard output. BUDGET: the memory budget of a daemon, in bytes.

A process of its own, so that the command line, which shows the answer, never imports MLX.
"""

from __future__ import annotations

import json
import sys
from typing import Any, Final

from huggingface_hub import constants

from ..errors import TorporError
from .engine.generation import PREFILL_CHUNK_TOKENS
from .memory.memory import default_budget
from .models.hub import CachedModel, models_in_cache
from .models.models import Prospect, foresee

TOKEN_COUNTS: Final = (8 << 10, 32 << 10, 128 << 10)
"""Sessions whose memory is told, if the model's context is as long."""


def look(budget: int | None) -> dict[str, Any]:
    """The report. budget: in bytes; None for that of a daemon that would start with the model alone."""
    models = [_facts_of(model, budget) for model in models_in_cache()]
    return {"cache": constants.HF_HUB_CACHE, "token_counts": TOKEN_COUNTS, "models": models}


def _facts_of(model: CachedModel, budget: int | None) -> dict[str, Any]:
    facts: dict[str, Any] = {"name": model.name, "disk_bytes": model.disk_bytes, "memory": {}}
    unknown = dict.fromkeys(("context_tokens", "weights_bytes", "fitting_tokens", "budget_bytes"))
    if model.folder is None:
        return facts | unknown | {"problem": "it is not whole; a daemon that serves it downloads the rest"}
    try:
        prospect = foresee(model.folder)
    except TorporError as error:
        return facts | unknown | {"problem": error.message}
    if budget is None:
        budget = default_budget(prospect.weights_bytes, prospect.weights_bytes)
    return facts | {
        "context_tokens": prospect.context_tokens,
        "weights_bytes": prospect.weights_bytes,
        "memory": {
            str(count): _bytes_at(prospect, count) for count in TOKEN_COUNTS if count <= prospect.context_tokens
        },
        "fitting_tokens": _fitting(prospect, budget),
        "budget_bytes": budget,
        "problem": None,
    }


def _bytes_at(model: Prospect, token_count: int) -> int:
    """The memory of a model and of one session of so many tokens: what is reserved for both."""
    return model.weights_bytes + model.layout.most_bytes(token_count, PREFILL_CHUNK_TOKENS)


def _fitting(model: Prospect, budget: int) -> int:
    """The tokens of the longest session that fits into a budget beside the model alone."""
    fits, too_many = 0, model.context_tokens + 1
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        fits, too_many = (middle, too_many) if _bytes_at(model, middle) <= budget else (fits, middle)
    return fits


def main() -> None:
    budget = int(sys.argv[1]) if len(sys.argv) > 1 else None
    print(json.dumps(look(budget)))


if __name__ == "__main__":
    main()
