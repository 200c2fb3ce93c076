"""The parsers of replies by name, and which of them a chat template asks for.

The names are vLLM's. A new parser is one file and one line here.
"""

from __future__ import annotations

from collections.abc import Sequence

from shmllm.errors import EngineStartError, nearest
from shmllm.frontend.replies.deepseek import DeepSeekV3Parser, DeepSeekV31Parser
from shmllm.frontend.replies.glm import Glm45Parser, Glm47Parser
from shmllm.frontend.replies.harmony import HarmonyParser, HarmonyReasoning
from shmllm.frontend.replies.hermes import HermesParser
from shmllm.frontend.replies.kimi import KimiK2Parser
from shmllm.frontend.replies.llama3 import Llama3Parser
from shmllm.frontend.replies.minimax import MiniMaxM2Parser
from shmllm.frontend.replies.mistral import MistralParser, mistral_parser
from shmllm.frontend.replies.parser import ReasoningParser, ToolParser
from shmllm.frontend.replies.qwen3_coder import Qwen3CoderParser
from shmllm.frontend.replies.seed_oss import SeedOssParser, SeedOssReasoning
from shmllm.frontend.replies.think import DeepSeekR1Parser, MagistralParser, ThinkParser

AUTO = "auto"

REASONING_PARSERS: dict[str, type[ReasoningParser]] = {
    "qwen3": ThinkParser,
    "deepseek_r1": DeepSeekR1Parser,
    "mistral": MagistralParser,
    "openai_gptoss": HarmonyReasoning,
    "seed_oss": SeedOssReasoning,
}
ToolParserClass = type[ToolParser] | type[HarmonyParser]
TOOL_PARSERS: dict[str, ToolParserClass] = {
    "hermes": HermesParser,
    "qwen3_coder": Qwen3CoderParser,
    "glm45": Glm45Parser,
    "glm47": Glm47Parser,
    "llama3_json": Llama3Parser,
    "mistral": MistralParser,
    "deepseek_v3": DeepSeekV3Parser,
    "deepseek_v31": DeepSeekV31Parser,
    "openai": HarmonyParser,
    "kimi_k2": KimiK2Parser,
    "minimax_m2": MiniMaxM2Parser,
    "seed_oss": SeedOssParser,
}

# The first line whose texts are all in a template decides.
_REASONING_TEXTS = (
    ("openai_gptoss", "<|channel|>analysis"),
    ("mistral", "[THINK]"),
    ("seed_oss", "</seed:think>"),
    ("qwen3", "</think>"),
)
_TOOL_TEXTS = (
    ("openai", "<|channel|>"),
    ("mistral", "[TOOL_CALLS]"),
    ("deepseek_v3", "tool\u2581call\u2581begin", "```json"),
    ("deepseek_v31", "tool\u2581call\u2581begin"),
    ("kimi_k2", "<|tool_calls_section_begin|>"),
    ("minimax_m2", "<minimax:tool_call>", '<invoke name="'),
    ("seed_oss", "<seed:tool_call>"),
    ("glm47", "<tool_call>{function-name}<arg_key>"),
    ("glm45", "<tool_call>{function-name}", "<arg_key>"),
    # Formats of their own: Laguna, MiniMax-M3, Apriel and Functionary.
    ("", "<tool_call>", "<arg_key>"),
    ("", "<tool_call>", "<invoke name="),
    ("", "<tool_call>", "<tool_calls>"),
    ("", "<|python_tag|>", "<function="),
    ("qwen3_coder", "<tool_call>", "<function="),
    ("hermes", "<tool_call>"),
    ("llama3_json", "<|python_tag|>"),
    ("llama3_json", '"parameters": dictionary of argument name'),
)


def check_names(reasoning: str, tools: str) -> None:
    """Check the values of the options `reasoning_parser` and `tool_parser`.

    Raises:
        EngineStartError: one is unknown; names the nearest one.
    """
    for option, name, known in (
        ("reasoning_parser", reasoning, REASONING_PARSERS),
        ("tool_parser", tools, TOOL_PARSERS),
    ):
        if name not in ("", AUTO, *known):
            raise EngineStartError(
                f"{option}={name!r} is unknown; did you mean {nearest(str(name), known)!r}? "
                f"Known are {', '.join(known)}, 'auto', which reads the chat template, and ''"
            )


def reasoning_parser(name: str, template: str) -> type[ReasoningParser] | None:
    """The parser of a name; for "auto", that of a chat template."""
    name = _find(template, _REASONING_TEXTS) if name == AUTO else name
    return REASONING_PARSERS[name] if name else None


def tool_parser(name: str, template: str) -> ToolParserClass | None:
    """The parser of a name; for "auto", that of a chat template."""
    name = _find(template, _TOOL_TEXTS) if name == AUTO else name
    if name == "mistral":
        return mistral_parser(template)
    return TOOL_PARSERS[name] if name else None


def _find(template: str, rows: Sequence[tuple[str, ...]]) -> str:
    return next((name for name, *texts in rows if all(text in template for text in texts)), "")
