# ruff: noqa: E501 - what is replaced stands as it does in the code
"""T7: faults that the state machine must find, planted one at a time in a copy of the code.

    python tests/memvid/machine_mutants.py [--only NAME] [--steps 20000]

Each mutant is one replacement in one module. What is told of each: found or not, whether by the bounded run of
`make test`, after how many steps and seconds. The bounded run is the same each time, but another one whenever a rule
changes: only that a mutant is found at all is held against the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


@dataclass(frozen=True)
class Mutant:
    name: str
    module: str
    before: str
    after: str
    machine: str = "SoundStore"


MUTANTS: Final = (
    Mutant("a sleep forgets to enter one of its holders", "sleeping.py", "IndexedBundle(bundle_id, LIVE, row, directory.holders, blocks)", "IndexedBundle(bundle_id, LIVE, row, directory.holders[1:], blocks)"),
    Mutant("a delete does not ask other sessions", "deletion.py", "    return [bundle_id for bundle_id in bundle_ids if others.issuperset(index.users_of(bundle_id))]", "    return list(bundle_ids)"),
    Mutant("a user counts only if it is of the same session", "deletion.py", "others.issuperset(index.users_of(bundle_id))", "others.issuperset(user for user in index.users_of(bundle_id) if user in index.bundle_ids() and len(index.versions(index.rows_of([user])[user].uri)) > 1)"),
    Mutant("gc asks nobody", "gc.py", "    for at in range(0, len(retired), BATCH):\n", "    for one, suffix in core.folder.list_bundles().items():\n        _ = run.dry_run or suffix != RETIRED_SUFFIX or core.folder.remove(one, suffix)\n    for at in range(0, len(retired), BATCH):\n"),
    Mutant("a delete removes what a reader has open", "deletion.py", "    free = pins.wait_or_free(unneeded(index, retired))\n", "    free = unneeded(index, retired)\n"),
    Mutant("a prune ignores pins", "retention.py", 'reasons = ["pinned"] if marked.pinned else []', "reasons: list[str] = []"),
    Mutant("a prune ignores tags", "retention.py", 'reasons += [f"tagged {tag}" for tag in marked.tags]', "pass"),
    Mutant("a prune keeps one version less", "retention.py", "newer < retention.keep_last", "newer < retention.keep_last - 1"),
    Mutant("a prune keeps one version more", "retention.py", "newer < retention.keep_last", "newer <= retention.keep_last"),
    Mutant("a prune believes every date", "retention.py", "believable = EARLIEST_NS <= row.created_ns <= now_ns", "believable = True"),
    Mutant("a prune counts days from now", "retention.py", "oldest_ns = newest_ns - int", "oldest_ns = now_ns - int"),
    Mutant("a compaction asks only the newest version", "compaction_plan.py", "self._needed = _needed_of(self._places)", "self._needed = _needed_of({newest.bundle_id: self._places[newest.bundle_id]})"),
    Mutant("a compaction asks nobody before a file loses frames", "compaction_plan.py", "return tuple(block for block in file.frames if block in needed)", "return tuple(block for block in file.frames if self._places.get(file.bundle_id, {}).get(block) == file.bundle_id)"),
    Mutant("a compaction leaves out the last block that it adopts", "compaction_plan.py", "frames = tuple((block, sources[block]) for block in order)", "frames = tuple((block, sources[block]) for block in order[:-1])"),
    Mutant("a rewrite is never entered", "index.py", "            self._replace_storage(bundle)\n\n    def add_written", "            pass\n\n    def add_written"),
    Mutant("a rewrite that was cut off is not read again", "index.py", "                    self._mark([bundle_id])\n", "                    pass\n"),
    Mutant("an import takes a number that is taken", "core.py", "is_free = is_open and version not in taken and self.index.bundles_numbered(uri, version) <= {bundle_id}", "is_free = True"),
    Mutant("an import enters no holders", "transfer.py", "IndexedBundle(bundle_id, LIVE, row, directory.holders, frames)", "IndexedBundle(bundle_id, LIVE, row, (), frames)"),
    Mutant("a wake gives the version before the newest", "sessions.py", "        row = self.find_session(uri, version)\n        if row is None:\n            raise self._not_found(uri, version)\n        try:\n", "        row = self.find_session(uri, version)\n        if row is None:\n            raise self._not_found(uri, version)\n        row = (self.versions(uri)[-2:] if version is None else [row])[0]\n        try:\n"),
    Mutant("a delete renames no file", "folder.py", "            durable.rename(folder_fd, name + LIVE_SUFFIX, name + RETIRED_SUFFIX, path)\n", ""),
    Mutant("an index made anew takes deleted versions in", "reindexing.py", "    knows = old is not None", "    scan.bundles += [indexed(file) for file in (BundleFile(*folder.open_bundle(one), one) for one in files.keys() - live_of(files)) if file.manifest]\n    knows = old is not None"),
    Mutant("a forget strips nothing", "forgetting.py", "    if idle or (retired and manifest is not None and (named or manifest.tells_of(uri))):", "    if False:"),
    Mutant("a forget keeps a manifest that names the session", "forgetting.py", "with_manifest=live,", "with_manifest=True,"),
    Mutant("a delete leaves the marks", "deletion.py", "        if marks.session(uri):\n", "        if False:\n"),
    Mutant("a prune begins with the newest version", "pruning.py", "return [one for row in rows for one in", "return [one for row in rows[::-1] for one in"),
    Mutant("an old index is believed", "index.py", "if count_of(connection) < begun:\n", "if begun < 0:\n"),
    Mutant("the next number is one that was used", "core.py", "version = max([self.index.last_number(uri), *self.being_written(uri)]) + self.index.unnumbered() + 1", "version = max(len(self.index.versions(uri)), *self.being_written(uri), 0) + 1"),
    Mutant("verify finds nothing", "verify.py", "return VerifyReport(tally.settled(promised),", "return VerifyReport((),", "DamagedStore"),
    Mutant("a repair gives up what it could mend", "survey.py", 'return "mendable" if elsewhere else "intact"', 'return "lost" if elsewhere else "intact"', "DamagedStore"),
    Mutant("a repair gives up files whose frame of reference is damaged", "survey.py", '            return "mendable"\n', '            return "lost"\n', "DamagedStore"),
    Mutant("a salvage saves the shorter beginning", "repair_plan.py", "candidate[:2] > best[manifest.uri][:2]", "candidate[:2] < best[manifest.uri][:2]", "DamagedStore"),
    Mutant("padding costs a version", "survey.py", "file.check_payloads(block_id)", "file.check_block(block_id)", "DamagedStore"),
)  # fmt: skip


def hunt(mutant: Mutant, steps: int) -> dict[str, object]:
    """Let the machine look for a mutant: first its bounded share, then until it has taken so many steps."""
    with tempfile.TemporaryDirectory(prefix="torpor-mutant-") as folder:
        package = Path(folder) / "torpor"
        package.mkdir()
        for name in ("__init__.py", "errors.py", "places.py"):
            shutil.copy(ROOT / name, package)
        shutil.copytree(ROOT / "memvid", package / "memvid", ignore=shutil.ignore_patterns("__pycache__"))
        (module,) = (package / "memvid").rglob(mutant.module)
        source = module.read_text()
        if source.count(mutant.before) != 1:
            return {"mutant": mutant.name, "found": False, "why": f"it does not fit {mutant.module}"}
        module.write_text(source.replace(mutant.before, mutant.after))
        command = [sys.executable, str(HERE / "test_state_machine.py"), mutant.machine, str(steps)]
        environment = {**os.environ, "PYTHONPATH": folder}
        ran = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=folder, check=False)
    if ran.returncode:
        return {"mutant": mutant.name, "found": False, "why": ran.stderr[-2000:]}
    return {"mutant": mutant.name, **json.loads(ran.stdout.splitlines()[-1])}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--only")
    parser.add_argument("--steps", type=int, default=20_000)
    arguments = parser.parse_args()
    results = []
    for mutant in MUTANTS:
        if arguments.only in (None, mutant.name):
            results.append(hunt(mutant, arguments.steps))
            print(json.dumps(results[-1]), flush=True)
    return 0 if all(result["found"] for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
