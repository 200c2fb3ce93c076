"""What some templates need of messages, and others do not: the form of contents and tool calls.

Callers give messages in one form, that of OpenAI. This module must not know what else templates
write.
"""

from __future__ import annotations

import json
import re
from enum import Enum
from typing import Any

# A template that reads parts goes through them; to tell them from a string is not to read them:
# Qwen3 takes "" for a content that is no string, and Llama 3 writes Python's text of a list.
_READS_PARTS = re.compile(
    r"""\bfor\s+\w+\s+in\s+(\w+(\[-?\d+\])?(\.|\[['"]))?content\b(?!['"]?\]?\s*[.(])"""
)
_READS_STRINGS = re.compile(
    r"""\bcontent['"\]]*\s+is\s+(not\s+)?(string|iterable|sequence|mapping)\b"""
)

# DeepSeek V3 and R1 write the calls of a message only if its content is None,
_WANTS_NONE = re.compile(r"\bassistant['\"]\s+and\s+message\W+content\W+is\s+none\b")
# and they join the arguments with other texts, so these have to be JSON text;
_JOINS_ARGUMENTS = re.compile(
    r"""\barguments['"\]]*\s*\+|\+\s*[\w.'"\[\]]*\barguments\b(?!['"\]]*\s*[|.])"""
)
# unless the template writes them as JSON itself.
_WRITES_JSON = re.compile(r"\barguments['\"\]]*\s*\|\s*tojson\b")
# gpt-oss refuses content beside reasoning and calls; it writes either of them as its analysis.
_HARMONY = "<|channel|>analysis"


class ContentForm(Enum):
    """What a template reads as the content of a message."""

    STRING = "string"
    PARTS = "openai"
    EITHER = "either"


def content_form(template: str) -> ContentForm:
    """The form of contents that a template reads.

    Args:
        template: the source of the template.
    """
    if not _READS_PARTS.search(template):
        return ContentForm.STRING
    return ContentForm.EITHER if _READS_STRINGS.search(template) else ContentForm.PARTS


def fit_calls(message: dict[str, Any], template: str) -> None:
    """Change a checked message with tool calls to what a template reads, in place.

    Args:
        message: of the assistant, with parsed arguments.
        template: the source of the template.
    """
    content = message.get("content")
    if not content:
        message["content"] = None if _WANTS_NONE.search(template) else ""
    elif _HARMONY in template and message.get("thinking") and isinstance(content, str):
        message["thinking"] += f"\n{content}"
        message["content"] = ""
    if _JOINS_ARGUMENTS.search(template) and not _WRITES_JSON.search(template):
        for call in message["tool_calls"]:
            function = call.get("function", call)
            function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
