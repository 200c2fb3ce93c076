"""Tool calls of DeepSeek V3.2 and V4, in tags whose names begin with a mark, here DSML:

<DSML function_calls>
<DSML invoke name="f">
<DSML parameter name="city" string="true">Oslo</DSML parameter>
<DSML parameter name="days" string="false">2</DSML parameter>
</DSML invoke>
</DSML function_calls>

A parameter says whether it is a string. V4 has tool_calls in place of function_calls.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from shmllm.frontend.replies.tagged import TaggedParser, value_of

_MARK = "\uff5cDSML\uff5c"


class DeepSeekV32Parser(TaggedParser):
    are_together = True
    begin = f"<{_MARK}function_calls>"
    end = f"</{_MARK}function_calls>"
    function = re.compile(rf'\s*<{_MARK}invoke name="([^">]+)">(.*?)</{_MARK}invoke>\s*', re.DOTALL)
    parameter = re.compile(
        rf'\s*<{_MARK}parameter name="([^">]+)"(?: string="(true|false)")?>(.*?)'
        rf"</{_MARK}parameter>\s*",
        re.DOTALL,
    )
    opens = f'<{_MARK}invoke name="{{}}">\n'
    closes = f"</{_MARK}invoke>"
    key_opens = f'<{_MARK}parameter name="{{}}" string="{{}}">'
    key_closes = f"</{_MARK}parameter>\n"

    def _argument(self, found: re.Match[str], properties: Mapping[str, Any]) -> tuple[str, Any]:
        key, is_string, text = found.groups()
        schemas = {"true": {"type": "string"}, "false": {}}
        return key, value_of(text, schemas.get(is_string, properties.get(key)))

    @classmethod
    def _opens_key(cls, key: str, is_string: bool) -> str:
        return cls.key_opens.format(key, "true" if is_string else "false")


class DeepSeekV4Parser(DeepSeekV32Parser):
    begin = f"<{_MARK}tool_calls>"
    end = f"</{_MARK}tool_calls>"
