"""A real document that is on every machine with Python, cut to the length that the demo wants.

Knows characters only: how many tokens they are, the daemon says.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

from ..errors import DemoUnfit, UnreadableInput
from ..reach.inputs import load_text

DEFAULT_MODULE = "argparse"  # about 100 kB of prose and code, in every Python, and alike in all versions
SAMPLE_SHARE = 18  # each of the three samples from which tokens per character are estimated is such a part


@dataclass(frozen=True, slots=True)
class Document:
    """A text with its name, and how much of it is read."""

    name: str
    path: str
    text: str

    def cut(self, chars: int) -> Document:
        """Keep the whole lines among the first characters."""
        if chars >= len(self.text):
            return self
        end = self.text.rfind("\n", 0, chars) + 1
        return Document(self.name, self.path, self.text[: end or chars])

    def sample(self, chars: int) -> str:
        """Take three pieces out of the first characters: enough to estimate, and a text unlike the document."""
        span = min(chars, len(self.text))
        starts = (0, span // 3, 2 * span // 3)
        return "\n".join(self.text[start : start + max(1, span // SAMPLE_SHARE)] for start in starts)


def load_document(path: Path | None) -> Document:
    """Load the document at the path, or the default one.

    Raises:
        UnreadableInput, DemoUnfit
    """
    chosen = path or _module_source(DEFAULT_MODULE)
    return Document(chosen.name, str(chosen), load_text(None, chosen, what="document"))


def _module_source(module: str) -> Path:
    spec = importlib.util.find_spec(module)
    if spec is None or not spec.origin or not spec.origin.endswith(".py"):
        raise DemoUnfit(f"The source of Python's {module} is not installed here. Give --document PATH.")
    if not Path(spec.origin).is_file():
        raise UnreadableInput(f"{spec.origin} is not there. Give --document PATH.", path=spec.origin)
    return Path(spec.origin)
