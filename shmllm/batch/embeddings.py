"""Rows of texts, and records of their embeddings.

A row holds `text` or `prompt`, and perhaps `images`, and a record holds `embedding`. The other
fields are copied.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from shmllm.batch.rows import JsonObject, Row, carried, check_item_names, parse_json, shown
from shmllm.batch.vectors import encoded, width_of
from shmllm.errors import RequestError

if TYPE_CHECKING:
    from shmllm.outputs.pooling import EmbeddingRequestOutput

EMBEDDING = "embedding"
IMAGES = "images"
_CONTENT = ("text", "prompt")
_SPARSE = {"indices", "values"}
_RESULTS = {"line", *_CONTENT, EMBEDDING, "error", "num_prompt_tokens"}


def parse_text(line: bytes) -> JsonObject:
    """Parses a line of JSON, a row or only its text.

    Raises:
        RequestError: it is neither an object nor a string.
    """
    found = parse_json(line)
    if isinstance(found, str):
        return {_CONTENT[0]: found}
    if not isinstance(found, dict):
        raise RequestError("not a JSON string or object")
    return found


class TextFormat:
    """Reads rows that hold a text.

    Args:
        results: the names that records have for results.
        takes_images: whether a row may list images beside its text, or instead of one.
    """

    def __init__(self, results: set[str], *, takes_images: bool = False) -> None:
        self._results = results
        self._images = (IMAGES,) if takes_images else ()

    def row(self, line: int, fields: Mapping[str, Any]) -> Row:
        row = Row(line)
        row.identity = {"id": fields["id"]} if "id" in fields else {}
        row.carried = carried(fields, {"id", *_CONTENT, *self._images}, self._results)
        try:
            for name in self._images:
                given = fields.get(name)
                if names := check_item_names(name, [] if given is None else given):
                    row.items = {"image": names}
            row.prompt = _text_in(fields, is_optional=bool(row.items))
        except RequestError as error:
            row.error = str(error)
        return row

    def text_row(self, line: int, index: int, text: str) -> Row:
        """The row of a plain line, which is the text; its record holds the text and `index`."""
        return Row(line, text, carried={"index": index, "text": text})


class EmbeddingFormat(TextFormat):
    """Reads rows and makes records of embeddings.

    Args:
        is_journal: whether the embeddings are encoded, instead of lists of numbers.

    Attributes:
        is_sparse: whether records have the indices and values of numbers that are not 0 instead.
    """

    def __init__(self, *, is_journal: bool = False) -> None:
        super().__init__(_RESULTS, takes_images=True)
        self._is_journal = is_journal
        self.is_sparse = False
        self._width: int | None = None

    def record(self, row: Row, output: EmbeddingRequestOutput) -> JsonObject:
        """Makes the record of a row's embedding.

        Raises:
            RequestError: the records of an earlier run have embeddings of another width.
        """
        vector = output.outputs.array
        self._check_width(len(vector))
        record = row.identity | {"line": row.line}
        if self.is_sparse:
            sparse = output.outputs.sparse
            record[EMBEDDING] = {"indices": [*sparse], "values": [*sparse.values()]}
        else:
            record[EMBEDDING] = encoded(vector) if self._is_journal else vector.tolist()
        record["num_prompt_tokens"] = len(output.prompt_token_ids)
        return record | row.carried

    def failure(self, row: Row, message: str) -> JsonObject:
        return row.identity | {"line": row.line, "error": message} | row.carried

    def line_of(self, record: JsonObject) -> int | None:
        line, vector = record.get("line"), record.get(EMBEDDING)
        if not isinstance(line, int) or line < 1:
            return None
        if isinstance(vector, dict) and vector.keys() == _SPARSE:
            return line
        if not isinstance(vector, str if self._is_journal else list):
            return line if "error" in record else None
        self._check_width(width_of(vector))
        return line

    def is_failure(self, record: JsonObject) -> bool:
        return "error" in record

    def tag_of_row(self, row: Row) -> JsonObject:
        return self.tag_of_record(row.identity | row.carried)

    def tag_of_record(self, record: JsonObject) -> JsonObject:
        return {name: value for name, value in record.items() if name not in _RESULTS}

    def _check_width(self, width: int) -> None:
        self._width = self._width or width
        if width != self._width:
            raise RequestError(
                f"cannot resume: embeddings of the earlier run have {self._width:,} numbers, those "
                f"of this model and these options {width:,}; --overwrite begins anew"
            )


class ImageFormat(EmbeddingFormat):
    """Makes records of images that a command names, each of which is a row.

    Args:
        text: what stands beside each image.
        is_journal: see `EmbeddingFormat`.
    """

    def __init__(self, text: str, *, is_journal: bool = False) -> None:
        super().__init__(is_journal=is_journal)
        self._text = text

    def text_row(self, line: int, index: int, text: str) -> Row:
        """The row of an image, whose path is the text; its record holds the path and `index`."""
        return Row(line, self._text, {"image": [text]}, carried={"index": index, "image": text})


def _text_in(fields: Mapping[str, Any], *, is_optional: bool) -> str:
    given = [name for name in _CONTENT if name in fields]
    if not given and is_optional:
        return ""
    if not given:
        raise RequestError("none of 'text', 'prompt' is given")
    if len(given) > 1:
        raise RequestError("'text' and 'prompt' are both given; give one")
    text = fields[given[0]]
    if not isinstance(text, str):
        raise RequestError(f"{given[0]!r} must be a string, got {shown(text)}")
    return text
