"""Tool calls of Phi-4-mini with vLLM's template: functools and a JSON list."""

from __future__ import annotations

from shmllm.frontend.replies.json_list import JsonListParser
from shmllm.outputs.reply import FunctionCall


class Phi4MiniParser(JsonListParser):
    """Its mark has the bracket: the word alone is part of texts about Python."""

    begin = "functools["
    opens = ""

    def read(self, body: str) -> list[FunctionCall]:
        return super().read(f"[{body}")
