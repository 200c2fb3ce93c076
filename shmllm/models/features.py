"""What a model may need that a device, or a way of loading, does not have.

Each has a set of features that it lacks, and refuses a model that uses one before it loads the
weights. This module must not import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from enum import Enum

from shmllm.errors import EngineStartError
from shmllm.models.config import ModelConfig
from shmllm.models.widths import chosen_of


class Feature(Enum):
    """A feature, with its name in messages."""

    LAYER_QK_NORM = "LayerNorm of all queries or keys side by side"
    TRANSPOSED = "matrices that checkpoints store transposed"
    DIVIDED_ENCODER = "an encoder-decoder in several processes"
    INDEXER = "keys of an indexer"
    COMPRESSED = "attention to entries that stand for several tokens"


_USES: dict[Feature, Callable[[ModelConfig], bool]] = {
    Feature.LAYER_QK_NORM: lambda model: (
        model.norm.kind == "layer" and any(each.qk_norm == "row" for each in model.attentions)
    ),
    Feature.TRANSPOSED: lambda model: model.transposed,
    Feature.INDEXER: lambda model: chosen_of(model) is not None,
    Feature.COMPRESSED: lambda model: bool(model.compressed_attentions),
    Feature.DIVIDED_ENCODER: lambda model: model.num_encoded > 0 and model.is_divided,
}


def features_of(config: ModelConfig) -> list[Feature]:
    """Returns the features that a model uses, in the order of `Feature`."""
    return [feature for feature in Feature if _USES[feature](config)]


def check_features(config: ModelConfig, device: str, unsupported: Collection[Feature]) -> None:
    """Raises EngineStartError if a model uses a feature that a device cannot compute.

    Args:
        config: the model's configuration.
        device: who computes: "the CPU", "the GPU" or a kind of quantization.
        unsupported: what it cannot compute.
    """
    lacking = [feature.value for feature in features_of(config) if feature in unsupported]
    if lacking:
        raise EngineStartError(
            f"{config.architecture} needs what {device} cannot compute yet: {'; '.join(lacking)}"
        )
