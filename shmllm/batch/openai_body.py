"""Translates the `body` of an OpenAI request into a prompt, sampling and template parameters.

This module owns the field names of the two endpoints. A field that would change the answer and is
not supported is an error. Fields that only concern OpenAI's service are ignored.
"""

from __future__ import annotations

from typing import Any

from shmllm.batch.rows import JsonObject, shown
from shmllm.errors import RequestError, nearest
from shmllm.params.template_kwargs import with_template_kwargs

# (prompt, sampling parameters, options of the chat template)
Request = tuple[Any, JsonObject, JsonObject]

_SAME = {
    "temperature",
    "top_p",
    "n",
    "stop",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    # Servers of OpenAI's protocol take these; OpenAI does not.
    "top_k",
    "min_p",
    "repetition_penalty",
    "stop_token_ids",
    "bad_words",
    "ignore_eos",
    "min_tokens",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
    "structured_outputs",
    "allowed_token_ids",
    "thinking_token_budget",
}
_TEMPLATE = {
    "tools",
    "chat_template",
    "continue_final_message",
    "add_generation_prompt",
    "reasoning_effort",  # a variable of templates such as that of gpt-oss
}
_IGNORED = {
    "model",
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "stream_options",
}
# Fields that may only have their default value.
_FIXED: dict[str, Any] = {"stream": False, "suffix": "", "best_of": 1, "verbosity": "medium"}
_COMMON = _SAME | _IGNORED | _FIXED.keys() | {"max_tokens", "response_format", "logprobs"}
_CHAT = (
    _COMMON
    | _TEMPLATE
    | {
        "messages",
        "max_completion_tokens",
        "top_logprobs",
        "tool_choice",
        "parallel_tool_calls",
        "chat_template_kwargs",
    }
)
_COMPLETION = _COMMON | {"prompt", "echo", "cache_salt"}


def read_chat(body: JsonObject) -> Request:
    """Reads a body for /v1/chat/completions.

    Args:
        body: the body without fields that are null.

    Raises:
        RequestError: a field is unknown or invalid; the message names it.
    """
    _check_names(body, _CHAT)
    if not isinstance(body.get("messages"), list):
        raise RequestError("'messages' must be a list")
    _flag(body, "parallel_tool_calls")  # `openai` chooses from the calls of the reply
    sampling = _sampling(body)
    if "max_completion_tokens" in body:
        sampling["max_tokens"] = body["max_completion_tokens"]
    if _flag(body, "logprobs"):
        sampling["logprobs"] = body.get("top_logprobs", 0)
    elif "top_logprobs" in body:
        raise RequestError("'top_logprobs' needs 'logprobs' to be true")
    return body["messages"], sampling, _template(body)


def read_completion(body: JsonObject) -> Request:
    """Reads a body for /v1/completions.

    Args:
        body: the body without fields that are null.

    Raises:
        RequestError: a field is unknown or invalid; the message names it.
    """
    _check_names(body, _COMPLETION)
    sampling = _sampling(body)
    if "logprobs" in body:
        sampling["logprobs"] = body["logprobs"]
    prompt = _single(body.get("prompt"))
    key = "prompt" if isinstance(prompt, str) else "prompt_token_ids"
    if _flag(body, "echo"):
        if "logprobs" in body:
            raise RequestError("'echo' cannot be used with 'logprobs'")
        if key == "prompt_token_ids":
            raise RequestError("'echo' needs a prompt that is a string, got token ids")
    salt = {"cache_salt": body["cache_salt"]} if "cache_salt" in body else {}
    return {key: prompt, **salt}, sampling, {}


def _single(prompt: object) -> object:
    """The prompt itself, or the only item of a list of prompts."""
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list) and prompt:
        if not isinstance(prompt[0], str | list):
            return prompt
        if len(prompt) == 1:
            return prompt[0]
        raise RequestError(f"'prompt' holds {len(prompt)} prompts; write each on its own line")
    raise RequestError("'prompt' must be a string or a list of token ids")


def _flag(body: JsonObject, name: str) -> bool:
    value = body.get(name, False)
    if not isinstance(value, bool):
        raise RequestError(f"{name!r} must be true or false, got {shown(value)}")
    return value


def _check_names(body: JsonObject, known: set[str]) -> None:
    for name, value in body.items():
        if name not in known:
            near = nearest(name, sorted(known))
            raise RequestError(f"'body' has an unknown field {name!r}; the nearest is {near!r}")
        if name in _FIXED and value != _FIXED[name]:
            raise RequestError(f"{name!r} can only be {_FIXED[name]!r} in a batch, got {value!r}")


def _sampling(body: JsonObject) -> JsonObject:
    sampling = {name: body[name] for name in _SAME if name in body}
    if "max_tokens" in body:
        sampling["max_tokens"] = body["max_tokens"]
    constraint = _constraint(body.get("response_format"))
    if constraint is not None:
        if "structured_outputs" in sampling:
            raise RequestError("'response_format' and 'structured_outputs' are both given")
        sampling["structured_outputs"] = constraint
    return sampling


def _constraint(wanted: Any) -> JsonObject | None:
    match wanted:
        case None | {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return {"json_object": True}
        case {"type": "json_schema", "json_schema": {"schema": dict(schema)}}:
            return {"json": schema}
        case {"type": "structural_tag"}:
            return {"structural_tag": wanted}
    raise RequestError(
        "'response_format' must be {'type': 'text'}, {'type': 'json_object'}, "
        "{'type': 'json_schema', 'json_schema': {'schema': {...}}} or a structural tag"
    )


def _template(body: JsonObject) -> JsonObject:
    options = {name: body[name] for name in _TEMPLATE if name in body}
    if body.get("tool_choice") == "none":
        options.pop("tools", None)
    elif "tool_choice" in body:
        options["tool_choice"] = body["tool_choice"]
    if options.get("continue_final_message"):
        options.setdefault("add_generation_prompt", False)
    return with_template_kwargs(options, body.get("chat_template_kwargs"))
