"""Small templates of our own for those forms of calls that no template of the main families writes."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from torpor.tests.daemon.models.template_families import FAMILIES, GLM, Family

_CHATML: Final = ("<|im_end|>", "<|endoftext|>")
_TEXT_OR_JSON: Final = "{{ v if v is string else v | tojson }}"


def _chatml(name: str, parser: str, calls: str, controls: tuple[str, ...], *, macros: str = "") -> Family:
    """A template with the turns of ChatML. calls: writes `m.tool_calls` behind the words."""
    template = (
        macros + "{%- if tools or messages[0].role == 'system' %}{{ '<|im_start|>system\n' }}"
        "{%- if messages[0].role == 'system' %}{{ messages[0].content }}{%- endif %}"
        "{%- for t in tools or [] %}{{ '\n' + t | tojson }}{%- endfor %}{{ '<|im_end|>\n' }}{%- endif %}"
        "{%- for m in messages %}{%- if not (loop.first and m.role == 'system') %}"
        "{{ '<|im_start|>' + m.role + '\n' + m.content }}"
        "{%- if m.tool_calls %}" + calls + "{%- endif %}{{ '<|im_end|>\n' }}{%- endif %}{%- endfor %}"
        "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}"
    )
    return Family(name, template, _CHATML, ("<|im_start|>", *controls), parser=parser)


def _bare(quote: str) -> str:
    """A macro for values with bare keys, and texts between marks of their own."""
    return (
        "{%- macro bare(v) %}"
        f"{{%- if v is string %}}{{{{ '{quote}' + v + '{quote}' }}}}"
        "{%- elif v is mapping %}{{ '{' }}{%- for k, x in v | items %}{{ ',' if not loop.first }}{{ k + ':' }}"
        "{{ bare(x) }}{%- endfor %}{{ '}' }}"
        "{%- elif v is sequence %}{{ '[' }}{%- for x in v %}{{ ',' if not loop.first }}{{ bare(x) }}{%- endfor %}"
        "{{ ']' }}{%- else %}{{ v | tojson }}{%- endif %}{%- endmacro %}"
    )


def _each(call: str) -> str:
    return "{%- for c in m.tool_calls %}" + call + "{%- endfor %}"


def _arguments(one: str) -> str:
    return "{%- for k, v in c.function.arguments | items %}" + one + "{%- endfor %}"


FUNCTION_GEMMA: Final = _chatml(
    "function-gemma",
    "function_gemma",
    _each("{{ '<start_function_call>call:' + c.function.name }}{{ bare(c.function.arguments) }}<end_function_call>"),
    ("<start_function_call>", "<end_function_call>", "<escape>"),
    macros=_bare("<escape>"),
)
GEMMA4: Final = _chatml(
    "gemma4",
    "gemma4",
    _each("{{ '<|tool_call>call:' + c.function.name }}{{ bare(c.function.arguments) }}<tool_call|>"),
    ("<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>"),
    macros=_bare('<|"|>'),
)
KIMI_K2: Final = _chatml(
    "kimi-k2",
    "kimi_k2",
    "<|tool_calls_section_begin|>"
    + _each(
        "{{ '<|tool_call_begin|>functions.' + c.function.name + ':' ~ loop.index0 }}"
        "{{ '<|tool_call_argument_begin|>' + c.function.arguments | tojson + '<|tool_call_end|>' }}"
    )
    + "<|tool_calls_section_end|>",
    (
        *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>"),
        "<|tool_call_argument_begin|>",
    ),
)
KIMI_K3: Final = Family(
    "kimi-k3",
    "{%- macro told(m) %}{{ '<|open|>message role=\"' + m.role + '\"<|sep|>' }}{%- endmacro %}"
    "{%- for t in tools or [] %}{{ '<|open|>tool<|sep|>' + t | tojson + '<|close|>tool<|sep|>' }}{%- endfor %}"
    "{%- for m in messages %}{{ told(m) }}"
    "{%- if m.role == 'assistant' %}"
    "{%- if m.reasoning_content %}{{ '<|open|>think<|sep|>' + m.reasoning_content + '<|close|>think<|sep|>' }}"
    "{%- endif %}"
    "{%- if m.content %}{{ '<|open|>response<|sep|>' + m.content + '<|close|>response<|sep|>' }}{%- endif %}"
    "{%- if m.tool_calls %}<|open|>tools<|sep|>"
    + _each(
        "{{ '<|open|>call tool=\"' + c.function.name + '\" index=\"' ~ loop.index ~ '\"<|sep|>' }}"
        + _arguments(
            "{{ '<|open|>argument key=\"' + k + '\" type=\"' + ('string' if v is string else 'json') + '\"<|sep|>' }}"
            + _TEXT_OR_JSON
            + "<|close|>argument<|sep|>"
        )
        + "<|close|>call<|sep|>"
    )
    + "<|close|>tools<|sep|>{%- endif %}{%- else %}{{ m.content }}{%- endif %}"
    "<|close|>message<|sep|><|end_of_msg|>{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|open|>message role=\"assistant\"<|sep|>' }}{%- endif %}",
    ("<|end_of_msg|>",),
    ("<|open|>", "<|close|>", "<|sep|>"),
    parser="kimi_k3",
)
LAGUNA: Final = replace(GLM, name="laguna", parser="laguna")
LONGCAT: Final = _chatml(
    "longcat",
    "longcat",
    _each(
        "{{ '<longcat_tool_call>' + c.function.name + '\n' }}"
        + _arguments(
            "{{ '<longcat_arg_key>' + k + '</longcat_arg_key>\n<longcat_arg_value>' }}"
            + _TEXT_OR_JSON
            + "{{ '</longcat_arg_value>\n' }}"
        )
        + "</longcat_tool_call>"
    ),
    (
        *("<longcat_tool_call>", "</longcat_tool_call>", "<longcat_arg_key>", "</longcat_arg_key>"),
        *("<longcat_arg_value>", "</longcat_arg_value>", "<longcat_think>", "</longcat_think>"),
    ),
)
MINICPM5: Final = _chatml(
    "minicpm5",
    "minicpm5",
    _each(
        "{{ '<function name=\"' + c.function.name + '\">' }}"
        + _arguments(
            "{{ '<param name=\"' + k + '\">' }}"
            "{%- if v is string and ('<' in v or '&' in v or '\n' in v) %}{{ '<![CDATA[' + v + ']]>' }}"
            "{%- else %}" + _TEXT_OR_JSON + "{%- endif %}</param>"
        )
        + "</function>"
    ),
    (),
)
MINIMAX: Final = _chatml(
    "minimax-m2",
    "minimax_m2",
    "{{ '<minimax:tool_call>\n' }}"
    + _each(
        "{{ '<invoke name=\"' + c.function.name + '\">\n' }}"
        + _arguments("{{ '<parameter name=\"' + k + '\">' }}" + _TEXT_OR_JSON + "{{ '</parameter>\n' }}")
        + "{{ '</invoke>\n' }}"
    )
    + "</minimax:tool_call>",
    ("<minimax:tool_call>", "</minimax:tool_call>", "<think>", "</think>"),
)
MUSE: Final = _chatml(
    "muse-spark",
    "muse_spark",
    "{{ '<atem:function_calls>\n' }}"
    + _each(
        "{{ '<atem:invoke name=\"' + c.function.name + '\">\n' }}"
        + _arguments("{{ '<atem:parameter name=\"' + k + '\">' + v | tojson + '</atem:parameter>\n' }}")
        + "{{ '</atem:invoke>\n' }}"
    )
    + "</atem:function_calls>",
    (),
)

ALL_FAMILIES: Final = (
    *FAMILIES,
    *(FUNCTION_GEMMA, GEMMA4, KIMI_K2, KIMI_K3, LAGUNA, LONGCAT, MINICPM5, MINIMAX, MUSE),
)
