"""Parameters of requests: sampling, structured outputs, pooling and beam search.

Importing this package imports neither torch nor numpy.
"""

from shmllm.params.beam_search import BeamSearchParams
from shmllm.params.late_pooling import LateChunkingParams, LateInteractionParams
from shmllm.params.lora import LoRARequest
from shmllm.params.pooler_config import PoolerConfig
from shmllm.params.pooling import PoolingParams
from shmllm.params.sampling import RepetitionDetectionParams, RequestOutputKind, SamplingParams
from shmllm.params.structured_outputs import StructuredOutputsParams

__all__ = [
    "BeamSearchParams",
    "LateChunkingParams",
    "LateInteractionParams",
    "LoRARequest",
    "PoolerConfig",
    "PoolingParams",
    "RepetitionDetectionParams",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
]
