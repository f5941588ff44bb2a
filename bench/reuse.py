"""What a turn of a growing chat costs that is sent as a whole transcript each time, over the daemon's own socket.

The demo model, ten turns: a system text, and a new message and an answer each turn. Twice: with the model's template,
and with one that does what those of models that think do, though the demo model does not think: it opens each turn of
the assistant with words that no earlier turn is rendered with, and leaves out the first words of earlier answers. The
client gives each answer back whole.

For each turn: the tokens that the daemon read, beside those of the new message in its template, those of the whole
transcript, and those that stand behind the first difference between the session's tokens and the transcript rendered
anew, which is what a cache by token prefix would read. And the time to the first token, beside that of a session which
has read nothing and is sent the same transcript. Every session's tokens are followed here and compared in number.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from figures import label_at_end, panels, parser_for, rounds_of, save
from machine import spread
from torpor.daemon.prefixes.prefixes import tokens_in_common
from torpor.socket_api import Client
from torpor.socket_api.errors import DaemonUnreachable
from transformers import AutoTokenizer

ROUNDS = 3
TURNS, QUICK_TURNS = 10, 3
ANSWER_TOKENS, QUICK_ANSWER_TOKENS = 60, 4
DEMO_MODEL = Path(__file__).parents[1] / "daemon" / "demo_model"
THINKING = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}"
    "{{ m.content.split(' ', 3)[-1] if m.role == 'assistant' else m.content }}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\nThe module ' }}{% endif %}"
)
SYSTEM = {"role": "system", "content": "You answer questions about the modules of Python's standard library. " * 4}
QUESTIONS = ("os.path", "argparse", "json", "asyncio", "pathlib", "sqlite3", "logging", "hashlib", "zipfile", "shutil")
_DEADLINE_S = 120.0


def message(turn: int) -> dict[str, str]:
    """What the client says at a turn: two sentences, each time others."""
    name = QUESTIONS[turn % len(QUESTIONS)]
    return {
        "role": "user",
        "content": f"Question {turn + 1}. What is the module {name} for, and which of its functions are used most? "
        f"Give an example of how a program would import {name}, and say what it returns when it fails.",
    }


class Rendering:
    """The template as a client without a session would use it: a model's folder, its tokens of a chat."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer: Any = AutoTokenizer.from_pretrained(str(folder))

    def whole(self, messages: list[dict[str, str]]) -> list[int]:
        """A transcript, up to where the assistant is to speak."""
        text = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def behind(self, new: dict[str, str], ledger: list[int]) -> list[int]:
        """One message behind an answer, from the end of that on; one that was cut short is closed first."""
        closing = "\n" if ledger[-1] == self._tokenizer.eos_token_id else f"{self._tokenizer.eos_token}\n"
        opening = self._tokenizer.apply_chat_template([new], tokenize=False, add_generation_prompt=True)
        return list(self._tokenizer.encode(closing + opening, add_special_tokens=False))


def chat(client: Client, folder: Path, turns: int, answer_tokens: int) -> list[dict[str, Any]]:
    """One conversation; its turns as figures."""
    rendering, ledger, messages = Rendering(folder), [], [SYSTEM]
    client.create("agent")
    measured = []
    for turn in range(turns):
        messages.append(message(turn))
        whole = rendering.whole(messages)
        new = rendering.behind(messages[-1], ledger) if ledger else whole
        client.create("cold")
        cold = client.chat("cold", messages=messages, max_tokens=1)
        client.delete("cold")
        result = client.chat("agent", messages=messages, max_tokens=answer_tokens)
        assert cold.prefilled_tokens == len(whole)
        measured.append(
            {
                "new_message_tokens": len(new),
                "prefilled_tokens": result.prefilled_tokens,
                "behind_the_common_prefix": len(whole) - tokens_in_common(ledger, whole),
                "transcript_tokens": len(whole),
                "first_token_seconds": result.time_to_first_token_s,
                "first_token_seconds_read_again": cold.time_to_first_token_s,
            }
        )
        ledger += [*new, *result.tokens]
        assert len(ledger) == result.token_count
        messages.append({"role": "assistant", "content": result.text})
    client.delete("agent")
    return measured


@contextmanager
def daemon(folder: Path, model: Path) -> Iterator[Client]:
    """A daemon of its own on a socket in `folder`, without what new sessions take over from others."""
    command = [sys.executable, "-m", "torpor.cli.main", "serve", "--store", str(folder / "store")]
    command += ["--socket", str(folder / "s"), "--model", f"demo={model}", "--prefix-reuse", "off"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        with _connected(process, folder / "s") as client:
            yield client
            client.shutdown()
        process.wait(_DEADLINE_S)
    finally:
        process.kill()
        process.wait()


def _connected(process: subprocess.Popen[bytes], socket: Path) -> Client:
    deadline = time.monotonic() + _DEADLINE_S
    while True:
        try:
            return Client(socket)
        except DaemonUnreachable:
            assert process.poll() is None, "the daemon has ended"
            assert time.monotonic() < deadline, "the daemon does not answer"
            time.sleep(0.05)


def measure(rounds: int, turns: int, answer_tokens: int, parent: Path | None) -> dict[str, list[dict[str, Any]]]:
    """By template, the figures of each turn: tokens, the same in each round, and seconds with their spread."""
    taken = {}
    for name, template in (("its own template", None), ("a template that drops thinking", THINKING)):
        with tempfile.TemporaryDirectory(prefix="torpor-bench-", dir=parent) as place:
            model = Path(shutil.copytree(DEMO_MODEL, Path(place) / "model"))
            if template is not None:
                settings = model / "tokenizer_config.json"
                told = json.loads(settings.read_text(encoding="utf-8")) | {"chat_template": template}
                settings.write_text(json.dumps(told), encoding="utf-8")
            with daemon(Path(place), model) as client:
                rows = [chat(client, model, turns, answer_tokens) for _ in range(rounds)]
        taken[name] = [_merged(list(row)) for row in zip(*rows, strict=True)]
    return taken


def _merged(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """One turn over all rounds."""
    first = rounds[0]
    merged = {}
    for key, value in first.items():
        if key.startswith("first_token"):
            merged[key] = spread([each[key] for each in rounds])
        else:
            assert all(each[key] == value for each in rounds), "the same chat gives the same tokens"
            merged[key] = value
    return merged


def report(measured: dict[str, list[dict[str, Any]]], out: Path) -> None:
    """The figures as JSON and as a plot, and a few lines for a person."""
    figures = save("reuse", {"templates": measured}, out)
    draw(measured, figures, out / "reuse.png")
    for name, turns in measured.items():
        print(f"== {name}")
        for number, turn in enumerate(turns, 1):
            warm, cold = turn["first_token_seconds"], turn["first_token_seconds_read_again"]
            print(
                f"turn {number:>2}: {turn['prefilled_tokens']:>5} read, new {turn['new_message_tokens']:>5}"
                f"   behind the common prefix {turn['behind_the_common_prefix']:>5}"
                f"   whole {turn['transcript_tokens']:>5}"
                f"   first token {1000 * warm['median']:>7.1f} ms, read again {1000 * cold['median']:>7.1f} ms"
            )


def draw(measured: dict[str, list[dict[str, Any]]], figures: dict[str, Any], path: Path) -> None:
    """A panel for each template: tokens read in each turn, beside what else could be read."""
    last = next(iter(measured.values()))[-1]
    title = f"A turn reads its new message alone: {last['prefilled_tokens']} of {last['transcript_tokens']} at the end"
    with panels(path, figures, title, (1, len(measured)), (10, 4.2), sharey=True) as grid:
        for axes, (name, turns) in zip(grid, measured.items(), strict=True):
            numbers = list(range(1, len(turns) + 1))
            for key, label, colour in (
                ("transcript_tokens", "whole transcript", "tab:red"),
                ("behind_the_common_prefix", "behind the common prefix", "tab:orange"),
                ("prefilled_tokens", "Torpor reads", "tab:blue"),
            ):
                counts = [turn[key] for turn in turns]
                if key == "behind_the_common_prefix" and counts == [turn["prefilled_tokens"] for turn in turns]:
                    continue  # with such a template a prefix cache does as well
                axes.plot(numbers, counts, "o-", color=colour, markersize=3)
                label_at_end(axes, numbers, counts, label, colour)
            axes.set_title(name, fontsize=9)
            axes.set(xlabel="turn", yscale="log", xlim=(0.5, 1.5 * len(turns)), xticks=numbers)
        grid[0].set(ylabel="tokens read")


def main() -> None:
    """Measure and report."""
    options = parser_for(__doc__, ROUNDS).parse_args()
    turns = QUICK_TURNS if options.quick else TURNS
    answer_tokens = QUICK_ANSWER_TOKENS if options.quick else ANSWER_TOKENS
    report(measure(rounds_of(options), turns, answer_tokens, options.folder), options.out)
    print(f"figures and plot in {options.out}")


if __name__ == "__main__":
    main()
