"""ReplyFormats: how the replies of a front end's model are read, for each conversation.

This module must not know how requests run.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache, reduce
from typing import Any

from shmllm.errors import RequestError
from shmllm.frontend.replies.frame import FrameParser
from shmllm.frontend.replies.harmony import HarmonyParser, HarmonyReasoning
from shmllm.frontend.replies.parser import (
    Format,
    ReasoningParser,
    ReplyParser,
    Tools,
    TwoParsers,
    name_of,
)
from shmllm.frontend.replies.reasoning_config import ReasoningMarks
from shmllm.frontend.replies.registry import (
    AUTO,
    ToolParserClass,
    check_names,
    reasoning_parser,
    tool_parser,
)
from shmllm.frontend.text.tokenizer import Tokenizer
from shmllm.params.sampling import SamplingParams
from shmllm.params.structured_outputs import StructuredOutputsParams
from shmllm.params.thinking import ThinkingBudget

logger = logging.getLogger(__name__)

NO_MARKS = ReasoningMarks()

ToolChoice = str | Mapping[str, Any] | None


@dataclass(frozen=True, slots=True)
class ReplyFormat:
    """How the reply to one prompt is read.

    Attributes:
        reasoning: the parser of reasoning; None if the reply has none.
        tool_parser: the parser of tool calls; None if the reply has none.
        tools: the tools that may be called.
        is_open: whether the reply begins inside of reasoning.
        constraint: the structural tag that the reply must match; None without one.
    """

    reasoning: type[ReasoningParser] | None = None
    tool_parser: ToolParserClass | None = None
    tools: Tools = ()
    is_open: bool = False
    constraint: Format | None = None

    def parser(self) -> ReplyParser:
        """A new parser."""
        if self.reasoning is HarmonyReasoning or self.tool_parser is HarmonyParser:
            return HarmonyParser(self.reasoning is not None, self.tool_parser is not None)
        parsers: list[ReplyParser] = []
        frame: dict[str, None] = {}
        if self.reasoning is not None:
            parsers.append(self.reasoning(self.is_open))
            frame |= dict.fromkeys(self.reasoning.frame)
        if self.tool_parser is not None and not issubclass(self.tool_parser, HarmonyParser):
            parsers.append(self.tool_parser(self.tools))
            frame |= dict.fromkeys(self.tool_parser.frame)
        if frame:
            parsers.append(FrameParser(tuple(frame)))
        return reduce(TwoParsers, parsers)

    def constrain(self, name: str, params: SamplingParams) -> SamplingParams:
        """The parameters of a request with the constraint.

        Raises:
            RequestError: the parameters have another one; `name` is what errors call the request.
        """
        if self.constraint is None:
            return params
        if params.structured_outputs is not None:
            raise RequestError(
                f"{name} has a tool_choice that forces a call, and structured_outputs: give one "
                "of them"
            )
        params = copy.copy(params)
        params.structured_outputs = StructuredOutputsParams(structural_tag=self.constraint)
        return params


class ReplyFormats:
    """
    Args:
        tokenizer: the model's tokenizer, with its chat templates.
        reasoning: the value of the option `reasoning_parser`.
        tools: the value of the option `tool_parser`.
        marks: the option `reasoning_config`.

    Raises:
        EngineStartError: a name is unknown.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        reasoning: str = AUTO,
        tools: str = AUTO,
        marks: ReasoningMarks = NO_MARKS,
    ) -> None:
        check_names(reasoning, tools)
        self._marks = marks
        self._tokenizer = tokenizer
        self._reasoning = reasoning
        self._tools = tools

    def of(
        self, prompt: str, template: str, tools: Tools | None, tool_choice: ToolChoice
    ) -> ReplyFormat | None:
        """How the reply to a prompt is read; None if it is content only.

        Args:
            prompt: the prompt, as the template rendered it.
            template: the source of the chat template.
            tools: the tools that the reply may call.
            tool_choice: "auto", "none", "required", or the function that must be called, as
                {"type": "function", "function": {"name": ...}}; None means "auto".

        Raises:
            RequestError: `tool_choice` is invalid, or calls cannot be forced.
        """
        offered = _offered(tools or (), tool_choice)
        reasoning = reasoning_parser(self._reasoning, template)
        parser = tool_parser(self._tools, template) if offered else None
        is_open = reasoning is not None and reasoning.is_open_after(prompt)
        if offered:
            _warn_of_tools(template, has_parser=parser is not None or not self._tools)
        constraint = None
        if tool_choice not in (None, "auto", "none"):
            if parser is None:
                raise RequestError(
                    f"tool_choice={tool_choice!r} needs a format of tool calls, and the chat "
                    "template shows none that is known: set the option tool_parser "
                    "(--tool-parser), or pass a chat_template (--chat-template) that shows one"
                )
            lead = [] if reasoning is None else reasoning.lead(is_open)
            forced = parser.forced(offered, tool_choice != "required")
            constraint = _structural_tag([*lead, forced])
        if reasoning is None and parser is None:
            return None
        return ReplyFormat(reasoning, parser, offered, is_open, constraint)

    def thinking(self, limit: int) -> ThinkingBudget:
        """The limit of reasoning, with the tokens that begin and end it.

        Raises:
            RequestError: it is not known how the model reasons, or the end that the option
                `reasoning_config` has does not end it.
        """
        parser = self._default_reasoning
        begin = self._marks.begin or (parser.begin if parser else "")
        end = self._marks.end or (parser.end if parser else "")
        closes = parser.end if parser else end
        if closes not in end:
            raise RequestError(
                f"reasoning_end_str {end!r} of reasoning_config must have {closes!r}, by which the "
                "model's reasoning ends"
            )
        if not begin or not end:
            raise RequestError(
                "thinking_token_budget needs to know how the model reasons, and its chat template "
                "does not show it: set the option reasoning_parser, or reasoning_config",
                parameter="thinking_token_budget",
                value=limit,
            )
        return ThinkingBudget(limit, *map(self._encode, (begin, end, closes)))

    @cached_property
    def _default_reasoning(self) -> type[ReasoningParser] | None:
        if self._reasoning != AUTO:
            return reasoning_parser(self._reasoning, "")
        try:
            return reasoning_parser(AUTO, self._tokenizer.chat_template())
        except RequestError:
            return None

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))


@lru_cache(maxsize=32)
def _warn_of_tools(template: str, has_parser: bool) -> None:
    """Log a warning if tools have no effect with a template; once for each template."""
    if "tools" not in template:
        logger.warning(
            "the chat template does not read tools, so the model does not see them: pass a "
            "chat_template that does"
        )
    elif not has_parser:
        logger.warning(
            "the chat template shows no known format of tool calls, so they stay part of the text: "
            "set the option tool_parser (--tool-parser)"
        )


def _structural_tag(elements: list[Format]) -> Format:
    return {"type": "structural_tag", "format": {"type": "sequence", "elements": elements}}


def _offered(tools: Tools, tool_choice: ToolChoice) -> Tools:
    """The tools that may be called."""
    match tool_choice:
        case None | "auto":
            return tools
        case "none":
            return ()
        case "required":
            wanted = None
        case {"type": "function", "function": {"name": str(wanted)}}:
            pass
        case _:
            raise RequestError(
                "tool_choice must be 'auto', 'none', 'required' or {'type': 'function', "
                f"'function': {{'name': ...}}}}, got {tool_choice!r:.80}"
            )
    named = [tool for tool in tools if wanted is None or name_of(tool) == wanted]
    if not named or not all(map(name_of, named)):
        names = ", ".join(map(name_of, tools)) or "none"
        raise RequestError(
            f"tool_choice={tool_choice!r:.80} needs one of the tools, which have to be "
            f"{{'type': 'function', 'function': {{'name': ...}}}}; their names are: {names}"
        )
    return named
