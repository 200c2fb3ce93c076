"""shmllm's own batch format.

A row holds `prompt`, `messages` or `prompt_token_ids`, and perhaps `images`, `audio` and `videos`,
or the `decoder_prompt` of an encoder-decoder, and a record holds `text`. A field with the name of a
sampling parameter is one, as in the requests of vLLM's and OpenAI's servers.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Mapping
from typing import Any

from shmllm.batch.parameters import SAMPLING_FIELDS
from shmllm.batch.rows import JsonObject, Messages, Row, carried, check_item_names, shown
from shmllm.errors import RequestError
from shmllm.outputs.request import CompletionOutput, RequestOutput
from shmllm.params.items import Modality

ITEM_FIELDS: dict[str, Modality] = {"images": "image", "audio": "audio", "videos": "video"}
"""Lists of items of `prompt`, and their modalities."""
INPUT_FIELDS = {
    "id",
    "prompt",
    "messages",
    "prompt_token_ids",
    "decoder_prompt",
    *ITEM_FIELDS,
    "cache_salt",
    "lora",
    "sampling_params",
}
RESULT_FIELDS = {
    "line",
    "prompt",
    "text",
    "error",
    "finish_reason",
    "num_prompt_tokens",
    "num_output_tokens",
    "num_cached_tokens",
    "token_ids",
    "logprobs",
    "prompt_logprobs",
    "prompt_token_id_logprobs",
    "routed_experts",
    "sampling_mask",
    "outputs",
}
_OTHER_NAMES = {
    "best_of": "n",
    "guided_choice": "structured_outputs",
    "guided_grammar": "structured_outputs",
    "guided_json": "structured_outputs",
    "guided_regex": "structured_outputs",
    "max_completion_tokens": "max_tokens",
    "max_new_tokens": "max_tokens",
    "response_format": "structured_outputs",
    "stop_sequences": "stop",
    "top_logprobs": "logprobs",
}
"""Names that sampling parameters have elsewhere. To carry them would be to ignore them."""
_ITEM_NAMES = ("multi_modal_data", "multi_modal_uuids", "mm_processor_kwargs")
"""Names that items have in prompts of Python, likewise."""
_OBJECTS = ("logit_bias", "repetition_detection", "structured_outputs")
_CONTENT: dict[str, type] = {"prompt": str, "messages": list, "prompt_token_ids": list}
_KINDS: dict[type, str] = {str: "a string", list: "a list", dict: "an object"}


class NativeFormat:
    """Reads rows and makes records in shmllm's own format.

    Args:
        echo: whether records hold the prompt's text.
        token_ids: whether records hold the output's token ids.
        chat: whether a prompt is the user's message of a chat.
        system: the system message before each conversation; implies `chat`.
        decoder_prompt: what the decoder of an encoder-decoder begins with, unless a row says so.
        texts_are_json: whether a list or an object may be given as JSON text, as in a column of a
            table.
    """

    def __init__(
        self,
        *,
        echo: bool = False,
        token_ids: bool = False,
        chat: bool = False,
        system: str | None = None,
        decoder_prompt: str | None = None,
        texts_are_json: bool = False,
    ) -> None:
        self._echo = echo
        self._token_ids = token_ids
        self._chat = chat or system is not None
        self._opening: Messages = [] if system is None else [{"role": "system", "content": system}]
        self._decoder_prompt = decoder_prompt
        self._texts_are_json = texts_are_json

    def row(self, line: int, fields: Mapping[str, Any]) -> Row:
        row = Row(line)
        row.identity = {"id": fields["id"]} if "id" in fields else {}
        parameters = {name for name, value in fields.items() if _is_sampling(name, value)}
        row.carried = carried(fields, INPUT_FIELDS | parameters, RESULT_FIELDS)
        try:
            row.prompt = self._prompt(fields)
            row.items = self._items(fields)
            row.sampling = self._sampling(fields)
            if "lora" in fields:
                row.lora = "" if fields["lora"] is None else self._typed(fields, "lora", str)
        except RequestError as error:
            row.error = str(error)
        return row

    def text_row(self, line: int, index: int, text: str) -> Row:
        """The row of a plain line, which is the prompt; its record holds the prompt and `index`."""
        row = Row(line, carried={"index": index, "prompt": text})
        row.prompt = self._as_chat(with_decoder_prompt(text, self._decoder_prompt))
        return row

    def record(self, row: Row, output: RequestOutput) -> JsonObject:
        first = output.outputs[0]
        record = row.identity | {"line": row.line}
        if self._echo:
            record["prompt"] = prompt_text(output)
        record["text"] = first.text
        record["finish_reason"] = first.finish_reason
        record["num_prompt_tokens"] = len(output.prompt_token_ids)
        record["num_output_tokens"] = sum(len(one.token_ids) for one in output.outputs)
        record["num_cached_tokens"] = output.num_cached_tokens
        record |= self._details(first)
        if output.prompt_logprobs is not None:
            record["prompt_logprobs"] = [entries(one) for one in output.prompt_logprobs]
        if output.prompt_token_id_logprobs is not None:
            record["prompt_token_id_logprobs"] = _as_base64(output.prompt_token_id_logprobs)
        if len(output.outputs) > 1:
            record["outputs"] = [self._completion(one) for one in output.outputs]
        return record | row.carried

    def failure(self, row: Row, message: str) -> JsonObject:
        return row.identity | {"line": row.line, "error": message} | row.carried

    def line_of(self, record: JsonObject) -> int | None:
        line = record.get("line")
        is_ours = "text" in record or "error" in record
        return line if is_ours and isinstance(line, int) and line > 0 else None

    def is_failure(self, record: JsonObject) -> bool:
        return "error" in record

    def tag_of_row(self, row: Row) -> JsonObject:
        return self.tag_of_record(row.identity | row.carried)

    def tag_of_record(self, record: JsonObject) -> JsonObject:
        return {name: value for name, value in record.items() if name not in RESULT_FIELDS}

    def _prompt(self, fields: Mapping[str, Any]) -> Any:
        given = [name for name in _CONTENT if name in fields]
        if not given:
            raise RequestError("none of 'prompt', 'messages', 'prompt_token_ids' is given")
        of_decoder = self._decoder_prompt
        if fields.get("decoder_prompt") is not None:
            of_decoder = self._typed(fields, "decoder_prompt", str)
            given.append("decoder_prompt")
        if "messages" in given and len(given) > 1:
            raise RequestError(f"{given[0]!r} and {given[1]!r} are both given; give one")
        values = {
            name: self._typed(fields, name, _CONTENT[name]) for name in given if name in _CONTENT
        }
        if "cache_salt" in fields:
            values["cache_salt"] = fields["cache_salt"]
        if "messages" in values:
            if "cache_salt" in values:
                raise RequestError("'cache_salt' cannot be used with 'messages'")
            return [*self._opening, *values["messages"]]
        content = values["prompt"] if list(values) == ["prompt"] else values
        return self._as_chat(with_decoder_prompt(content, of_decoder))

    def _items(self, fields: Mapping[str, Any]) -> dict[Modality, list[str]]:
        """The items that a row names beside its prompt."""
        for name in _ITEM_NAMES:
            if fields.get(name) is not None:
                raise RequestError(
                    f"{name!r} is not read from rows: the lists {', '.join(ITEM_FIELDS)} name "
                    "items, and --mm-processor-kwargs says how they are prepared"
                )
        found: dict[Modality, list[str]] = {}
        for field, modality in ITEM_FIELDS.items():
            given = fields.get(field) is not None
            names = check_item_names(field, self._typed(fields, field, list) if given else [])
            if names and "messages" in fields:
                raise RequestError(
                    f"{field!r} cannot be used with 'messages', whose parts name {field}"
                )
            if names:
                found[modality] = names
        return found

    def _sampling(self, fields: Mapping[str, Any]) -> JsonObject:
        """The sampling parameters, in `sampling_params` or beside it; null there is no value."""
        sampling: JsonObject = dict(self._typed(fields, "sampling_params", dict, {}))
        for name, value in fields.items():
            if name in _OTHER_NAMES and value is not None:
                raise RequestError(f"{name!r} is {_OTHER_NAMES[name]!r} here")
            if not _is_sampling(name, value) or value is None:
                continue
            if name in sampling:
                raise RequestError(f"{name!r} is also in 'sampling_params'; give one")
            is_object = self._texts_are_json and name in _OBJECTS
            sampling[name] = self._typed(fields, name, dict) if is_object else value
        return sampling

    def _as_chat(self, prompt: Any) -> Any:
        if not self._chat:
            return prompt
        if isinstance(prompt, dict):
            raise RequestError(
                "token ids, cache_salt and decoder_prompt cannot be used with chat messages"
            )
        return [*self._opening, {"role": "user", "content": prompt}]

    def _typed(
        self, fields: Mapping[str, Any], name: str, kind: type, default: object = None
    ) -> Any:
        value = fields.get(name, default)
        if self._texts_are_json and kind is not str and isinstance(value, str):
            try:
                value = json.loads(value)
            except ValueError as error:
                raise RequestError(f"{name!r} is not JSON: {error}") from error
        if not isinstance(value, kind):
            raise RequestError(f"{name!r} must be {_KINDS[kind]}, got {shown(value)}")
        return value

    def _details(self, completion: CompletionOutput) -> JsonObject:
        found: JsonObject = {}
        if self._token_ids:
            found["token_ids"] = list(completion.token_ids)
        if completion.logprobs is not None:
            found["logprobs"] = [entries(position) for position in completion.logprobs]
        if completion.routed_experts is not None:
            found["routed_experts"] = _as_base64(completion.routed_experts)
        if completion.sampling_mask is not None:
            found["sampling_mask"] = completion.sampling_mask.token_ids
        return found

    def _completion(self, completion: CompletionOutput) -> JsonObject:
        return {
            "text": completion.text,
            "finish_reason": completion.finish_reason,
            "num_output_tokens": len(completion.token_ids),
            **self._details(completion),
        }


def with_decoder_prompt(prompt: Any, text: str | None) -> Any:
    """A prompt whose text the encoder of an encoder-decoder reads, with one for its decoder; None:
    the model says what the decoder begins with."""
    return prompt if text is None else {"encoder_prompt": prompt, "decoder_prompt": text}


def prompt_text(output: RequestOutput) -> str | None:
    """The text that a prompt had, of the encoder if it reads text."""
    reads_text = output.encoder_prompt_token_ids is not None
    return output.encoder_prompt if reads_text else output.prompt


def _is_sampling(name: str, value: object) -> bool:
    """Whether a field is a sampling parameter. Lists of log-probabilities are results of an
    earlier job."""
    return name in SAMPLING_FIELDS and not (name in RESULT_FIELDS and isinstance(value, list))


def _as_base64(array: Any) -> str:
    """A numpy array as the text that vLLM's server writes: the base64 of an .npy file."""
    import numpy as np

    file = io.BytesIO()
    np.save(file, array)
    return base64.b64encode(file.getvalue()).decode()


def entries(position: Mapping[int, Any] | None) -> list[JsonObject] | None:
    """The logprobs of one position, with the sampled token first.

    Args:
        position: logprobs by token id; None for a prompt's first token.

    Returns:
        One object per token; None if `position` is None.
    """
    if position is None:
        return None
    return [
        {
            "token_id": int(token_id),
            "token": one.decoded_token,
            "logprob": float(one.logprob),
            "rank": None if one.rank is None else int(one.rank),
        }
        for token_id, one in position.items()
    ]
