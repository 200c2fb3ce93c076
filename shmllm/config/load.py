"""The options for loading a model: its files, dtypes, and what it is loaded for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

from shmllm.config.options import (
    DType,
    Flag,
    JsonObject,
    ModelLength,
    OneOf,
    Section,
    Whole,
    option,
)
from shmllm.config.quantization import ROUNDINGS, Quantization, Rounding

DTypeName = Literal["auto", "float32", "bfloat16", "float16"]
LoadFormat = Literal["auto", "safetensors", "dummy"]
ModelImpl = Literal["auto", "shmllm", "transformers"]
ActivationDType = Literal["auto", "float32", "bfloat16", "int16", "int8"]
RunnerName = Literal["auto", "generate", "pooling"]
Conversion = Literal["auto", "none", "embed", "classify"]
CpuInstructions = Literal["auto", "vectors", "tiles"]
DecodeKernel = Literal["auto", "launches", "persistent"]
KVCacheDType = Literal["auto", "float32", "bfloat16", "float16", "int8", "fp8", "fp8_e4m3"]


def with_only_text(overrides: dict[str, Any], language_model_only: object) -> dict[str, Any]:
    """The fields that take the place of those in config.json: without ``vision_config`` a model
    sees no images, without ``audio_config``, or Granite Speech's ``encoder_config``, it hears
    nothing."""
    without = dict.fromkeys(("vision_config", "audio_config", "encoder_config"))
    return {**overrides, **without} if language_model_only else overrides


@dataclass(frozen=True, slots=True)
class LoadConfig(Section):
    """The options for loading the model.

    Attributes:
        directory: the model's directory.
        tokenizer_directory: the directory of the tokenizer for which grammars are compiled; None
            means the model's directory.
        model_name: what people call the model, for display; "" if nobody said.
        further_layers: how many of the layers that a checkpoint may have behind the model's last
            one, each of which predicts one token further ahead, are loaded, too.
        kept_levels: behind how many layers the residual stream is kept for a model that drafts.
    """

    directory: str
    dtype: DTypeName = option(
        "auto",
        '"float32", "bfloat16" or "float16"; auto is the dtype of the checkpoint, but on a CPU '
        "float32 unless the checkpoint is in bfloat16 and the CPU multiplies that itself.",
        DType(get_args(DTypeName)),
    )
    load_format: LoadFormat = option(
        "auto",
        '"auto" and "safetensors" read the model\'s files, "dummy" makes random weights.',
        OneOf(get_args(LoadFormat)),
    )
    seed: int = option(
        0,
        "Seed of dummy weights, and of requests without a seed, but for those of a front end that "
        "attaches, which draws its own.",
        Whole(0, 2**63 - 1, words="a whole number from 0 to 2**63 - 1"),
        flag="",
    )
    max_model_len: int | None = option(
        None,
        "Most tokens of a prompt and its output together; smaller if the KV cache holds less.",
        ModelLength(),
        default_text="the model's",
    )
    tokenizer_directory: str | None = None
    quantization: Quantization | None = option(
        None,
        'What matrices are rounded to when they are loaded or updated: "int8" has a scale per '
        'output channel, "int4" one per 32 weights (as Q4_0), "int4-g64" one per 64; the LM head '
        'gets 8 bits. Names of methods, such as "gptq" and "compressed-tensors", say that the '
        "checkpoint is stored so, and change nothing.",
        OneOf(get_args(Quantization), optional=True),
    )
    activation_dtype: ActivationDType = option(
        "auto",
        "What matrix products on a CPU round activations to, for batches that are up to twice "
        'as fast: "bfloat16" for quantized weights and those in bfloat16 (the CPU needs '
        'AVX512_BF16), "int16" for packed weights in 4 to 8 bits but FP8 (AVX512_VNNI or AVX2) or, '
        'by tiles, quantization="int8" (AMX), "int8" for weights in 4 to 8 bits but FP8 '
        '(AVX512_VNNI or AVX2), or "float32"; auto is int16 if the CPU can, else bfloat16, else '
        "float32; it is float32 for weights in another dtype than bfloat16 without a quantization, "
        'and for packed weights with dtype="float32" or "float16".',
        OneOf(get_args(ActivationDType)),
    )
    cpu_instructions: CpuInstructions = option(
        "auto",
        'What a CPU multiplies bfloat16 and int8 by: "tiles" (AMX) or "vectors" (AVX512_BF16, '
        "AVX512_VNNI); auto is tiles where it has them.",
        OneOf(get_args(CpuInstructions)),
    )
    kv_cache_dtype: KVCacheDType = option(
        "auto",
        'What keys and values are stored as. On a GPU "fp8" (e4m3; "fp8_e4m3" is the same) has '
        "room for twice the tokens of bfloat16. On a CPU int8 has a scale for each key and value, "
        "and room for up to four times the tokens.",
        OneOf(get_args(KVCacheDType)),
        default_text="the dtype of the model",
    )
    deterministic: bool = option(
        False,
        "A request's numbers have the same bits whatever runs beside it; always so on a CPU "
        "with our own implementations.",
        Flag(),
    )
    model_name: str = ""
    further_layers: int = 0
    kept_levels: tuple[int, ...] = ()
    model_impl: ModelImpl = option(
        "auto",
        'Whose implementation runs the model: "shmllm" and "auto" take ours, "transformers" any '
        "causal model of transformers on the same paged cache, slower.",
        OneOf(get_args(ModelImpl)),
    )

    runner: RunnerName = option(
        "auto",
        'What the model is loaded for: "generate" for tokens only, "pooling" for vectors and '
        "scores only, without the LM head; auto is all that the model can do.",
        OneOf(get_args(RunnerName)),
    )
    convert: Conversion = option(
        "auto",
        'What a model is made into: "embed" leaves LM head and classifier out, "classify" gives '
        "it the classifier `score` instead of the LM head; auto and none take it as it is.",
        OneOf(get_args(Conversion)),
    )
    hf_overrides: dict[str, Any] | None = option(
        None,
        "Fields that take the place of those in config.json, as a mapping, or a function that "
        "changes transformers' configuration of the model; on the command line as JSON.",
        JsonObject(),
        default_text="none",
    )
    returns_experts: bool = option(
        False,
        "Outputs have the experts that each layer chose for each token of prompt and output, so "
        "that a trainer takes the same: docs/rl.md.",
        Flag(),
        name="enable_return_routed_experts",
    )
    language_model_only: bool = option(
        False,
        "Leave out the parts of a multimodal model for images and sounds: prompts are text.",
        Flag(),
    )
    decode_kernel: DecodeKernel = option(
        "auto",
        'How a GPU computes steps of up to eight tokens: by "launches" for each layer, or by one '
        '"persistent" kernel for all layers of a dense model; auto is what was measured to be '
        "faster on the card.",
        OneOf(get_args(DecodeKernel)),
    )
    disable_sliding_window: bool = option(
        False,
        "Bound max_model_len by the smallest sliding window of the layers, so that none has an "
        "effect.",
        Flag(),
    )

    def __post_init__(self) -> None:
        Section.__post_init__(self)
        object.__setattr__(self, "kept_levels", tuple(self.kept_levels))  # JSON has lists

    @property
    def overrides(self) -> dict[str, Any]:
        """The fields that take the place of those in config.json."""
        return with_only_text(self.hf_overrides or {}, self.language_model_only)

    @property
    def has_float8_cache(self) -> bool:
        """Whether keys and values are stored in FP8, which a GPU can."""
        return self.kv_cache_dtype in ("fp8", "fp8_e4m3")

    @property
    def rounding(self) -> Rounding | None:
        """What matrices are rounded to; None: they stay as the checkpoint has them."""
        return cast(Rounding, self.quantization) if self.quantization in ROUNDINGS else None
