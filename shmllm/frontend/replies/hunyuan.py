"""Tool calls and reasoning of Hunyuan A13B and of Hunyuan 3.

A13B writes a JSON list between <tool_calls> and </tool_calls>, and answers between <answer> and
</answer>. All marks of Hunyuan 3 have a suffix:

<tool_calls:opensource>
<tool_call:opensource>f<tool_sep:opensource>
<arg_key:opensource>city</arg_key:opensource>
<arg_value:opensource>Oslo</arg_value:opensource>
</tool_call:opensource>
</tool_calls:opensource>
"""

from __future__ import annotations

import re

from shmllm.frontend.replies.json_list import ToolCallsParser
from shmllm.frontend.replies.parser import ReasoningParser
from shmllm.frontend.replies.tagged import TaggedParser
from shmllm.frontend.replies.think import ThinkParser

_ANSWER = ("<answer>", "</answer>")
_SUFFIX = ":opensource"


class HunyuanA13BReasoning(ThinkParser):
    frame = _ANSWER


class HunyuanA13BParser(ToolCallsParser):
    frame = _ANSWER


class Hunyuan3Reasoning(ReasoningParser):
    begin = f"<think{_SUFFIX}>"
    end = f"</think{_SUFFIX}>"


class Hunyuan3Parser(TaggedParser):
    are_together = True
    begin = f"<tool_calls{_SUFFIX}>"
    end = f"</tool_calls{_SUFFIX}>"
    function = re.compile(
        rf"\s*<tool_call{_SUFFIX}>([^<]+)<tool_sep{_SUFFIX}>(.*?)</tool_call{_SUFFIX}>\s*",
        re.DOTALL,
    )
    parameter = re.compile(
        rf"\s*<arg_key{_SUFFIX}>(.*?)</arg_key{_SUFFIX}>\s*"
        rf"<arg_value{_SUFFIX}>(.*?)</arg_value{_SUFFIX}>\s*",
        re.DOTALL,
    )
    opens = f"<tool_call{_SUFFIX}>{{}}<tool_sep{_SUFFIX}>\n"
    closes = f"</tool_call{_SUFFIX}>"
    key_opens = f"<arg_key{_SUFFIX}>{{}}</arg_key{_SUFFIX}>\n<arg_value{_SUFFIX}>"
    key_closes = f"</arg_value{_SUFFIX}>\n"
