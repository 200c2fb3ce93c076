"""Tool calls of MiniCPM 5, whose values may be in CDATA blocks:

<function name="f"><param name="city">Oslo</param><param name="text"><![CDATA[a < b]]></param>
</function>
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from shmllm.frontend.replies.tagged import TaggedParser, value_of

_CDATA = re.compile(r"\s*<!\[CDATA\[(.*?)\]\]>\s*", re.DOTALL)


class MiniCpm5Parser(TaggedParser):
    begin = '<function name="'
    end = "</function>"
    function = re.compile(r'([^">]+)">(.*)', re.DOTALL)
    parameter = re.compile(
        r'\s*<param name="([^">]+)">(\s*<!\[CDATA\[.*?\]\]>\s*|.*?)</param>\s*', re.DOTALL
    )
    opens = '<function name="{}">'
    closes = "</function>"
    key_opens = '<param name="{}">'
    key_closes = "</param>"

    def _argument(self, found: re.Match[str], properties: Mapping[str, Any]) -> tuple[str, Any]:
        block = _CDATA.fullmatch(found[2])
        key = found[1].strip()
        return key, value_of(block[1] if block else found[2], properties.get(key))
