"""Tool calls of MiniMax M2:

<minimax:tool_call>
<invoke name="f">
<parameter name="city">Oslo</parameter>
</invoke>
</minimax:tool_call>
"""

from __future__ import annotations

import re

from shmllm.frontend.replies.tagged import TaggedParser


class MiniMaxM2Parser(TaggedParser):
    begin = "<minimax:tool_call>"
    end = "</minimax:tool_call>"
    function = re.compile(r'\s*<invoke name="([^">]+)">(.*?)</invoke>\s*', re.DOTALL)
    parameter = re.compile(r'\s*<parameter name="([^">]+)">(.*?)</parameter>\s*', re.DOTALL)
    opens = '<minimax:tool_call>\n<invoke name="{}">\n'
    closes = "</invoke>\n</minimax:tool_call>"
    key_opens = '<parameter name="{}">'
    key_closes = "</parameter>\n"
