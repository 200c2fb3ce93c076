"""The options of a conversation together with `chat_template_kwargs`, the further variables that a
caller gives a chat template."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shmllm.errors import RequestError

NAME = "chat_template_kwargs"


def chat_options(
    add_generation_prompt: bool,
    continue_final_message: bool,
    chat_template: str | None,
    tools: object,
    tool_choice: object,
    given: object,
) -> dict[str, Any]:
    """Returns the options of a conversation from the arguments of `LLM.chat`; ``given`` is its
    `chat_template_kwargs`."""
    options = {
        "add_generation_prompt": add_generation_prompt and not continue_final_message,
        "continue_final_message": continue_final_message,
        "chat_template": chat_template,
        "tools": tools,
        "tool_choice": tool_choice,
    }
    return with_template_kwargs(options, given)


def with_template_kwargs(options: Mapping[str, Any], given: object) -> dict[str, Any]:
    """Returns options with `chat_template_kwargs`, which have precedence, as in vLLM.

    Args:
        options: the options of a conversation, by name.
        given: the value of `chat_template_kwargs`: None, or variables by name.

    Raises:
        RequestError: it is no mapping of names, or names the conversation.
    """
    if given is None:
        return dict(options)
    if not isinstance(given, Mapping):
        raise RequestError(f"{NAME} must be a dict, got {type(given).__name__}")
    for name in given:
        if not isinstance(name, str):
            raise RequestError(f"a name in {NAME} must be a str, got {name!r}")
    if "messages" in given:
        raise RequestError(f"{NAME} cannot have 'messages', which are the conversation")
    return {**options, **given}
