"""The agents that `torpor launch` starts: a record each, and no code.

In the texts, `$url` is the daemon's base URL without `/v1`, `$token` a token of `$namespace` and `$tokens` the file of
them as a word for a shell, `$model` the model's name, `$context` the tokens that it takes, `$answer` the most tokens of
an answer.
`$settings` is the text of the agent's settings, and `$file` a file of Torpor's own that holds them, in the folder
`$folder`. Each agent has the token as TORPOR_TOKEN, so that no file needs it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final


@dataclass(frozen=True, slots=True, kw_only=True)
class Agent:
    """How an agent is told of a daemon.

    name: on the command line. title: its maker's name for it. program: what is run, if not the name. install: the
    command that installs it.
    settings: what its user would write into `settings_path`, a JSON or TOML file. A text `$context` or `$answer` is a
        number there, and `${answer}` stays a text.
    environment: what its user would have to set beside them.
    launch_environment, arguments: what a launch gives, so that the user's files stay as they are. each_setting: its
        option for one value of its settings, as in `-c key=value`, if a launch gives them so. script: the text of
        `$file`, if that is not the settings, but a program with them.
    usage: how it is run with the user's settings, if not by its name alone.
    """

    name: str
    title: str
    install: str
    program: str = ""
    settings_path: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    launch_environment: Mapping[str, str] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    each_setting: str | None = None
    script: str | None = None
    usage: str | None = None

    @property
    def command(self) -> str:
        """The program's name."""
        return self.program or self.name


HOMES: Final[Mapping[str, str]] = {
    "CLAUDE_CONFIG_DIR": "~/.claude",
    "CODEX_HOME": "~/.codex",
    "PI_CODING_AGENT_DIR": "~/.pi/agent",
    "XDG_CONFIG_HOME": "~/.config",
}
"""Variables by which a user names another folder for what a `settings_path` begins with."""

KEY_COMMAND: Final = "awk '$$1 == \"$namespace\" {print $$2; exit}' $tokens"
"""Prints the token for a shell."""

_CLAUDE: Final = {
    "ANTHROPIC_BASE_URL": "$url",
    # Each of these would go before the URL, or before the token of the settings.
    **dict.fromkeys(("CLAUDE_CODE_USE_BEDROCK", "CLAUDE_CODE_USE_VERTEX"), ""),
    **dict.fromkeys(("ANTHROPIC_AUTH_TOKEN", "ANTHROPIC_API_KEY"), ""),
    "ANTHROPIC_MODEL": "$model",
    "ANTHROPIC_SMALL_FAST_MODEL": "$model",
    "ANTHROPIC_DEFAULT_OPUS_MODEL": "$model",
    "ANTHROPIC_DEFAULT_SONNET_MODEL": "$model",
    "ANTHROPIC_DEFAULT_HAIKU_MODEL": "$model",
    "CLAUDE_CODE_SUBAGENT_MODEL": "$model",
    "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "${answer}",
    "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",  # it changes with each conversation, in front of all that is the same
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "API_TIMEOUT_MS": "3600000",
}

_AGENTS: Final = (
    Agent(
        name="claude",
        title="Claude Code",
        install="npm install --global @anthropic-ai/claude-code",
        # The environment of its user's own settings goes before this one, and settings that are named so before both.
        launch_environment=_CLAUDE,
        arguments=("--settings", "$settings"),
        settings_path="~/.claude/settings.json",
        settings={"apiKeyHelper": KEY_COMMAND, "env": _CLAUDE},
    ),
    Agent(
        name="codex",
        title="Codex",
        install="npm install --global @openai/codex",
        each_setting="-c",
        settings_path="~/.codex/torpor.config.toml",
        settings={
            "model": "$model",
            "model_provider": "torpor",
            "model_context_window": "$context",
            "model_providers": {
                "torpor": {
                    "name": "torpor",
                    "base_url": "$url/v1",
                    "env_key": "TORPOR_TOKEN",
                    "wire_api": "responses",
                    "stream_idle_timeout_ms": 3_600_000,
                }
            },
        },
        usage="codex --profile torpor",
    ),
    Agent(
        name="opencode",
        title="opencode",
        install="npm install --global opencode-ai",
        launch_environment={"OPENCODE_CONFIG_CONTENT": "$settings"},
        settings_path="~/.config/opencode/opencode.json",
        settings={
            "model": "torpor/$model",
            "small_model": "torpor/$model",
            "provider": {
                "torpor": {
                    "npm": "@ai-sdk/openai-compatible",
                    "options": {"baseURL": "$url/v1", "apiKey": "{env:TORPOR_TOKEN}"},
                    "models": {"$model": {"name": "$model", "limit": {"context": "$context", "output": "$answer"}}},
                }
            },
        },
    ),
    Agent(
        name="pi",
        title="pi",
        install="npm install --global @mariozechner/pi-coding-agent",
        arguments=("--extension", "$file", "--provider", "torpor", "--model", "$model"),
        settings_path="~/.pi/agent/models.json",
        settings={
            "providers": {
                "torpor": {
                    "baseUrl": "$url/v1",
                    "api": "openai-completions",
                    "apiKey": "TORPOR_TOKEN",
                    "models": [
                        {
                            "id": "$model",
                            "name": "$model",
                            "reasoning": False,
                            "input": ["text"],
                            "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0},
                            "contextWindow": "$context",
                            "maxTokens": "$answer",
                        }
                    ],
                }
            }
        },
        # Its models.json is the user's alone; an extension can add a provider for one run.
        script="const { providers } = $settings;\n"
        'export default (pi) => pi.registerProvider("torpor", providers.torpor);\n',
        usage="pi --provider torpor --model $model",
    ),
    Agent(
        name="qwen",
        title="Qwen Code",
        install="npm install --global @qwen-code/qwen-code",
        launch_environment={"QWEN_CODE_SYSTEM_SETTINGS_PATH": "$file"},
        settings_path="~/.qwen/settings.json",
        settings={
            "security": {"auth": {"selectedType": "openai"}},
            "model": {"name": "$model"},
            "modelProviders": {
                "openai": [
                    {
                        "id": "$model",
                        "name": "$model",
                        "envKey": "TORPOR_TOKEN",
                        "baseUrl": "$url/v1",
                        "generationConfig": {"contextWindowSize": "$context", "timeout": 3_600_000},
                    }
                ]
            },
        },
    ),
    Agent(
        name="cline",
        title="Cline",
        install="npm install --global cline",
        # Its hub goes on from one run to the next, with what the first one was given.
        # An editor's Cline knows the provider and its key by names of its own.
        environment={
            "OPENAI_API_KEY": "$token",
            "CLINE_PROVIDER": "openai-compatible",
            "CLINE_API_KEY": "$token",
            "CLINE_SESSION_BACKEND_MODE": "local",
        },
        launch_environment={"CLINE_PROVIDER_SETTINGS_PATH": "$file"},
        settings_path="~/.cline/data/settings/providers.json",
        settings={
            "version": 1,
            "lastUsedProvider": "openai-compatible",
            "modes": {},
            "providers": {
                "openai-compatible": {
                    "settings": {"provider": "openai-compatible", "model": "$model", "baseUrl": "$url/v1"},
                    "updatedAt": "2026-01-01T00:00:00.000Z",
                    "tokenSource": "manual",
                }
            },
        },
    ),
    Agent(
        name="continue",
        title="Continue",
        program="cn",
        install="npm install --global @continuedev/cli",
        arguments=("--config", "$file"),
        settings_path="~/.continue/torpor.yaml",
        settings={
            "name": "torpor",
            "version": "1.0.0",
            "schema": "v1",
            "models": [
                {
                    "name": "$model",
                    "provider": "openai",
                    "model": "$model",
                    "apiBase": "$url/v1",
                    "apiKey": "$${{ secrets.TORPOR_TOKEN }}",
                    "roles": ["chat"],
                    "capabilities": ["tool_use"],
                    "defaultCompletionOptions": {"contextLength": "$context", "maxTokens": "$answer"},
                }
            ],
        },
        usage="cn --config ~/.continue/torpor.yaml",
    ),
    Agent(
        name="aider",
        title="aider",
        install="python -m pip install aider-install && aider-install",
        environment={
            "OPENAI_API_BASE": "$url/v1",
            "OPENAI_API_KEY": "$token",
            "AIDER_MODEL": "openai/$model",
            "AIDER_TIMEOUT": "3600",
        },
        launch_environment={"AIDER_MODEL_METADATA_FILE": "$file"},
        settings_path="~/.aider.model.metadata.json",
        settings={
            "openai/$model": {
                "max_input_tokens": "$context",
                "max_output_tokens": "$answer",
                "litellm_provider": "openai",
                "mode": "chat",
            }
        },
    ),
    Agent(
        name="goose",
        title="goose",
        install="see https://goose-docs.ai",
        environment={
            "GOOSE_PROVIDER": "openai",
            "GOOSE_MODEL": "$model",
            "GOOSE_CONTEXT_LIMIT": "$context",
            "OPENAI_HOST": "$url",
            "OPENAI_BASE_PATH": "v1/chat/completions",
            "OPENAI_API_KEY": "$token",
            "OPENAI_TIMEOUT": "3600",
        },
    ),
    Agent(
        name="crush",
        title="Crush",
        install="npm install --global @charmland/crush",
        # What it keeps there goes before the user's own configuration, which it reads, too.
        launch_environment={"CRUSH_GLOBAL_DATA": "$folder"},
        settings_path="~/.config/crush/crush.json",
        settings={
            "providers": {
                "torpor": {
                    "type": "openai-compat",
                    "base_url": "$url/v1",
                    "api_key": "$$TORPOR_TOKEN",
                    "models": [
                        {
                            "id": "$model",
                            "name": "$model",
                            "context_window": "$context",
                            "default_max_tokens": "$answer",
                        }
                    ],
                }
            },
            "models": {
                "large": {"model": "$model", "provider": "torpor"},
                "small": {"model": "$model", "provider": "torpor"},
            },
        },
    ),
)

AGENTS: Final[Mapping[str, Agent]] = MappingProxyType({agent.name: agent for agent in _AGENTS})
"""The agents by their names, in the order of the documents."""
