"""Small templates of our own that keep the rules of the main families: which roles a template takes and in which order,
how it writes tools, calls and results, and what it does with thinking; and tokenizers for them.

The words of the families' own templates are not here, only the order of things and what they refuse or leave out.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

Flags = Literal["own", "listed", "unlisted", "unflagged"]
"""How a tokenizer has its control tokens: as the family does; all with the flag `special` and in the tokenizer's list;
all with the flag and out of the list; or all without the flag, but for the end of a turn."""

FLAGS: Final[tuple[Flags, ...]] = ("own", "listed", "unlisted", "unflagged")

FIRST_END: Final = 256
"""The token that is a family's first end: those of the bytes stand before it, and its other ends behind it."""


@dataclass(frozen=True)
class Family:
    """A template and its tokens. ends: the tokens that end an answer; the first is the tokenizer's end token. flagged,
    unflagged: the other control tokens, with and without the flag `special`. harmless: added tokens that are plain
    text. parser: mlx-lm's for the calls of this template; None if it has none. opens: the tokenizer's first token.
    """

    name: str
    template: str
    ends: tuple[str, ...]
    flagged: tuple[str, ...] = ()
    unflagged: tuple[str, ...] = ()
    harmless: tuple[str, ...] = ()
    parser: str | None = None
    opens: str | None = None

    @property
    def controls(self) -> tuple[str, ...]:
        """The names of all control tokens."""
        return (*((self.opens,) if self.opens else ()), *self.ends, *self.flagged, *self.unflagged)


_LOOP: Final = "{%- for m in messages %}"
_END: Final = "{%- endfor %}"
_CHATML_OPEN: Final = "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}"
_CHATML: Final = ("<|im_end|>", "<|endoftext|>")
_THINK: Final = ("<think>", "</think>")
_CALL: Final = ("<tool_call>", "</tool_call>")
_RESPONSE: Final = ("<tool_response>", "</tool_response>")

CHATML: Final = Family(
    "chatml",
    _LOOP + "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}" + _END + _CHATML_OPEN,
    _CHATML,
    ("<|im_start|>",),
)

LLAMA3: Final = Family(
    # The system's turn is always there, tools are told in the first user's, a message has one call and no words beside.
    "llama3",
    "{%- set turns = namespace(left=messages, system='') %}"
    "{%- if messages[0].role == 'system' %}"
    "{%- set turns.system = messages[0].content | trim %}{%- set turns.left = messages[1:] %}{%- endif %}"
    "{{ bos_token + '<|start_header_id|>system<|end_header_id|>\n\nDate: today\n\n' + turns.system + '<|eot_id|>' }}"
    "{%- if tools %}"
    "{%- if not turns.left %}{{ raise_exception('tools need a first message of the user') }}{%- endif %}"
    "{{ '<|start_header_id|>user<|end_header_id|>\n\nFunctions:\n' }}"
    "{%- for t in tools %}{{ t | tojson + '\n\n' }}{%- endfor %}"
    "{{ turns.left[0].content | trim + '<|eot_id|>' }}{%- set turns.left = turns.left[1:] %}{%- endif %}"
    "{%- for m in turns.left %}"
    "{%- if m.tool_calls %}"
    "{%- if m.tool_calls | length != 1 %}{{ raise_exception('one call at once') }}{%- endif %}"
    "{%- set call = m.tool_calls[0].function %}"
    '{{ \'<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "\' + call.name + \'", "parameters": \' }}'
    "{{ call.arguments | tojson + '}<|eot_id|>' }}"
    "{%- elif m.role in ('tool', 'ipython') %}"
    "{{ '<|start_header_id|>ipython<|end_header_id|>\n\n' + m.content | tojson + '<|eot_id|>' }}"
    "{%- else %}"
    "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}"
    "{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}",
    ("<|eot_id|>", "<|end_of_text|>", "<|eom_id|>"),
    ("<|start_header_id|>", "<|end_header_id|>", "<|python_tag|>"),
    opens="<|begin_of_text|>",
)

MISTRAL: Final = Family(
    # User and assistant take turns, where neither calls nor results count; a later system text is refused. Ids of calls
    # have nine characters.
    "mistral",
    "{{ bos_token }}"
    "{%- set turns = namespace(left=messages, at=0) %}"
    "{%- if messages[0].role == 'system' %}{{ '[SYSTEM_PROMPT]' + messages[0].content + '[/SYSTEM_PROMPT]' }}"
    "{%- set turns.left = messages[1:] %}{%- endif %}"
    "{%- if tools %}{{ '[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{%- endif %}"
    "{%- for m in turns.left %}"
    "{%- if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}"
    "{%- if (m.role == 'user') != (turns.at % 2 == 0) %}{{ raise_exception('roles must alternate') }}{%- endif %}"
    "{%- set turns.at = turns.at + 1 %}{%- endif %}"
    "{%- endfor %}"
    "{%- for m in turns.left %}"
    "{%- if m.role == 'user' %}{{ '[INST]' + m.content + '[/INST]' }}"
    "{%- elif m.role == 'tool' %}{{ '[TOOL_RESULTS]' + m.content + '[/TOOL_RESULTS]' }}"
    "{%- elif m.role == 'assistant' %}{{ m.content }}"
    "{%- for c in m.tool_calls or [] %}"
    "{%- if c.id is not defined or c.id | length != 9 %}{{ raise_exception('ids have 9 characters') }}{%- endif %}"
    "{{ '[TOOL_CALLS]' + c.function.name + '[ARGS]' + c.function.arguments | tojson }}{%- endfor %}{{ eos_token }}"
    "{%- else %}{{ raise_exception('only user, assistant and tool may follow') }}{%- endif %}"
    "{%- endfor %}",
    ("</s>",),
    (
        *("[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
        *("[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[ARGS]"),
    ),
    parser="mistral",
    opens="<s>",
)

_GEMMA_TURNS: Final = (
    "{%- for m in turns.left %}"
    "{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{%- endif %}"
    "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' }}"
    "{{ (turns.system if loop.first else '') + m.content | trim + '<end_of_turn>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{%- endif %}"
)
_GEMMA_HARMLESS: Final = ("\n\n", "\n\n\n", "  ", "    ")

GEMMA2: Final = Family(
    # No system text, no tools, and turns alternate.
    "gemma2",
    "{{ bos_token }}{%- set turns = namespace(left=messages, system='') %}"
    "{%- if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{%- endif %}" + _GEMMA_TURNS,
    ("<end_of_turn>", "<eos>"),
    ("<start_of_turn>",),
    harmless=_GEMMA_HARMLESS,
    opens="<bos>",
)

GEMMA3: Final = Family(
    # As Gemma 2, but a system text at the beginning goes before the first user's.
    "gemma3",
    "{{ bos_token }}{%- set turns = namespace(left=messages, system='') %}"
    "{%- if messages[0].role == 'system' %}{%- set turns.system = messages[0].content + '\n\n' %}"
    "{%- set turns.left = messages[1:] %}{%- endif %}" + _GEMMA_TURNS,
    ("<end_of_turn>", "<eos>"),
    ("<start_of_turn>", "<start_of_image>"),
    harmless=_GEMMA_HARMLESS,
    opens="<bos>",
)

_QWEN_RESULTS: Final = (
    "{%- elif m.role == 'tool' %}"
    "{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{%- endif %}"
    "{{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{%- endif %}"
)

QWEN3: Final = Family(
    # Thinking stays behind the last question alone; results that stand together are one turn of the user.
    "qwen3",
    "{%- set asked = namespace(last=0) %}"
    "{%- for m in messages %}{%- if m.role == 'user' %}{%- set asked.last = loop.index0 %}{%- endif %}{%- endfor %}"
    "{%- if tools %}{{ '<|im_start|>system\n' }}"
    "{%- if messages[0].role == 'system' %}{{ messages[0].content + '\n\n' }}{%- endif %}"
    "{{ '# Tools\n<tools>' }}{%- for t in tools %}{{ '\n' + t | tojson }}{%- endfor %}{{ '\n</tools><|im_end|>\n' }}"
    "{%- elif messages[0].role == 'system' %}{{ '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}"
    "{%- endif %}"
    "{%- for m in messages %}"
    "{%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{%- elif m.role == 'assistant' %}"
    "{%- set said = namespace(thought='', text=m.content) %}"
    "{%- if m.reasoning_content is string %}{%- set said.thought = m.reasoning_content %}"
    "{%- elif '</think>' in m.content %}"
    "{%- set said.thought = m.content.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{%- set said.text = m.content.split('</think>')[-1].lstrip('\n') %}{%- endif %}"
    "{{ '<|im_start|>assistant\n' }}"
    "{%- if loop.index0 > asked.last and (loop.last or said.thought) %}"
    "{{ '<think>\n' + said.thought.strip('\n') + '\n</think>\n\n' + said.text.lstrip('\n') }}"
    "{%- else %}{{ said.text }}{%- endif %}"
    "{%- for c in m.tool_calls or [] %}{%- set tool_call = c.function %}"
    "{{ '\n' if said.text or not loop.first }}"
    '{{ \'<tool_call>\n{"name": "\' + tool_call.name + \'", "arguments": \' + tool_call.arguments | tojson }}'
    "{{ '}\n</tool_call>' }}{%- endfor %}{{ '<|im_end|>\n' }}" + _QWEN_RESULTS + "{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{%- endif %}"
    "{%- endif %}",
    _CHATML,
    ("<|im_start|>",),
    (*_THINK, *_CALL, *_RESPONSE),
    parser="json_tools",
)

QWEN3_CODER: Final = Family(
    # A call has one tag for each argument.
    "qwen3-coder",
    "{%- if tools or messages[0].role == 'system' %}{{ '<|im_start|>system\n' }}"
    "{%- if messages[0].role == 'system' %}{{ messages[0].content }}{%- endif %}"
    "{%- if tools %}{{ '\n\n# Tools\n<tools>' }}"
    "{%- for t in tools %}{{ '\n<function>\n<name>' + t.function.name + '</name>\n' }}"
    "{{ t.function | tojson + '\n</function>' }}{%- endfor %}{{ '\n</tools>' }}{%- endif %}{{ '<|im_end|>\n' }}"
    "{%- endif %}"
    "{%- for m in messages %}"
    "{%- if m.role == 'assistant' %}{{ '<|im_start|>assistant\n' + m.content | trim }}"
    "{%- for c in m.tool_calls or [] %}"
    "{{ '\n' if m.content | trim or not loop.first }}{{ '<tool_call>\n<function=' + c.function.name + '>\n' }}"
    "{%- for name, value in c.function.arguments | items %}"
    "{{ '<parameter=' + name + '>\n' }}{{ value if value is string else value | tojson }}{{ '\n</parameter>\n' }}"
    "{%- endfor %}{{ '</function>\n</tool_call>' }}{%- endfor %}{{ '<|im_end|>\n' }}"
    + _QWEN_RESULTS
    + "{%- elif not (m.role == 'system' and loop.first) %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{%- endif %}{%- endfor %}" + _CHATML_OPEN,
    _CHATML,
    ("<|im_start|>",),
    (*_CALL, *_RESPONSE),
    parser="qwen3_coder",
)

GLM: Final = Family(
    # No token ends a turn: the next role does, and the model writes it.
    "glm",
    "{{ '[gMASK]<sop>' }}"
    "{%- if tools %}{{ '<|system|>\n# Tools\n<tools>\n' }}"
    "{%- for t in tools %}{{ t | tojson + '\n' }}{%- endfor %}{{ '</tools>' }}{%- endif %}"
    "{%- set asked = namespace(last=-1) %}"
    "{%- for m in messages %}{%- if m.role == 'user' %}{%- set asked.last = loop.index0 %}{%- endif %}{%- endfor %}"
    "{%- for m in messages %}"
    "{%- if m.role == 'user' %}{{ '<|user|>\n' + m.content }}"
    "{%- elif m.role == 'assistant' %}"
    "{%- set said = namespace(thought='', text=m.content) %}"
    "{%- if m.reasoning_content is string %}{%- set said.thought = m.reasoning_content %}"
    "{%- elif '</think>' in m.content %}"
    "{%- set said.thought = m.content.split('</think>')[0].split('<think>')[-1] %}"
    "{%- set said.text = m.content.split('</think>')[-1] %}{%- endif %}"
    "{{ '<|assistant|>\n' }}"
    "{%- if loop.index0 > asked.last and said.thought %}{{ '<think>' + said.thought.strip() + '</think>' }}"
    "{%- else %}{{ '<think></think>' }}{%- endif %}"
    "{%- if said.text.strip() %}{{ '\n' + said.text.strip() }}{%- endif %}"
    "{%- for c in m.tool_calls or [] %}{{ '\n<tool_call>' + c.function.name + '\n' }}"
    "{%- for name, value in c.function.arguments | items %}{{ '<arg_key>' + name + '</arg_key>\n<arg_value>' }}"
    "{{ value if value is string else value | tojson }}{{ '</arg_value>\n' }}{%- endfor %}{{ '</tool_call>' }}"
    "{%- endfor %}"
    "{%- elif m.role == 'tool' %}"
    "{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|observation|>' }}{%- endif %}"
    "{{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
    "{%- elif m.role == 'system' %}{{ '<|system|>\n' + m.content }}{%- endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|assistant|>' }}"
    "{{ '\n<think></think>' if enable_thinking is defined and not enable_thinking }}{%- endif %}",
    ("<|endoftext|>", "<|user|>", "<|observation|>"),
    ("[gMASK]", "<sop>", "<|system|>", "<|assistant|>"),
    (*_THINK, *_CALL, *_RESPONSE, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    parser="glm47",
)

DEEPSEEK: Final = Family(
    # All system texts go to the beginning, thinking leaves every earlier answer, and a new one begins within it.
    "deepseek",
    "{%- set all = namespace(system='', results=false) %}"
    "{%- for m in messages %}{%- if m.role == 'system' %}"
    "{%- set all.system = all.system + ('\n\n' if all.system else '') + m.content %}{%- endif %}{%- endfor %}"
    "{{ bos_token + all.system }}"
    "{%- for t in tools or [] %}{{ '\n' + t | tojson }}{%- endfor %}"
    "{%- for m in messages %}"
    "{%- if m.role == 'user' %}{%- if all.results %}{{ '<｜tool▁outputs▁end｜>' }}{%- endif %}"
    "{%- set all.results = false %}{{ '<｜User｜>' + m.content }}"
    "{%- elif m.role == 'assistant' %}"
    "{{ '<｜tool▁outputs▁end｜>' if all.results else '<｜Assistant｜>' }}{%- set all.results = false %}"
    "{{ m.content.split('</think>')[-1] }}"
    "{%- if m.tool_calls %}{{ '<｜tool▁calls▁begin｜>' }}"
    "{%- for c in m.tool_calls %}{{ '<｜tool▁call▁begin｜>function<｜tool▁sep｜>' + c.function.name + '\n```json\n' }}"
    "{{ c.function.arguments | tojson + '\n```<｜tool▁call▁end｜>' }}{%- endfor %}"
    "{{ '<｜tool▁calls▁end｜>' }}{%- endif %}{{ '<｜end▁of▁sentence｜>' }}"
    "{%- elif m.role == 'tool' %}{%- if not all.results %}{{ '<｜tool▁outputs▁begin｜>' }}{%- endif %}"
    "{%- set all.results = true %}{{ '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' }}"
    "{%- endif %}{%- endfor %}"
    "{%- if all.results %}{{ '<｜tool▁outputs▁end｜>' }}{%- endif %}"
    "{%- if add_generation_prompt and not all.results %}{{ '<｜Assistant｜><think>\n' }}{%- endif %}",
    ("<｜end▁of▁sentence｜>",),
    (),
    (
        *("<｜User｜>", "<｜Assistant｜>", *_THINK),
        *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
        *("<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>", "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"),
        "<｜tool▁sep｜>",
    ),
    opens="<｜begin▁of▁sentence｜>",
)

GRANITE: Final = Family(
    # A role for tools, and calls as a list in JSON behind one mark, without an end of their own.
    "granite",
    "{%- set turns = namespace(left=messages, system='Be helpful.') %}"
    "{%- if messages[0].role == 'system' %}"
    "{%- set turns.system = messages[0].content %}{%- set turns.left = messages[1:] %}{%- endif %}"
    "{{ '<|start_of_role|>system<|end_of_role|>' + turns.system + '<|end_of_text|>\n' }}"
    "{%- if tools %}{{ '<|start_of_role|>available_tools<|end_of_role|>' + tools | tojson + '<|end_of_text|>\n' }}"
    "{%- endif %}"
    "{%- for m in turns.left %}"
    "{{ '<|start_of_role|>' + ('tool_response' if m.role == 'tool' else m.role) + '<|end_of_role|>' + m.content }}"
    "{%- if m.tool_calls %}{{ '<|tool_call|>[' }}"
    "{%- for c in m.tool_calls %}{{ ', ' if not loop.first }}"
    "{{ '{\"name\": \"' + c.function.name + '\", \"arguments\": ' + c.function.arguments | tojson + '}' }}{%- endfor %}"
    "{{ ']' }}{%- endif %}{{ '<|end_of_text|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|start_of_role|>assistant<|end_of_role|>' }}{%- endif %}",
    ("<|end_of_text|>",),
    ("<|start_of_role|>", "<|end_of_role|>", "<|tool_call|>"),
)

LFM2: Final = Family(
    # Tools stand in the system text, calls are a list as Python has it.
    "lfm2",
    "{{ bos_token }}{%- set turns = namespace(left=messages, system='') %}"
    "{%- if messages[0].role == 'system' %}"
    "{%- set turns.system = messages[0].content %}{%- set turns.left = messages[1:] %}{%- endif %}"
    "{%- if tools %}"
    "{%- set turns.system = turns.system + ('\n' if turns.system else '') + 'List of tools: <|tool_list_start|>'"
    " + tools | tojson + '<|tool_list_end|>' %}{%- endif %}"
    "{%- if turns.system %}{{ '<|im_start|>system\n' + turns.system + '<|im_end|>\n' }}{%- endif %}"
    "{%- for m in turns.left %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{%- if m.role == 'tool' %}{{ '<|tool_response_start|>' + m.content + '<|tool_response_end|>' }}"
    "{%- else %}"
    "{%- if m.tool_calls %}{{ '<|tool_call_start|>[' }}"
    "{%- for c in m.tool_calls %}{{ ', ' if not loop.first }}{{ c.function.name + '(' }}"
    "{%- for name, value in c.function.arguments | items %}"
    "{{ ', ' if not loop.first }}{{ name + '=' + value | tojson }}"
    "{%- endfor %}{{ ')' }}{%- endfor %}{{ ']<|tool_call_end|>' }}{%- endif %}"
    "{{ m.content }}{%- endif %}{{ '<|im_end|>\n' }}{%- endfor %}" + _CHATML_OPEN,
    ("<|im_end|>",),
    (
        *("<|im_start|>", "<|tool_call_start|>", "<|tool_call_end|>", "<|tool_list_start|>", "<|tool_list_end|>"),
        *("<|tool_response_start|>", "<|tool_response_end|>"),
    ),
    parser="pythonic",
    opens="<|startoftext|>",
)

GPT_OSS: Final = Family(
    # Channels: thinking is one of them, leaves earlier turns, and may not stand beside words and a call. A later system
    # text is left out, and so is every call but the first.
    "gpt-oss",
    "{{ '<|start|>system<|message|>You write channels.<|end|>' }}"
    "{%- set turns = namespace(left=messages, told='', called=none) %}"
    "{%- if messages[0].role in ('system', 'developer') %}"
    "{%- set turns.told = messages[0].content %}{%- set turns.left = messages[1:] %}{%- endif %}"
    "{%- if turns.told or tools %}{{ '<|start|>developer<|message|>' + turns.told }}"
    "{%- for t in tools or [] %}{{ '\n' + t.function | tojson }}{%- endfor %}{{ '<|end|>' }}{%- endif %}"
    "{%- for m in turns.left %}"
    "{%- if m.role == 'user' %}{{ '<|start|>user<|message|>' + m.content + '<|end|>' }}"
    "{%- elif m.role == 'tool' %}"
    "{%- if turns.called is none %}{{ raise_exception('a result needs a call') }}{%- endif %}"
    "{{ '<|start|>functions.' + turns.called + ' to=assistant<|channel|>commentary<|message|>' + m.content | tojson }}"
    "{{ '<|end|>' }}"
    "{%- elif m.role == 'assistant' %}"
    "{%- if m.tool_calls %}"
    "{%- if m.content and m.reasoning_content %}{{ raise_exception('words or thinking beside a call') }}{%- endif %}"
    "{%- if m.content or m.reasoning_content %}"
    "{{ '<|start|>assistant<|channel|>analysis<|message|>' + (m.content or m.reasoning_content) + '<|end|>' }}"
    "{%- endif %}{%- set turns.called = m.tool_calls[0].function.name %}"
    "{{ '<|start|>assistant to=functions.' + turns.called + '<|channel|>commentary json<|message|>' }}"
    "{{ m.tool_calls[0].function.arguments | tojson + '<|call|>' }}"
    "{%- else %}{%- set turns.called = none %}"
    "{%- if loop.last and not add_generation_prompt %}"
    "{%- if m.reasoning_content %}{{ '<|start|>assistant<|channel|>analysis<|message|>' + m.reasoning_content }}"
    "{{ '<|end|>' }}{%- endif %}"
    "{{ '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|return|>' }}"
    "{%- else %}{{ '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}{%- endif %}"
    "{%- endif %}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{%- endif %}",
    ("<|return|>", "<|call|>"),
    ("<|start|>", "<|end|>", "<|message|>", "<|channel|>"),
)

SMOLLM2: Final = Family(
    # A system text of its own stands where the dialogue has none.
    "smollm2",
    "{%- for m in messages %}"
    "{%- if loop.first and m.role != 'system' %}{{ '<|im_start|>system\nBe helpful.<|im_end|>\n' }}{%- endif %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endfor %}" + _CHATML_OPEN,
    ("<|im_end|>",),
    ("<|im_start|>", "<|endoftext|>", "<repo_name>"),
)

SMOLLM3: Final = Family(
    # A later system text is left out; results are the user's; the switch of thinking stands in the system's turn.
    "smollm3",
    "{%- set thinks = enable_thinking is not defined or enable_thinking %}"
    "{%- set turns = namespace(left=messages, system='Be helpful.') %}"
    "{%- if messages[0].role == 'system' %}"
    "{%- set turns.system = messages[0].content %}{%- set turns.left = messages[1:] %}{%- endif %}"
    "{{ '<|im_start|>system\nReasoning: ' + ('/think' if thinks else '/no_think') + '\n' + turns.system + '\n' }}"
    "{%- if tools %}{{ '<tools>\n' }}{%- for t in tools %}{{ t | tojson + '\n' }}{%- endfor %}{{ '</tools>\n' }}"
    "{%- endif %}{{ '<|im_end|>\n' }}"
    "{%- for m in turns.left %}"
    "{%- if m.role == 'user' %}{{ '<|im_start|>user\n' + m.content + '<|im_end|>\n' }}"
    "{%- elif m.role == 'assistant' %}{{ '<|im_start|>assistant\n' }}"
    "{{ m.content.lstrip('\n') if thinks else '<think>\n\n</think>\n' + m.content.lstrip('\n') }}"
    "{%- for c in m.tool_calls or [] %}{%- set tool_call = c.function %}"
    '{{ \'\n<tool_call>\n{"name": "\' + tool_call.name + \'", "arguments": \' + tool_call.arguments | tojson }}'
    "{{ '}\n</tool_call>' }}{%- endfor %}{{ '<|im_end|>\n' }}"
    "{%- elif m.role == 'tool' %}{{ '<|im_start|>user\n' + m.content + '<|im_end|>\n' }}{%- endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{{ '' if thinks else '<think>\n\n</think>\n' }}{%- endif %}",
    ("<|im_end|>", "<|end_of_text|>"),
    ("<|im_start|>", *_RESPONSE),
    (*_THINK, *_CALL),
    parser="json_tools",
)

STRICT: Final = Family(
    # No family's: turns alternate from the user's on, and every other role is refused.
    "strict",
    _LOOP + "{%- if m.role == 'system' %}{{ raise_exception('no system role') }}{%- endif %}"
    "{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('turns alternate') }}{%- endif %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}" + _END + _CHATML_OPEN,
    _CHATML,
    ("<|im_start|>",),
)

FAMILIES: Final = (
    *(CHATML, LLAMA3, MISTRAL, GEMMA2, GEMMA3, QWEN3, QWEN3_CODER, GLM, DEEPSEEK, GRANITE, LFM2, GPT_OSS),
    *(SMOLLM2, SMOLLM3, STRICT),
)


def write_family_tokenizer(folder: Path, family: Family, *, flags: Flags = "own") -> int:
    """Put the family's tokenizer and template into a model's folder: one token a byte, and its added tokens. Gives the
    size of its vocabulary; the end tokens begin at `FIRST_END`, in their order."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: index for index, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    opens = (family.opens,) if family.opens else ()
    for name in (*family.ends, *opens, *family.flagged, *family.unflagged, *family.harmless):
        is_flagged = name in (*family.ends, *opens) or (
            name not in family.harmless and flags != "unflagged" and (flags != "own" or name in family.flagged)
        )
        token = AddedToken(name, special=is_flagged, normalized=False)
        (tokenizer.add_special_tokens if is_flagged else tokenizer.add_tokens)([token])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": family.ends[0],
        "chat_template": family.template,
        "clean_up_tokenization_spaces": False,
    }
    if family.opens:
        settings["bos_token"] = family.opens
    if flags == "listed":
        settings["extra_special_tokens"] = [name for name in family.controls if name not in (family.ends[0], *opens)]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, ensure_ascii=False))
    return int(tokenizer.get_vocab_size())


def write_family(folder: Path, family: Family, write_model: Callable[..., Path], *, flags: Flags = "own") -> Path:
    """A model folder with random weights and the family's tokenizer. write_model: the fixture `model_writer`."""
    size = FIRST_END + len(family.controls) + len(family.harmless)
    ends = [FIRST_END + at for at in range(len(family.ends))]
    write_model(folder, vocab_size=size, eos_token_id=ends)
    assert write_family_tokenizer(folder, family, flags=flags) == size
    return folder
