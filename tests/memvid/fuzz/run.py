"""Fuzz one part of the store: `python tests/memvid/fuzz/run.py --target pack --seconds 600 --seed 1`.

With atheris (`pip install atheris`; Linux wheels, CPython 3.11 to 3.13) the search is guided by the coverage of
torpor.memvid; without it, or with `--engine blind`, the same changes are made by chance alone. Findings, one input for
each kind, go to `--out`; the figures are printed and, with `--json`, written. Ends with 1 if there were findings.

The work is done by a child process, so that a crash of an extension module is a finding as well.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

HERE = Path(__file__).resolve().parent
MEMORY = "/dev/shm"
SHOW_SECONDS = 2.0
FROM_SOUND = 0.4
"""Share of changes that begin with an input that is accepted: what was refused once seldom becomes right again."""


def main() -> int:
    arguments = _arguments()
    if arguments.child:
        _child(arguments)
        return 0
    if arguments.engine == "atheris" and importlib.util.find_spec("atheris") is None:
        print("atheris is not installed (pip install atheris, on Linux); changing by chance alone.", file=sys.stderr)
        arguments.engine = "blind"
    result = _supervise(arguments)
    print(json.dumps(result, indent=1))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(result, indent=1) + "\n")
    return 1 if result["findings"] else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--target", required=True)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--engine", choices=("atheris", "blind"), default="atheris")
    parser.add_argument("--corpus", help="folder that grows; a temporary one by default")
    parser.add_argument("--out", default="fuzz-findings", help="folder for inputs that were findings")
    parser.add_argument("--json", help="file for the figures")
    parser.add_argument("--stop-at-finding", action="store_true")
    parser.add_argument("--no-corpus", action="store_true", help="begin without the checked-in corpus")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser.parse_args()


# --- the parent: outlives the child


def _supervise(arguments: argparse.Namespace) -> dict[str, Any]:
    """The figures of a child, which ends with its time or with a crash."""
    with contextlib.ExitStack() as stack:
        memory = MEMORY if os.access(MEMORY, os.W_OK) else None
        work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="torpor-fuzz-run-", dir=memory)))
        corpus = Path(arguments.corpus) if arguments.corpus else work / "corpus"
        corpus.mkdir(parents=True, exist_ok=True)
        report = work / "report.json"
        began = time.monotonic()
        code, log = _run_child(arguments, corpus, report)
        seconds = time.monotonic() - began
        if not report.exists():
            sys.exit("\n".join(["The fuzzer does not run:", *log[-12:]]))
        figures: dict[str, Any] = json.loads(report.read_text())
        if code:
            figures["findings"].append(_keep_crash(arguments, work, code, log))
        return {
            "target": arguments.target,
            "engine": arguments.engine,
            "seed": arguments.seed,
            "corpus_files": len(list(corpus.iterdir())),
            "seconds": round(seconds, 1),
            "per_second": round(figures["executions"] / seconds),
            **_coverage(log),
            **figures,
        }


def _run_child(arguments: argparse.Namespace, corpus: Path, report: Path) -> tuple[int, list[str]]:
    command = [sys.executable, __file__, "--child", str(report), "--target", arguments.target, "--engine"]
    command += [arguments.engine, "--seconds", str(max(1, int(arguments.seconds))), "--seed", str(arguments.seed)]
    command += ["--corpus", str(corpus), "--out", str(Path(arguments.out).resolve())]
    command += [*(["--stop-at-finding"] if arguments.stop_at_finding else [])]
    command += [*(["--no-corpus"] if arguments.no_corpus else [])]
    log = report.with_suffix(".log")
    with log.open("wb") as stream:
        code = subprocess.run(command, stdout=stream, stderr=stream, cwd=report.parent, check=False).returncode
    return code, log.read_text(errors="replace").splitlines()


def _coverage(log: list[str]) -> dict[str, int]:
    """What libFuzzer's last line of figures says."""
    for line in reversed(log):
        if found := re.search(r"cov: (\d+) ft: (\d+)", line):
            return {"edges": int(found[1]), "features": int(found[2])}
    return {}


def _keep_crash(arguments: argparse.Namespace, work: Path, code: int, log: list[str]) -> str:
    """A child that died: libFuzzer left the input beside its report."""
    kind = f"crash:{code}"
    for pattern in ("crash-*", "timeout-*", "oom-*", "slow-unit-*"):
        for path in work.glob(pattern):
            kind = f"{path.name.split('-')[0]}:{code}"
            keep_finding(Path(arguments.out), arguments.target, path.read_bytes(), kind, "\n".join(log[-60:]))
            path.unlink()
    if kind.startswith("crash:"):
        print("\n".join(log[-12:]), file=sys.stderr)
    return kind


def keep_finding(out: Path, target: str, data: bytes, kind: str, text: str) -> None:
    out.mkdir(parents=True, exist_ok=True)
    name = f"{target}-{hashlib.sha256(data).hexdigest()[:16]}"
    (out / name).write_bytes(data)
    (out / f"{name}.txt").write_text(f"{kind}\n\n{text}\n")


# --- the child: one engine, one target


def _child(arguments: argparse.Namespace) -> None:
    out = Path(arguments.out).resolve()
    if arguments.engine == "atheris":
        import atheris

        with atheris.instrument_imports(include=["torpor.memvid"]):
            import torpor.memvid
            import torpor.memvid.store  # noqa: F401

    from torpor.memvid.errors import StoreError
    from torpor.tests.memvid.fuzz import targets
    from torpor.tests.memvid.fuzz.target import corpus_of
    from torpor.tests.memvid.fuzz.watch import Finding, Watch, limit_address_space, with_alarm

    began = time.monotonic()
    last_report = 0.0
    first_finding: float | None = None

    # in the parent's folder: libFuzzer ends the process without a chance to clear up
    with targets.opened(arguments.target, str(Path(arguments.child).parent)) as target:
        corpus = Path(arguments.corpus)
        kept = [] if arguments.no_corpus else [path.read_bytes() for path in corpus_of(target)]
        for data in (*target.seeds(), *kept):
            (corpus / hashlib.sha256(data).hexdigest()[:16]).write_bytes(data)
        watch = Watch(target.check, StoreError)
        limit_address_space()

        def report() -> None:
            figures = watch.summary() | {"first_finding_seconds": first_finding}
            Path(arguments.child).write_text(json.dumps(figures))

        def execute(data: bytes) -> Finding | None:
            nonlocal last_report, first_finding
            known = len(watch.findings)
            finding = watch.execute(data)
            now = time.monotonic() - began
            if finding is not None and len(watch.findings) > known:
                first_finding = now if first_finding is None else first_finding
                keep_finding(out, arguments.target, data, finding.kind, finding.text)
                last_report = 0.0
            if now - last_report > SHOW_SECONDS or not last_report:
                last_report = now
                report()
            return finding

        if arguments.engine == "atheris":
            _atheris(arguments, target, execute, report, watch)
        else:
            _blind(arguments, target, with_alarm(execute), report)


class _Sound:
    """Inputs that are accepted in full: those that we began with, then some of those that come up."""

    def __init__(self, corpus: str, execute: Callable[[bytes], Any], watch: Any) -> None:
        self.inputs: list[bytes] = []
        self._watch = watch
        self._seen = 0
        for path in sorted(Path(corpus).iterdir()):
            data = path.read_bytes()
            execute(data)
            self.look_at(data, always=True)

    def look_at(self, data: bytes, *, always: bool = False) -> None:
        if self._watch.last_outcome != "sound":
            return
        self._seen += 1
        if always or len(self.inputs) < 64:
            self.inputs.append(data)
        elif self._seen % 50 == 0:
            self.inputs[self._seen // 50 % 64] = data


def _atheris(
    arguments: argparse.Namespace,
    target: Any,
    execute: Callable[[bytes], Any],
    report: Callable[[], None],
    watch: Any,
) -> None:
    import atheris

    sound = _Sound(arguments.corpus, execute, watch)

    def one_input(data: bytes) -> None:
        if execute(data) is not None and arguments.stop_at_finding:
            report()
            os._exit(0)
        sound.look_at(data)

    def mutator(data: bytes, max_size: int, seed: int) -> bytes:
        rng = Random(seed)
        if sound.inputs and rng.random() < FROM_SOUND:
            data = rng.choice(sound.inputs)
        try:
            changed = target.change(data, rng)
        except Exception:  # what cannot be taken apart is still bytes
            return bytes(atheris.Mutate(data, max_size))
        return changed if len(changed) <= max_size else bytes(atheris.Mutate(data, max_size))

    options = [f"-seed={arguments.seed}", f"-max_total_time={int(arguments.seconds)}", f"-max_len={target.max_bytes}"]
    options += ["-rss_limit_mb=0", "-malloc_limit_mb=0", "-timeout=20", "-print_final_stats=1", "-len_control=0"]
    options += ["-use_value_profile=1", "-reload=0"]
    atheris.Setup([sys.argv[0], *options, arguments.corpus], one_input, custom_mutator=mutator)
    atheris.Fuzz()


def _blind(
    arguments: argparse.Namespace, target: Any, execute: Callable[[bytes], Any], report: Callable[[], None]
) -> None:
    """No feedback: each input is some changes away from one that we began with."""
    from torpor.tests.memvid.fuzz.target import changed

    rng = Random(arguments.seed)
    pool = [path.read_bytes() for path in sorted(Path(arguments.corpus).iterdir())]
    for data in pool:
        execute(data)
    end = time.monotonic() + arguments.seconds
    while time.monotonic() < end:
        data = changed(target, rng.choice(pool), rng, (1, 1, 2, 5))
        if execute(data) is not None and arguments.stop_at_finding:
            break
    report()


if __name__ == "__main__":
    sys.exit(main())
