"""The interface of IO processors, vLLM's: they make prompts of a program's data, and a result of
the outputs. This module must not know who runs the prompts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from typing import Any, Generic, TypeVar

from shmllm.params.pooling import PoolingParams
from shmllm.params.sampling import SamplingParams

Input = TypeVar("Input")
Output = TypeVar("Output")


class IOProcessor(ABC, Generic[Input, Output]):
    """Turns data into prompts, and their outputs into a result.

    Args:
        vllm_config: the engine's configuration, a `VllmConfigView`.
        renderer: has `get_tokenizer()`, which returns the model's transformers tokenizer.
    """

    def __init__(self, vllm_config: Any, renderer: Any) -> None:
        super().__init__()
        self.vllm_config = vllm_config
        self.renderer = renderer

    def parse_data(self, data: object) -> Input:
        """Check the value of "data" and convert it for `pre_process`."""
        raise NotImplementedError(f"{type(self).__name__} does not define parse_data")

    def merge_sampling_params(self, params: SamplingParams | None = None) -> SamplingParams:
        """The parameters for `generate`, from those that the caller gave."""
        return params or SamplingParams()

    def merge_pooling_params(self, params: PoolingParams | None = None) -> PoolingParams:
        """The parameters for `encode`, from those that the caller gave."""
        return params or PoolingParams()

    @abstractmethod
    def pre_process(self, prompt: Input, request_id: str | None = None, **kwargs: Any) -> Any:
        """Return one prompt or a list of prompts, in any form that `generate` takes."""

    async def pre_process_async(
        self, prompt: Input, request_id: str | None = None, **kwargs: Any
    ) -> Any:
        return self.pre_process(prompt, request_id, **kwargs)

    @abstractmethod
    def post_process(
        self, model_output: Sequence[Any], request_id: str | None = None, **kwargs: Any
    ) -> Output:
        """Return the result of the outputs, which have the order of the prompts."""

    async def post_process_async(
        self,
        model_output: AsyncGenerator[tuple[int, Any], None],
        request_id: str | None = None,
        **kwargs: Any,
    ) -> Output:
        pairs = [pair async for pair in model_output]
        outputs = [output for _, output in sorted(pairs, key=lambda pair: pair[0])]
        return self.post_process(outputs, request_id, **kwargs)
