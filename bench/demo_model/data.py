"""The training text: what comes with Python itself, cut into documents and split by file.

Sources are the ``.py`` files of the running interpreter's standard library. Left out: test suites (they are
not installed everywhere), and the generated character tables under ``encodings``. ``pydoc_data/topics.py``
is read as the prose it holds. Short conversations are derived from the docstrings of training files.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
import platform
import sysconfig
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from .train import Documents

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END)
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
HELD_OUT_SHARE = 0.08
# One file of this size would be most of the held-out text by itself: it is always trained on.
GIANT_BYTES = 400_000
ANSWER_BYTES = 700

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

# Words with the blank before them, digits up to three at a time, runs of signs, a line's end with its indent.
PIECES = r"\r?\n[ \t]*| ?\p{L}+| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|[ \t]+(?=\S)|\s+"

QUESTIONS = (
    "What does {name} do?",
    "Explain {name}.",
    "What is {name}?",
    "How do I use {name} in Python?",
    "Tell me about {name}.",
)
SYSTEM = "You answer questions about the Python standard library."


@dataclass(frozen=True)
class SourceFile:
    """One file of the standard library: its dotted module name, its path below the library, its text."""

    module: str
    path: str
    text: str


@dataclass(frozen=True)
class Corpus:
    """The files on either side of the split, and what describes them in the model card."""

    training: tuple[SourceFile, ...]
    held_out: tuple[SourceFile, ...]
    description: dict[str, Any]


def collect(seed: int, library: Path | None = None) -> Corpus:
    """Reads the standard library and splits it by a hash of the module name and ``seed``."""
    root = library or Path(sysconfig.get_path("stdlib"))
    files = list(read_files(root))
    held_out = [file for file in files if is_held_out(file, seed)]
    training = [file for file in files if not is_held_out(file, seed)]
    held_out, doubles = without_doubles(held_out, training)
    return Corpus(tuple(training), tuple(held_out), describe(training, held_out, doubles))


def read_files(root: Path) -> Iterator[SourceFile]:
    """The usable files below ``root`` by path, each content once."""
    seen: set[bytes] = set()
    for path in sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).as_posix()):
        relative = path.relative_to(root)
        if SKIPPED_FOLDERS.intersection(relative.parts[:-1]) or not path.is_file():
            continue
        try:
            text = path.read_bytes().decode("utf-8").replace("\r\n", "\n")
        except UnicodeDecodeError:
            continue
        digest = hashlib.sha256(text.encode()).digest()
        if not text.strip() or is_generated_table(text) or digest in seen:
            continue
        seen.add(digest)
        yield SourceFile(module_name(relative), relative.as_posix(), text)


def module_name(relative: Path) -> str:
    """``json/__init__.py`` is ``json``, ``os.py`` is ``os``."""
    parts = list(relative.with_suffix("").parts)
    if parts[-1] == "__init__" and len(parts) > 1:
        parts.pop()
    return ".".join(parts)


def is_generated_table(text: str) -> bool:
    """Whether the file is one of the character tables: alike, and no text anyone would write."""
    return "codecs.charmap_build" in text or "decoding_map = " in text


def is_held_out(file: SourceFile, seed: int) -> bool:
    """Whether the file's module name falls on the side that is never trained on."""
    if len(file.text.encode()) > GIANT_BYTES:
        return False
    digest = hashlib.sha256(f"{seed}:{file.module}".encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64 < HELD_OUT_SHARE


def without_doubles(
    held_out: list[SourceFile], training: list[SourceFile]
) -> tuple[list[SourceFile], list[SourceFile]]:
    """Parts the held-out files from those of which training files hold half of the longer lines.

    The latter are dropped from both sides (their text is in the training files anyway).
    """
    known = {line for file in training for line in distinctive_lines(file.text)}
    kept: list[SourceFile] = []
    doubles: list[SourceFile] = []
    for file in held_out:
        lines = distinctive_lines(file.text)
        (doubles if lines and len(lines & known) >= 0.5 * len(lines) else kept).append(file)
    return kept, doubles


def distinctive_lines(text: str) -> set[str]:
    """The stripped lines of at least 30 characters."""
    return {line.strip() for line in text.splitlines() if len(line.strip()) >= 30}


def describe(training: list[SourceFile], held_out: list[SourceFile], doubles: list[SourceFile]) -> dict[str, Any]:
    """What was read: counts, bytes, digests."""
    return {
        "python": platform.python_version(),
        "source": "the interpreter's standard library (.py), without test suites and character tables",
        "training_files": len(training),
        "training_bytes": total_bytes(training),
        "training_digest": digest_of(training),
        "held_out_files": len(held_out),
        "held_out_bytes": total_bytes(held_out),
        "held_out_digest": digest_of(held_out),
        "dropped_as_near_copies": [file.module for file in doubles],
    }


def total_bytes(files: list[SourceFile]) -> int:
    """Bytes of the files in UTF-8."""
    return sum(len(file.text.encode()) for file in files)


def digest_of(files: list[SourceFile]) -> str:
    """SHA-256 over the files' paths and contents, in order."""
    digest = hashlib.sha256()
    for file in files:
        content = file.text.encode()
        digest.update(f"{file.path}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


def training_texts(corpus: Corpus, seed: int) -> list[str]:
    """The documents to train on, without separators: sources, help topics as prose, conversations."""
    texts: list[str] = []
    conversations: list[str] = []
    for file in corpus.training:
        topics = help_topics(file)
        texts.extend(f"{title}\n\n{body}" for title, body in topics)
        pairs = topic_pairs(topics) if topics else docstring_pairs(file)
        conversations.extend(render_conversations(pairs, seed))
        if not topics:
            texts.append(file.text)
    return texts + conversations


def help_topics(file: SourceFile) -> list[tuple[str, str]]:
    """The (title, prose) pairs of ``pydoc_data/topics.py``; nothing for any other file."""
    if file.module != "pydoc_data.topics":
        return []
    for node in ast.parse(file.text).body:
        if isinstance(node, ast.Assign):
            value = ast.literal_eval(node.value)  # reads constants only: no code runs
            if isinstance(value, dict):
                return [(str(title), str(body).strip() + "\n") for title, body in value.items()]
    return []


def topic_pairs(topics: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Questions after the help topics, with the beginning of their prose as the answer."""
    pairs = []
    for title, body in topics:
        heading, _, rest = body.partition("\n")
        rest = rest.lstrip("*=-~\n")
        if rest:
            pairs.append((f"{heading.strip() or title} in Python", shorten(rest)))
    return pairs


def docstring_pairs(file: SourceFile) -> list[tuple[str, str]]:
    """(qualified name, answer) for the public things of a file that have a docstring."""
    try:
        with warnings.catch_warnings(action="ignore"):  # of odd escapes in strings
            tree = ast.parse(file.text)
    except SyntaxError:
        return []
    pairs = [(f"the {file.module} module", shorten(doc))] if (doc := ast.get_docstring(tree)) else []
    pairs.extend(nested_pairs(tree, file.module))
    return pairs


def nested_pairs(node: ast.AST, prefix: str) -> Iterator[tuple[str, str]]:
    """Walks the classes and functions below ``node``, outermost first."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if child.name.startswith("_"):
            continue
        name = f"{prefix}.{child.name}"
        doc = ast.get_docstring(child)
        if doc and len(doc) >= 20:
            yield name, f"`{signature(child, name)}`\n\n{shorten(doc)}"
        if isinstance(child, ast.ClassDef):
            yield from nested_pairs(child, name)


def signature(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef, name: str) -> str:
    """``os.path.join(a, *p)``, or the bare name of a class."""
    if isinstance(node, ast.ClassDef):
        return f"class {name}"
    return f"{name}({ast.unparse(node.args)})"


def shorten(doc: str) -> str:
    """The first paragraphs of a docstring, up to ``ANSWER_BYTES`` characters."""
    paragraphs = inspect.cleandoc(doc).split("\n\n")
    answer = paragraphs[0][: 2 * ANSWER_BYTES]
    for paragraph in paragraphs[1:]:
        if len(answer) + len(paragraph) > ANSWER_BYTES:
            break
        answer += "\n\n" + paragraph
    return answer.strip()


def render_conversations(pairs: list[tuple[str, str]], seed: int) -> Iterator[str]:
    """Conversations of one to three questions; wording and length follow from a hash of the names."""
    position = 0
    while position < len(pairs):
        draw = hashlib.sha256(f"{seed}:{pairs[position][0]}".encode()).digest()
        turns = 1 + (draw[0] % 4 == 0) + (draw[0] % 8 == 0)
        messages = [{"role": "system", "content": SYSTEM}] if draw[1] % 3 == 0 else []
        for index, (name, answer) in enumerate(pairs[position : position + turns]):
            question = QUESTIONS[draw[2 + index] % len(QUESTIONS)].format(name=name)
            messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        yield render_chat(messages)
        position += turns


_TEMPLATE = jinja2.Environment(autoescape=False).from_string(CHAT_TEMPLATE)


def render_chat(messages: list[dict[str, str]]) -> str:
    """The conversation as the model sees it."""
    return _TEMPLATE.render(messages=messages, add_generation_prompt=False)


def train_tokenizer(texts: list[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE of ``vocab_size`` entries, the special tokens first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def tokenise(tokenizer: Tokenizer, texts: list[str]) -> Documents:
    """Each text behind an end-of-text token, which so also ends the text before it."""
    separator = tokenizer.token_to_id(END_OF_TEXT)
    encoded = tokenizer.encode_batch(texts)
    parts = [np.array([separator, *item.ids], dtype=np.uint16) for item in encoded]
    return Documents(np.concatenate(parts), np.cumsum([len(part) for part in parts]))


def prepare(folder: Path, seed: int, vocab_size: int, library: Path | None = None) -> dict[str, Any]:
    """Reads, splits and tokenises everything into ``folder``, unless that is there already.

    The folder then holds all that training needs, so that it can run where the library is another one:
    ``tokenizer.json``, ``training.npz``, ``held_out.json`` (texts) and ``data.json`` (the description).
    """
    told = folder / "data.json"
    if told.exists():
        description: dict[str, Any] = json.loads(told.read_text(encoding="utf-8"))
        if (description["seed"], description["vocab_size"]) != (seed, vocab_size):
            raise ValueError(f"{folder} was prepared for another seed or vocabulary: choose another folder")
        return description
    corpus = collect(seed, library)
    texts = training_texts(corpus, seed)
    tokenizer = train_tokenizer(texts, vocab_size)
    documents = tokenise(tokenizer, texts)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    np.savez(folder / "training.npz", flat=documents.flat, ends=np.cumsum([len(p) for p in documents.parts]))
    held_out = [{"module": file.module, "path": file.path, "text": file.text} for file in corpus.held_out]
    (folder / "held_out.json").write_text(json.dumps(held_out), encoding="utf-8")
    counts = {"training_documents": len(texts), "training_tokens": documents.tokens}
    description = corpus.description | counts | {"seed": seed, "vocab_size": vocab_size}
    told.write_text(json.dumps(description, indent=2), encoding="utf-8")
    return description


def load_documents(folder: Path) -> Documents:
    """The tokenised training documents that ``prepare`` left in ``folder``."""
    with np.load(folder / "training.npz", allow_pickle=False) as saved:
        return Documents(saved["flat"], saved["ends"])


def load_held_out(folder: Path) -> list[SourceFile]:
    """The held-out files that ``prepare`` left in ``folder``."""
    entries = json.loads((folder / "held_out.json").read_text(encoding="utf-8"))
    return [SourceFile(entry["module"], entry["path"], entry["text"]) for entry in entries]
