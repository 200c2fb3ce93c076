"""Tool calls and reasoning of Seed-OSS:

<seed:think>...</seed:think>
<seed:tool_call>
<function=f>
<parameter=city>Oslo</parameter>
</function>
</seed:tool_call>
"""

from __future__ import annotations

import re

from shmllm.frontend.replies.parser import ReasoningParser
from shmllm.frontend.replies.tagged import TaggedParser


class SeedOssReasoning(ReasoningParser):
    begin = "<seed:think>"
    end = "</seed:think>"


class SeedOssParser(TaggedParser):
    begin = "<seed:tool_call>"
    end = "</seed:tool_call>"
    function = re.compile(r"\s*<function=([^>]+)>(.*?)</function>\s*", re.DOTALL)
    parameter = re.compile(r"\s*<parameter=([^>]+)>(.*?)</parameter>\s*", re.DOTALL)
    opens = "<seed:tool_call>\n<function={}>\n"
    closes = "</function>\n</seed:tool_call>"
    key_opens = "<parameter={}>"
    key_closes = "</parameter>\n"
