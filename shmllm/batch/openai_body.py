"""What the `body` of an OpenAI request asks for, in our terms.

Owns the names that its two endpoints take. What would change the answer and cannot be done
is an error; what only concerns OpenAI's service is read past.
"""

from __future__ import annotations

import difflib
from typing import Any

from shmllm.batch.rows import JsonObject
from shmllm.errors import RequestError

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
    # not OpenAI's, but taken by servers of its protocol
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
}
_TEMPLATE = {"tools", "chat_template", "continue_final_message", "add_generation_prompt"}
_NO_MATTER = {
    "model",
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "parallel_tool_calls",
    "stream_options",
    "reasoning_effort",
    "verbosity",
}
# Fine with one value only, which is what they do without being given.
_FIXED: dict[str, Any] = {"stream": False, "suffix": "", "best_of": 1}
_COMMON = _SAME | _NO_MATTER | _FIXED.keys() | {"max_tokens", "response_format", "logprobs"}
_CHAT = (
    _COMMON
    | _TEMPLATE
    | {
        "messages",
        "max_completion_tokens",
        "top_logprobs",
        "tool_choice",
        "chat_template_kwargs",
    }
)
_COMPLETION = _COMMON | {"prompt", "echo", "cache_salt"}


def read_chat(body: JsonObject) -> Request:
    """A body for /v1/chat/completions, less what is null.

    Raises:
        RequestError: names the field.
    """
    _check_names(body, _CHAT)
    if not isinstance(body.get("messages"), list):
        raise RequestError("'messages' must be a list")
    sampling = _sampling(body)
    if "max_completion_tokens" in body:
        sampling["max_tokens"] = body["max_completion_tokens"]
    if body.get("logprobs"):
        sampling["logprobs"] = body.get("top_logprobs", 0)
    elif "top_logprobs" in body:
        raise RequestError("'top_logprobs' needs 'logprobs' to be true")
    return body["messages"], sampling, _template(body)


def read_completion(body: JsonObject) -> Request:
    """A body for /v1/completions, less what is null.

    Raises:
        RequestError: names the field.
    """
    _check_names(body, _COMPLETION)
    sampling = _sampling(body)
    if "logprobs" in body:
        sampling["logprobs"] = body["logprobs"]
    if body.get("echo") and "logprobs" in body:
        raise RequestError("'echo' does not go with 'logprobs'")
    prompt = _single(body.get("prompt"))
    key = "prompt" if isinstance(prompt, str) else "prompt_token_ids"
    salt = {"cache_salt": body["cache_salt"]} if "cache_salt" in body else {}
    return {key: prompt, **salt}, sampling, {}


def _single(prompt: object) -> object:
    """One prompt, which may stand in a list."""
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list) and prompt:
        if not isinstance(prompt[0], str | list):
            return prompt
        if len(prompt) == 1:
            return prompt[0]
        raise RequestError(f"'prompt' holds {len(prompt)} prompts; give each a line of its own")
    raise RequestError("'prompt' must be a string or a list of token ids")


def _check_names(body: JsonObject, known: set[str]) -> None:
    for name, value in body.items():
        if name not in known:
            (near,) = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.0)
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
            raise RequestError("'response_format' and 'structured_outputs' are both there")
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
    raise RequestError(
        "'response_format' must be {'type': 'text'}, {'type': 'json_object'} or "
        "{'type': 'json_schema', 'json_schema': {'schema': {...}}}"
    )


def _template(body: JsonObject) -> JsonObject:
    options = {name: body[name] for name in _TEMPLATE if name in body}
    choice = body.get("tool_choice", "auto")
    if choice not in ("auto", "none"):
        raise RequestError(f"'tool_choice' must be 'auto' or 'none', got {choice!r}")
    if choice == "none":
        options.pop("tools", None)
    if options.get("continue_final_message"):
        options.setdefault("add_generation_prompt", False)
    more = body.get("chat_template_kwargs", {})
    if not isinstance(more, dict):
        raise RequestError("'chat_template_kwargs' must be an object")
    if "messages" in more:
        raise RequestError("'chat_template_kwargs' cannot have 'messages'")
    return options | more
