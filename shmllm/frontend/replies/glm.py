"""Tool calls of GLM-4.5 to 4.7, and of Laguna:

    <tool_call>f
    <arg_key>city</arg_key>
    <arg_value>Oslo</arg_value>
    </tool_call>

GLM-4.7 and later models of Laguna write no line ends between these marks.
"""

from __future__ import annotations

import re

from shmllm.frontend.replies.tagged import TaggedParser
from shmllm.outputs.reply import Reply


class _GlmParser(TaggedParser):
    function = re.compile(r"\s*([^\s<{]+)\s*(.*)", re.DOTALL)
    parameter = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*", re.DOTALL)
    closes = "</tool_call>"

    def _take_calls(self, body: str, end: str, reply: Reply) -> None:
        """Take a text without its end for content: nothing else shows that it is cut off."""
        if end:
            super()._take_calls(body, end, reply)
        else:
            self._body = None
            reply.content += self._content.add(self._spell(body, end))


class Glm45Parser(_GlmParser):
    opens = "<tool_call>{}\n"
    key_opens = "<arg_key>{}</arg_key>\n<arg_value>"
    key_closes = "</arg_value>\n"


class Glm47Parser(_GlmParser):
    opens = "<tool_call>{}"
    key_opens = "<arg_key>{}</arg_key><arg_value>"
    key_closes = "</arg_value>"
    between = ""
