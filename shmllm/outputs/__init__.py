"""Results of requests: completions, log-probabilities, vectors, beams and sleep reports.

Importing this package imports numpy, but neither torch nor transformers.
"""

from shmllm.outputs.beam_search import BeamSearchOutput, BeamSearchSequence
from shmllm.outputs.logprobs import Logprob
from shmllm.outputs.pooling import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    LateChunk,
    LateChunkingMetadata,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from shmllm.outputs.request import (
    CompletionOutput,
    RequestMetrics,
    RequestOutput,
    WeightVersionSpan,
)
from shmllm.outputs.sampling_masks import SamplingMask
from shmllm.outputs.sleep_report import OwnedBytes, SleepReport

__all__ = [
    "BeamSearchOutput",
    "BeamSearchSequence",
    "ClassificationOutput",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "LateChunk",
    "LateChunkingMetadata",
    "Logprob",
    "OwnedBytes",
    "PoolingOutput",
    "PoolingRequestOutput",
    "RequestMetrics",
    "RequestOutput",
    "SamplingMask",
    "ScoringOutput",
    "ScoringRequestOutput",
    "SleepReport",
    "WeightVersionSpan",
]
