"""Towers of one encoder with a projection of what it gives: the values that decide what they
compute."""

from __future__ import annotations

from dataclasses import dataclass

from shmllm.models.vision.encoder_spec import EncoderSpec, VisionActivation


@dataclass(frozen=True, slots=True, kw_only=True)
class JanusTower:
    """An encoder, and projections with activations between them.

    Attributes:
        encoder: the encoder.
        depth: the number of projections.
        activation: the activation.
    """

    encoder: EncoderSpec
    depth: int
    activation: VisionActivation

    @property
    def num_elements(self) -> int:
        return self.encoder.num_elements


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepseekVLTower(JanusTower):
    """The same, with other names in checkpoints."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Idefics3Tower:
    """An encoder, and a projection of squares of its results.

    Attributes:
        encoder: the encoder.
        factor: the side of a square.
        projection: the name of the projection's weight in checkpoints.
    """

    encoder: EncoderSpec
    factor: int
    projection: str = "connector.modality_projection.proj"

    @property
    def num_elements(self) -> int:
        return self.encoder.num_elements


@dataclass(frozen=True, slots=True, kw_only=True)
class GraniteDoclingTower(Idefics3Tower):
    """Squares have positions and norms, and inner layers give levels of embeddings, too.

    Attributes:
        level_layers: the layers that give levels, from 0, in ascending order.
    """

    level_layers: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class InternVLTower:
    """An encoder whose layers scale what they add, and projections of squares of its results.

    Attributes:
        encoder: the encoder, with the layers that are computed.
        num_stored: how many layers a checkpoint has of it.
        rms_norms: whether the norms of its layers are RMSNorms; otherwise LayerNorms.
        qk_norm: whether queries and keys are normalised, all heads together.
        attention_bias: whether the projections to queries, keys and values have biases.
        factor: the side of a square.
        activation: the activation between the projections.
        is_published: whether checkpoints have the names that the authors give to weights, with the
            projections to queries, keys and values in one tensor, and not those of transformers.
        has_modules: whether transformers has modules for these checkpoints, with names of its own.
    """

    encoder: EncoderSpec
    num_stored: int
    rms_norms: bool
    qk_norm: bool
    attention_bias: bool
    factor: int
    activation: VisionActivation
    is_published: bool = False
    has_modules: bool = False

    @property
    def num_elements(self) -> int:
        return self.encoder.num_elements


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama4Tower:
    """An encoder that rotates by rows and columns, and projections of squares of its results.

    Attributes:
        encoder: the encoder.
        theta: the base of the wavelengths of the rotations.
        factor: the side of a square.
        adapted: the width of the outputs of the first two projections.
    """

    encoder: EncoderSpec
    theta: float
    factor: int
    adapted: int

    @property
    def num_elements(self) -> int:
        of_adapter = self.factor**2 * self.encoder.hidden_size + self.adapted
        return self.encoder.num_elements + self.adapted * of_adapter


@dataclass(frozen=True, slots=True, kw_only=True)
class AyaVisionTower:
    """An encoder, and projections of squares of its results with a gate.

    Attributes:
        encoder: the encoder, with the layers that are computed.
        num_stored: how many layers a checkpoint has of it.
        factor: the side of a square.
        norm_eps: of a norm of squares before the projections; None: there is none.
        inner: the width of the gate, and of what it multiplies.
    """

    encoder: EncoderSpec
    num_stored: int
    factor: int
    norm_eps: float | None
    inner: int

    @property
    def num_elements(self) -> int:
        of_squares = 2 * self.factor**2 * self.encoder.hidden_size
        return self.encoder.num_elements + self.inner * of_squares


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma3Tower:
    """An encoder, means of squares of its results, a norm and a projection.

    Attributes:
        encoder: the encoder.
        size: the side of a square, in patches; a rest at the right and at the bottom is left out.
    """

    encoder: EncoderSpec
    size: int

    @property
    def num_elements(self) -> int:
        return self.encoder.num_elements


@dataclass(frozen=True, slots=True, kw_only=True)
class PaliGemmaTower:
    """An encoder and a projection."""

    encoder: EncoderSpec

    @property
    def num_elements(self) -> int:
        return self.encoder.num_elements
