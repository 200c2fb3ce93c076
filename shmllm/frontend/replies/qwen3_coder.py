"""Tool calls of Qwen3-Coder and Qwen3.5:

<tool_call>
<function=f>
<parameter=city>
Oslo
</parameter>
</function>
</tool_call>
"""

from __future__ import annotations

import re

from shmllm.frontend.replies.tagged import TaggedParser


class Qwen3CoderParser(TaggedParser):
    function = re.compile(r"\s*<function=([^>]+)>(.*?)</function>\s*", re.DOTALL)
    parameter = re.compile(r"\s*<parameter=([^>]+)>\n?(.*?)\n?</parameter>\s*", re.DOTALL)
    opens = "<tool_call>\n<function={}>\n"
    closes = "</function>\n</tool_call>"
    key_opens = "<parameter={}>\n"
    key_closes = "\n</parameter>\n"
