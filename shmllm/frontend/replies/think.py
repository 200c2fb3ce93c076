"""Reasoning between two marks at the beginning of a reply."""

from __future__ import annotations

from shmllm.frontend.replies.parser import ReasoningParser


class ThinkParser(ReasoningParser):
    """Qwen3 and most others: <think>...</think>, of which the prompt may have the first."""

    begin = "<think>"
    end = "</think>"


class DeepSeekR1Parser(ThinkParser):
    """DeepSeek-R1: a reply begins inside of reasoning also if the prompt does not say so."""

    is_assumed = True


class KimiReasoning(ThinkParser):
    """Kimi K2, which may call tools inside of reasoning and leave out its end."""

    stops = ("<|tool_calls_section_begin|>",)


class ResponseParser(ThinkParser):
    """ERNIE 4.5 and Granite 3.3, whose answers are between marks, too."""

    frame = ("<response>", "</response>")


class MagistralParser(ReasoningParser):
    """Mistral's models that reason."""

    begin = "[THINK]"
    end = "[/THINK]"


class AprielReasoning(ReasoningParser):
    """Apriel, whose reasoning begins with a text."""

    begin = "Here are my reasoning steps:"
    end = "[BEGIN FINAL RESPONSE]"
    frame = ("[END FINAL RESPONSE]",)
