"""Tool calls of Nemotron Nano 2: a JSON list between <TOOLCALL> and </TOOLCALL>."""

from __future__ import annotations

from shmllm.frontend.replies.json_list import JsonListParser


class NemotronParser(JsonListParser):
    begin = "<TOOLCALL>"
    end = "</TOOLCALL>"
