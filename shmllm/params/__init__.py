"""Parameters of requests: sampling, structured outputs, pooling and beam search.

Importing this package imports neither torch nor numpy.
"""

from shmllm.params.beam_search import BeamSearchParams
from shmllm.params.lora import LoRARequest
from shmllm.params.pooling import PoolerConfig, PoolingParams
from shmllm.params.sampling import RepetitionDetectionParams, RequestOutputKind, SamplingParams
from shmllm.params.structured_outputs import StructuredOutputsParams

__all__ = [
    "BeamSearchParams",
    "LoRARequest",
    "PoolerConfig",
    "PoolingParams",
    "RepetitionDetectionParams",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
]
