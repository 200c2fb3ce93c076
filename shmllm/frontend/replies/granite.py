"""Tool calls of Granite 3: <|tool_call|> and a JSON list."""

from __future__ import annotations

from shmllm.frontend.replies.json_list import JsonListParser


class GraniteParser(JsonListParser):
    begin = "<|tool_call|>"
