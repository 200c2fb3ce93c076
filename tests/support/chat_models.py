"""Tiny models that chat: random weights, and the chat template and added tokens of a family.

The templates have what the families' own ones write around messages, tools and reasoning, and
nothing else of them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken, Tokenizer

from shmllm import SamplingParams
from shmllm.frontend.model_files import resolve_model

VOCAB_SIZE = 4160
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 6},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
TIME: dict[str, Any] = {"type": "function", "function": {"name": "time", "description": "Now."}}


class Family(NamedTuple):
    """
    Attributes:
        template: the chat template.
        added: added tokens that are no special tokens.
        special: special tokens; the first of them ends an output.
    """

    template: str
    added: Sequence[str] = ()
    special: Sequence[str] = ()


_QWEN = """{%- if tools %}<|im_start|>system
<tools>{% for tool in tools %}
{{ tool | tojson }}{% endfor %}
</tools>
HOW<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.reasoning_content %}<think>
{{ message.reasoning_content }}
</think>

{% endif %}{{ message.content or '' }}{% for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}{% endif %}"""
_HEADERS = """{% for message in messages %}<|start_header_id|>{{ message.role }}<|end_header_id|>

{% if loop.last and tools %}{% for tool in tools %}{{ tool | tojson }}
{% endfor %}Respond in the format {"name": function name, \
"parameters": dictionary of argument name and its value}. {% endif %}
{{- message.content }}<|eot_id|>{% endfor %}
{%- if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>

{% endif %}"""
_MISTRAL = """{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}
{%- for message in messages %}[INST]{{ message.content }}[/INST]{% endfor %}
{%- if false %}[TOOL_CALLS]{% endif %}"""
_MISTRAL_IDS = f"{_MISTRAL}{{% if false %}}[CALL_ID][ARGS]{{% endif %}}"
_DEEPSEEK = """{% for message in messages %}<|User|>{{ message.content }}{% endfor %}
{%- if false %}tool▁call▁begin{{ '```json' }}</think>{% endif %}
{%- if add_generation_prompt %}<|Assistant|><think>
{% endif %}"""
_HARMONY = """{% for message in messages %}
{{- '<|start|>' + message.role + '<|message|>' + message.content }}
{%- if false %}<|channel|>analysis{% endif %}<|end|>{% endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""
_DEEPSEEK_MARKS = [
    f"<\uff5ctool\u2581{name}\uff5c>".replace("_", "\u2581")
    for name in ("calls_begin", "calls_end", "call_begin", "call_end", "sep")
]
_CHATML = ("<|im_end|>", "<|im_start|>")

FAMILIES = {
    "qwen3": Family(
        _QWEN.replace("HOW", "<tool_call></tool_call>"),
        ("<think>", "</think>", "<tool_call>", "</tool_call>"),
        _CHATML,
    ),
    "qwen3_coder": Family(
        _QWEN.replace("HOW", "<function=NAME>"),
        ("<think>", "</think>", "<tool_call>", "</tool_call>"),
        _CHATML,
    ),
    "llama3": Family(_HEADERS, (), ("<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>")),
    "mistral": Family(_MISTRAL, (), ("</s>", "[INST]", "[/INST]", "[TOOL_CALLS]")),
    "mistral_ids": Family(
        _MISTRAL_IDS, (), ("</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")
    ),
    "deepseek": Family(
        _DEEPSEEK,
        ("<think>", "</think>", *_DEEPSEEK_MARKS),
        ("<end>", "<|User|>", "<|Assistant|>"),
    ),
    "gpt_oss": Family(
        _HARMONY,
        ("analysis",),  # which is one token in gpt-oss, too
        (
            *("<|return|>", "<|call|>", "<|end|>", "<|start|>"),
            *("<|channel|>", "<|message|>", "<|constrain|>"),
        ),
    ),
}


def make_chat_model(directory: Path, family: str) -> Path:
    """Write a model of a family without weights; start it with load_format="dummy"."""
    tiny = resolve_model("tiny")
    found = FAMILIES[family]
    tokenizer = Tokenizer.from_file(str(tiny / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in found.added])
    tokenizer.add_special_tokens(list(found.special))
    tokenizer.save(str(directory / "tokenizer.json"))
    ends = [text for text in found.special if text in (found.special[0], "<|call|>")]
    ids = [tokenizer.token_to_id(text) for text in ends]
    config = json.loads((tiny / "config.json").read_text())
    config |= {"vocab_size": VOCAB_SIZE, "eos_token_id": ids, "bos_token_id": None}
    (directory / "config.json").write_text(json.dumps(config))
    named = {"eos_token": found.special[0], "chat_template": found.template}
    (directory / "tokenizer_config.json").write_text(json.dumps(named))
    return directory


def scripted(llm: Any, text: str, **options: Any) -> SamplingParams:
    """Parameters that make the model write a text."""
    ids = llm.front_end.tokenizer.encode(text, add_special_tokens=False)
    return SamplingParams(trace_decode_token_ids=ids, max_tokens=len(ids), **options)
