"""Requests of {"data": ...}: an installed IO processor makes their prompts and their result.

This module finds and makes the processor, when the first such request comes, and calls it. It must
not know how prompts are run.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeGuard

from shmllm.config.info import EngineInfo
from shmllm.config.views import VllmConfigView
from shmllm.errors import EngineStartError, RequestError
from shmllm.formats.text_files import read_json_object
from shmllm.outputs.pooling import PoolingRequestOutput
from shmllm.plugins.entry_points import IO_PROCESSORS, load_plugins, vllm_names
from shmllm.plugins.io_processor import IOProcessor
from shmllm.plugins.qualified_names import in_one_line, load_object

DATA = "data"
PLUGIN_TASK = "plugin"


class Renderer:
    """What an IO processor gets of the front end.

    Args:
        get_tokenizer: returns the model's transformers tokenizer.
    """

    def __init__(self, get_tokenizer: Callable[[], Any]) -> None:
        self.get_tokenizer = get_tokenizer

    @property
    def tokenizer(self) -> Any:
        """The model's transformers tokenizer."""
        return self.get_tokenizer()


def is_data(prompts: object) -> TypeGuard[Mapping[str, Any]]:
    """Whether this is a request for an IO processor."""
    return isinstance(prompts, Mapping) and DATA in prompts


def make_io_processor(
    name: str | None,
    info: EngineInfo,
    model_defaults: Mapping[str, Any],
    get_tokenizer: Callable[[], Any],
) -> IOProcessor[Any, Any]:
    """Make an IO processor.

    Args:
        name: the plugin's name; None takes the one that the model's config.json names.
        info: what the engine reports.
        model_defaults: the sampling defaults of the model.
        get_tokenizer: for `Renderer`.

    Raises:
        EngineStartError: no plugin is named, it is not installed, or it cannot be made.
    """
    if name is None:
        path = Path(info.model_directory) / "config.json"
        name = read_json_object(path).get("io_processor_plugin") if path.is_file() else None
    if not isinstance(name, str):
        raise EngineStartError(
            'a prompt of {"data": ...} needs an IO processor: name one by io_processor_plugin'
        )
    plugins, problems = load_plugins(IO_PROCESSORS)
    if name not in plugins:
        found = "; ".join([f"installed are: {', '.join(plugins) or 'none'}", *problems])
        raise EngineStartError(f"io_processor_plugin {name!r} is not installed; {found}")
    with vllm_names():
        try:
            own = _class_of(plugins[name])
            processor = own(VllmConfigView.of(info, model_defaults), Renderer(get_tokenizer))
        except Exception as problem:
            raise EngineStartError(
                f"the IO processor {name} cannot be made: {in_one_line(problem)}"
            ) from problem
    if not isinstance(processor, IOProcessor):
        raise EngineStartError(f"the IO processor {name} is a {type(processor).__name__}")
    return processor


def prompts_of(processor: IOProcessor[Any, Any], request: Mapping[str, Any]) -> list[Any]:
    """Return the prompts of a request.

    Raises:
        RequestError: it has other keys than "data", or the processor refuses it.
    """
    data = _data_of(request)
    with _refusals_of(processor):
        return _as_list(processor.pre_process(processor.parse_data(data)))


async def prompts_of_async(
    processor: IOProcessor[Any, Any], request: Mapping[str, Any], request_id: str
) -> list[Any]:
    """Return the prompts of a request; raises as `prompts_of`."""
    data = _data_of(request)
    with _refusals_of(processor):
        parsed = processor.parse_data(data)
        return _as_list(await processor.pre_process_async(parsed, request_id=request_id))


def result_of(
    processor: IOProcessor[Any, Any], outputs: Sequence[Any]
) -> list[PoolingRequestOutput[Any]]:
    """Return a list of one output, whose `outputs` is what the processor makes of the outputs."""
    return [_output("", processor.post_process(outputs))]


async def result_of_async(
    processor: IOProcessor[Any, Any],
    outputs: AsyncGenerator[tuple[int, Any], None],
    request_id: str,
) -> PoolingRequestOutput[Any]:
    """Return one output, whose `outputs` is what the processor makes of the outputs.

    Args:
        processor: made the prompts.
        outputs: the last output of each prompt, behind the index of the prompt.
        request_id: the id in the output.
    """
    return _output(request_id, await processor.post_process_async(outputs, request_id=request_id))


def _data_of(request: Mapping[str, Any]) -> Any:
    if list(request) != [DATA] or request[DATA] is None:
        raise RequestError(f'an IO processor takes {{"data": ...}} alone, got {list(request)}')
    return request[DATA]


@contextmanager
def _refusals_of(processor: IOProcessor[Any, Any]) -> Iterator[None]:
    """Turn what the processor raises for wrong data into a RequestError."""
    try:
        yield
    except Exception as problem:
        raise RequestError(
            f"the IO processor {type(processor).__name__} refuses the data: {in_one_line(problem)}"
        ) from problem


def _as_list(prompts: Any) -> list[Any]:
    """A list of the prompts that a processor returned, one or several."""
    is_one = isinstance(prompts, str | Mapping) or not isinstance(prompts, Sequence)
    is_tokens = not is_one and bool(prompts) and isinstance(prompts[0], int)
    return [prompts] if is_one or is_tokens else list(prompts)


def _output(request_id: str, result: Any) -> PoolingRequestOutput[Any]:
    num_cached = getattr(result, "num_cached_tokens", 0)
    return PoolingRequestOutput(request_id, result, [], num_cached)


def _class_of(found: Any) -> Any:
    """Return a plugin's class: the plugin is the class, or a function that returns its name."""
    if isinstance(found, type):
        return found
    named = found()
    return load_object(named) if isinstance(named, str) else named
