"""Reads rows from parquet files and writes records to them, with pyarrow (extra `parquet`).

A parquet file is made of the journal of a job, when that is complete.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any

from shmllm.batch.journal import pieces_of, replacing
from shmllm.batch.rows import JsonObject, Row, RowReader, encode
from shmllm.batch.vectors import array_of, width_in
from shmllm.errors import RequestError
from shmllm.extras import install_command

ROWS_AT_ONCE = 1024
# A null in one of these columns means that the row does not have the field.
_OPTIONAL = (
    "id",
    "prompt",
    "messages",
    "prompt_token_ids",
    "cache_salt",
    "lora",
    "sampling_params",
)
# A null inside of these means the same.
_NESTED = ("messages", "sampling_params", "structured_outputs")


def require_pyarrow() -> None:
    """Raises RequestError if pyarrow is not installed."""
    _load("pyarrow.parquet")


class ParquetRows:
    """The rows of a parquet file, which is read in pieces.

    Args:
        path: the file.
        form: reads the rows.

    Raises:
        RequestError: pyarrow is not installed, or the file is not a parquet file.
    """

    is_file = True

    def __init__(self, path: str, form: RowReader) -> None:
        self.name = path
        self._form = form
        arrow = _load("pyarrow")
        try:
            self._file = _load("pyarrow.parquet").ParquetFile(path)
        except arrow.ArrowInvalid as error:
            raise RequestError(f"cannot read {path}: {error}") from error

    def __iter__(self) -> Iterator[Row]:
        line = 0
        for batch in self._file.iter_batches(batch_size=ROWS_AT_ONCE):
            for fields in batch.to_pylist():
                line += 1
                yield self._form.row(line, _present(fields))

    def count(self) -> tuple[int, int]:
        return self._file.metadata.num_rows, self._file.metadata.num_rows


def write_parquet(journal: str, path: str, vectors: str | None = None) -> None:
    """Converts records in JSON lines to a parquet file, which appears when it is complete.

    A column with values of several types becomes a column of texts; values that are not texts are
    written as JSON.

    Args:
        journal: the file of JSON lines.
        path: the parquet file to write.
        vectors: the column that holds encoded vectors; it becomes a column of lists of float32
            with a fixed size.
    """
    arrow, parquet = _load("pyarrow"), _load("pyarrow.parquet")
    kinds = _column_types(journal, arrow, vectors)
    texts = {name for name, kind in kinds.items() if kind == arrow.string()}
    if vectors in kinds:
        kinds[vectors] = arrow.list_(arrow.float32(), width_in(journal, vectors))
    schema = arrow.schema(list(kinds.items()))
    with replacing(path) as part, parquet.ParquetWriter(part, schema) as writer:
        for records in pieces_of(journal):
            rows = [_as_columns(record, texts, vectors) for record in records]
            writer.write_table(arrow.Table.from_pylist(rows, schema=schema))


def _load(name: str) -> Any:
    try:
        import_module("pyarrow")
        return import_module(name)
    except ImportError as error:
        raise RequestError(f"parquet files need pyarrow: {install_command('parquet')}") from error


def _present(fields: JsonObject) -> JsonObject:
    """The fields of a row without the nulls that stand for absent values."""
    present = {k: v for k, v in fields.items() if v is not None or k not in _OPTIONAL}
    for name in _NESTED:
        if name in present:
            present[name] = _without_nulls(present[name])
    return present


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value


def _column_types(journal: str, arrow: Any, vectors: str | None) -> dict[str, Any]:
    """The type of each column over all records of the journal; null for that of vectors."""
    kinds: dict[str, Any] = {}
    for records in pieces_of(journal):
        names = dict.fromkeys(name for record in records for name in record)
        for name in names:
            kind = kinds.setdefault(name, arrow.null())
            if name != vectors:
                found = _type_of([record.get(name) for record in records], arrow)
                kinds[name] = _common(kind, found, arrow)
    return {
        name: kind if name == vectors or _is_storable(kind, arrow) else arrow.string()
        for name, kind in kinds.items()
    }


def _is_storable(kind: Any, arrow: Any) -> bool:
    """Whether parquet can store the type: not structs without fields, and not columns of nulls.

    Some readers fail on columns that hold only nulls.
    """
    if arrow.types.is_struct(kind):
        inner = [kind.field(i).type for i in range(kind.num_fields)]
        return bool(inner) and all(_is_storable(one, arrow) for one in inner)
    if arrow.types.is_list(kind):
        return arrow.types.is_null(kind.value_type) or _is_storable(kind.value_type, arrow)
    return not arrow.types.is_null(kind)


def _type_of(values: list[Any], arrow: Any) -> Any:
    try:
        return arrow.array(values).type
    except (arrow.ArrowInvalid, arrow.ArrowTypeError, OverflowError):
        return arrow.string()


def _common(one: Any, other: Any, arrow: Any) -> Any:
    """A type that can hold the values of both types."""
    if one == other:
        return one
    schemas = [arrow.schema([("", kind)]) for kind in (one, other)]
    try:
        return arrow.unify_schemas(schemas, promote_options="permissive").field(0).type
    except (arrow.ArrowInvalid, arrow.ArrowTypeError):
        return arrow.string()


def _as_columns(record: JsonObject, texts: set[str], vectors: str | None) -> JsonObject:
    found = {name: _as_text(value) if name in texts else value for name, value in record.items()}
    if vectors is not None and found.get(vectors) is not None:
        found[vectors] = array_of(found[vectors])
    return found


def _as_text(value: Any) -> Any:
    if value is None or isinstance(value, str):
        return value
    return encode(value).decode().rstrip("\n")
