"""Tool calls and reasoning of Apertus:

<|inner_prefix|>...<|inner_suffix|><|tools_prefix|>[{"f": {...}}, {"g": {...}}]<|tools_suffix|>
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from shmllm.frontend.replies.json_list import JsonListParser
from shmllm.frontend.replies.json_text import write_json
from shmllm.frontend.replies.parser import Format, ReasoningParser, name_of, tag_of
from shmllm.outputs.reply import FunctionCall


class ApertusReasoning(ReasoningParser):
    """Calls are made inside of reasoning, too, which then ends without its mark."""

    begin = "<|inner_prefix|>"
    end = "<|inner_suffix|>"
    stops = ("<|tools_prefix|>",)


class ApertusParser(JsonListParser):
    begin = "<|tools_prefix|>"
    end = "<|tools_suffix|>"

    def _call(self, value: Any) -> FunctionCall:
        [(name, arguments)] = value.items()
        return FunctionCall(name, write_json(arguments))

    @classmethod
    def _tag(cls, tool: Mapping[str, Any]) -> Format:
        return tag_of(f"{{{json.dumps(name_of(tool))}: ", tool, "}")
