"""A program that speaks the Agent Client Protocol on its standard input and output, as an editor has it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class Conversation:
    """One session of the program with a model. Whatever it asks a permission for is allowed."""

    def __init__(self, command: list[str], model: str, environment: Mapping[str, str], folder: Path) -> None:
        self._program = subprocess.Popen(
            command,
            env=environment,
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._call("initialize", protocolVersion=1, clientCapabilities={})
        self._session = self._call("session/new", cwd=str(folder), mcpServers=[])["sessionId"]
        self._call("session/set_model", sessionId=self._session, modelId=model)

    def ask(self, question: str) -> None:
        """One turn, to its end."""
        done = self._call("session/prompt", sessionId=self._session, prompt=[{"type": "text", "text": question}])
        assert done["stopReason"] == "end_turn", done

    def _call(self, method: str, **parameters: Any) -> Any:
        self._send(id=method, method=method, params=parameters)
        assert self._program.stdout is not None
        for line in self._program.stdout:
            told = json.loads(line)
            if told.get("method") == "session/request_permission":
                chosen = next(each for each in told["params"]["options"] if each["kind"].startswith("allow"))
                outcome = {"outcome": "selected", "optionId": chosen["optionId"]}
                self._send(id=told["id"], result={"outcome": outcome})
            elif told.get("id") == method:
                assert "result" in told, line
                return told["result"]
        raise AssertionError(f"the program ended with {self._program.wait(timeout=60)}")

    def _send(self, **message: Any) -> None:
        assert self._program.stdin is not None
        print(json.dumps({"jsonrpc": "2.0", **message}), file=self._program.stdin, flush=True)

    def end(self) -> None:
        self._program.terminate()
        self._program.communicate(timeout=60)
