"""The parsers of replies by name, and which of them a chat template asks for.

The names are vLLM's. A new parser is one file and one line here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shmllm.errors import EngineStartError, nearest
from shmllm.frontend.replies.apertus import ApertusParser, ApertusReasoning
from shmllm.frontend.replies.cohere import CohereParser, CohereReasoning, CommandRParser
from shmllm.frontend.replies.deepseek import DeepSeekV3Parser, DeepSeekV31Parser
from shmllm.frontend.replies.deepseek_tags import DeepSeekV4Parser, DeepSeekV32Parser
from shmllm.frontend.replies.gemma4 import Gemma4Parser, Gemma4Reasoning
from shmllm.frontend.replies.gigachat import GigaChat3Parser, gigachat_parser
from shmllm.frontend.replies.glm import Glm45Parser, Glm47Parser
from shmllm.frontend.replies.granite import GraniteParser
from shmllm.frontend.replies.harmony import HarmonyParser, HarmonyReasoning
from shmllm.frontend.replies.hermes import HermesParser
from shmllm.frontend.replies.hunyuan import (
    Hunyuan3Parser,
    Hunyuan3Reasoning,
    HunyuanA13BParser,
    HunyuanA13BReasoning,
)
from shmllm.frontend.replies.json_list import ToolCallsParser
from shmllm.frontend.replies.kimi import KimiK2Parser
from shmllm.frontend.replies.llama3 import Llama3Parser
from shmllm.frontend.replies.minicpm import MiniCpm5Parser
from shmllm.frontend.replies.minimax import MiniMaxM2Parser
from shmllm.frontend.replies.mistral import MistralParser, mistral_parser
from shmllm.frontend.replies.nemotron import NemotronParser
from shmllm.frontend.replies.parser import ReasoningParser, ToolParser
from shmllm.frontend.replies.phi4 import Phi4MiniParser
from shmllm.frontend.replies.pythonic import (
    Lfm2Parser,
    Llama4Parser,
    Olmo3Parser,
    PythonicParser,
)
from shmllm.frontend.replies.qwen3_coder import Qwen3CoderParser
from shmllm.frontend.replies.seed_oss import SeedOssParser, SeedOssReasoning
from shmllm.frontend.replies.solar import SolarParser, SolarReasoning
from shmllm.frontend.replies.think import (
    AprielReasoning,
    DeepSeekR1Parser,
    KimiReasoning,
    MagistralParser,
    ResponseParser,
    ThinkParser,
)

AUTO = "auto"

_LIKE_QWEN3 = (
    *("deepseek_v3", "deepseek_v4", "glm45", "glm47", "holo2", "mimo", "minimax_m2"),
    *("nemotron_v3", "olmo3", "poolside_v1", "step3p5"),
)
REASONING_PARSERS: dict[str, type[ReasoningParser]] = {
    "qwen3": ThinkParser,
    "deepseek_r1": DeepSeekR1Parser,
    "mistral": MagistralParser,
    "openai_gptoss": HarmonyReasoning,
    "seed_oss": SeedOssReasoning,
    "kimi_k2": KimiReasoning,
    "cohere_command3": CohereReasoning,
    "apertus": ApertusReasoning,
    "solar_open": SolarReasoning,
    "hunyuan_a13b": HunyuanA13BReasoning,
    "hy_v3": Hunyuan3Reasoning,
    "ernie45": ResponseParser,
    "apriel": AprielReasoning,
    "gemma4": Gemma4Reasoning,
    # Further names of vLLM for the same formats.
    "cohere_command4": CohereReasoning,
    **dict.fromkeys(_LIKE_QWEN3, ThinkParser),
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
    "deepseek_v32": DeepSeekV32Parser,
    "deepseek_v4": DeepSeekV4Parser,
    "cohere_command3": CohereParser,
    "apertus": ApertusParser,
    "solar_open": SolarParser,
    "hunyuan_a13b": HunyuanA13BParser,
    "hy_v3": Hunyuan3Parser,
    "minicpm5": MiniCpm5Parser,
    "nemotron_json": NemotronParser,
    "granite": GraniteParser,
    "phi4_mini_json": Phi4MiniParser,
    "lfm2": Lfm2Parser,
    "olmo3": Olmo3Parser,
    "gemma4": Gemma4Parser,
    "pythonic": PythonicParser,
    "llama4_pythonic": Llama4Parser,
    "jamba": ToolCallsParser,
    "gigachat3": GigaChat3Parser,
    "command_r": CommandRParser,
    # Further names of vLLM for the same formats.
    "cohere_command4": CohereParser,
    "ernie45": HermesParser,
    "granite4": HermesParser,
    "llama4_json": Llama3Parser,
    "poolside_v1": Glm47Parser,
    **dict.fromkeys(("qwen3_xml", "mimo", "step3p5"), Qwen3CoderParser),
}
_BY_TEMPLATE: dict[str, Callable[[str], ToolParserClass]] = {
    "mistral": mistral_parser,
    "gigachat3": gigachat_parser,
}
"""What chooses between parsers of one name."""

# The first line whose texts are all in a template decides.
_REASONING_TEXTS = (
    ("openai_gptoss", "<|channel|>analysis"),
    ("mistral", "[THINK]"),
    ("seed_oss", "</seed:think>"),
    ("cohere_command3", "<|START_THINKING|>"),
    ("apertus", "<|inner_prefix|>"),
    ("solar_open", "<|begin|>assistant", "<|think|>"),
    ("gemma4", "<|channel>thought"),
    ("hy_v3", "</think{}>", "':opensource'"),
    ("hunyuan_a13b", "</think>", "</answer>"),
    ("ernie45", "<think></think>", "<response></response>"),
    ("apriel", "[BEGIN FINAL RESPONSE]"),
    ("kimi_k2", "</think>", "<|tool_calls_section_begin|>"),
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
    ("cohere_command3", "<|START_ACTION|>"),
    ("apertus", "<|tools_prefix|>"),
    ("solar_open", "<|tool_call:begin|>", "<|tool_call:args|>"),
    ("gemma4", "<|tool_call>call:"),
    ("lfm2", "<|tool_call_start|>"),
    ("lfm2", "<|im_start|>", "List of tools: "),
    ("olmo3", "<function_calls>"),
    ("deepseek_v32", "\uff5cDSML\uff5c", "function_calls>"),
    ("deepseek_v4", "\uff5cDSML\uff5c", "tool_calls>"),
    ("hy_v3", "<tool_sep{}>", "':opensource'"),
    ("hunyuan_a13b", "<tool_calls>", "</answer>"),
    ("minicpm5", '<function name="', '<param name="'),
    ("nemotron_json", "<TOOLCALL>["),
    ("granite", "<|tool_call|>"),
    ("command_r", "Action:", '"tool_name": '),
    ("phi4_mini_json", "functools["),
    ("glm47", "<tool_call>{function-name}<arg_key>"),
    ("glm45", "<tool_call>{function-name}", "<arg_key>"),
    ("glm45", "<tool_call>function-name\\n<arg_key>"),
    ("glm47", "<tool_call>", "<arg_key>"),
    ("jamba", "<tool_calls>["),
    # Formats of their own: MiniMax-M3 and Functionary.
    ("", "<tool_call>", "<invoke name="),
    ("", "<|python_tag|>", "<function="),
    ("gigachat3", "function call", "<|role_sep|>"),
    ("llama4_pythonic", "<|python_start|>", "<|python_end|>"),
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
    if name in _BY_TEMPLATE:
        return _BY_TEMPLATE[name](template)
    return TOOL_PARSERS[name] if name else None


def _find(template: str, rows: Sequence[tuple[str, ...]]) -> str:
    return next((name for name, *texts in rows if all(text in template for text in texts)), "")
