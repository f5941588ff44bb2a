"""How fast a store's daemon has read, written and computed on its machine, for the next one to plan with.

Owns the form of the file and its limits, not the meaning of a figure: here it is a name, an amount, the seconds that
this took, and the number of samples. The file has no name of a session and no token.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ..disk.sealed_json import SealedFormat
from .folder import StoreFolder
from .small_files import load_small, save_small

RATES_FILE: Final = "rates.json"
MAX_SUBJECTS: Final = 32
"""Subjects (a model on a machine) with figures in the file: those measured last."""
MAX_NAME_CHARS: Final = 32
MAX_FIGURES: Final = 8
"""Figures of one subject."""
_SMALLEST: Final = 1e-9
_LARGEST: Final = 1e15
"""Beyond these an amount or a time was not measured; between them no quotient or product overflows."""
_SUBJECT_CHARS: Final = 32
_FORMAT: Final = SealedFormat("torpor.rates", 1, 64 * 1024, 4096)

Figure = tuple[float, float, int]
"""An amount, the seconds that it took, and the number of samples."""
Figures = Mapping[str, Mapping[str, Figure]]
"""By subject (32 hex digits), then by name."""


def load_rates(folder: StoreFolder) -> dict[str, dict[str, Figure]]:
    fields = load_small(folder, RATES_FILE, _FORMAT)
    subjects = (fields or {}).get("subjects")
    if not isinstance(subjects, list) or len(subjects) > MAX_SUBJECTS:
        return {}
    found: dict[str, dict[str, Figure]] = {}
    for each in subjects:
        if not isinstance(each, dict) or set(each) != {"subject", "figures"} or not _is_subject(each["subject"]):
            return {}
        figures = each["figures"]
        if not isinstance(figures, dict) or len(figures) > MAX_FIGURES or not all(map(_is_name, figures)):
            return {}
        if not all(map(_is_figure, figures.values())):
            return {}
        found[each["subject"]] = {name: (float(one[0]), float(one[1]), one[2]) for name, one in figures.items()}
    return found


def save_rates(folder: StoreFolder, figures: Figures) -> None:
    """Save the last `MAX_SUBJECTS` in place of the old ones. Raises NoSpace, StoreIoError, DurabilityLost."""
    kept = list(figures.items())[-MAX_SUBJECTS:]
    subjects = [
        {"subject": subject, "figures": {name: list(one) for name, one in named.items()}} for subject, named in kept
    ]
    save_small(folder, RATES_FILE, _FORMAT, {"subjects": subjects})


def _is_subject(value: Any) -> bool:
    return isinstance(value, str) and len(value) == _SUBJECT_CHARS and value.isascii() and value.isalnum()


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and 1 <= len(value) <= MAX_NAME_CHARS


def _is_figure(value: Any) -> bool:
    if not isinstance(value, list) or len(value) != 3 or type(value[2]) is not int or value[2] < 1:
        return False
    return all(type(each) in (int, float) and _SMALLEST <= each <= _LARGEST for each in value[:2])
