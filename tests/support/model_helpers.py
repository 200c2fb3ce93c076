"""Small transformers models on disk, and what runs ours without an engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from support.auto_model import model_of
from support.cache_shapes import cache_shape
from support.one_thread import one_thread
from support.remote_decoders import (
    BaichuanConfig,
    DomynEdgeConfig,
    InternLM2Config,
    InternLMConfig,
    OrionConfig,
    PanguEmbeddedConfig,
    TeleChat2Config,
    TeleFLMConfig,
)
from support.remote_families import DeciLMConfig, MiMoConfig, MiniCPMConfig
from support.remote_mixtures import (
    BailingMoeConfig,
    BailingMoeV2Config,
    DeepseekConfig,
    NemotronHPuzzleConfig,
)
from torch import Tensor
from transformers import (
    AfmoeConfig,
    Apertus1p5TextConfig,
    ApertusConfig,
    ArceeConfig,
    AriaTextConfig,
    AutoConfig,
    AXK1Config,
    AXK2Config,
    BailingHybridConfig,
    BambaConfig,
    BeamConfig,
    BioGptConfig,
    BitNetConfig,
    BloomConfig,
    CodeGenConfig,
    Cohere2Config,
    Cohere2MoeConfig,
    CohereCompassTextConfig,
    CohereConfig,
    CwmConfig,
    DbrxConfig,
    DeepseekV2Config,
    DeepseekV3Config,
    DeepseekV4Config,
    DeepseekV32Config,
    Dots1Config,
    Ernie4_5_MoeConfig,
    Ernie4_5Config,
    Exaone4Config,
    ExaoneConfig,
    ExaoneMoeConfig,
    FalconConfig,
    FalconH1Config,
    FalconMambaConfig,
    FlexOlmoConfig,
    FlintConfig,
    Gemma2Config,
    Gemma3nTextConfig,
    Gemma3TextConfig,
    Gemma4TextConfig,
    Gemma4UnifiedTextConfig,
    GemmaConfig,
    Glm4Config,
    Glm4MoeConfig,
    Glm4MoeLiteConfig,
    GlmConfig,
    GlmMoeDsaConfig,
    GPT2Config,
    GPTBigCodeConfig,
    GPTJConfig,
    GPTNeoConfig,
    GPTNeoXConfig,
    GPTNeoXJapaneseConfig,
    GptOssConfig,
    GraniteConfig,
    GraniteMoeConfig,
    GraniteMoeHybridConfig,
    GraniteMoeSharedConfig,
    GraniteMoeSWAConfig,
    GraniteSWAConfig,
    HeliumConfig,
    HunYuanDenseV1Config,
    HunYuanMoEV1Config,
    HyperCLOVAXConfig,
    HYV3Config,
    HYV4Config,
    InternLM3Config,
    IQuestCoderConfig,
    Jais2Config,
    JambaConfig,
    KimiLinearConfig,
    Kolibri1Config,
    LagunaConfig,
    LaraMiniConfig,
    Lfm2Config,
    Lfm2MoeConfig,
    Lfm3Config,
    Llama4TextConfig,
    LlamaConfig,
    LongcatFlashConfig,
    Mamba2Config,
    MambaConfig,
    MellumConfig,
    MiMoV2FlashConfig,
    MiniCPM3Config,
    MiniMaxConfig,
    MiniMaxM2Config,
    MiniMaxM3VLTextConfig,
    Ministral3Config,
    MinistralConfig,
    Mistral4Config,
    MistralConfig,
    MixtralConfig,
    ModernBertDecoderConfig,
    MptConfig,
    NanoChatConfig,
    NemotronConfig,
    NemotronHConfig,
    Olmo2Config,
    Olmo3Config,
    OlmoConfig,
    OlmoeConfig,
    OlmoHybridConfig,
    OpenAIGPTConfig,
    OPTConfig,
    PersimmonConfig,
    Phi3Config,
    Phi4MultimodalConfig,
    PhiConfig,
    PhimoeConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    SarvamMLAConfig,
    SarvamMoEConfig,
    SeedOssConfig,
    SmolLM3Config,
    SolarOpenConfig,
    StableLmConfig,
    Starcoder2Config,
    Step3p7TextConfig,
    VaultGemmaConfig,
    XGLMConfig,
    YoutuConfig,
    Zamba2Config,
)

from shmllm.core.plan import StepPlan
from shmllm.models.config import ModelConfig
from shmllm.models.create import create_model
from shmllm.models.decoder import DecoderModel
from shmllm.models.lora import LoraWeights
from shmllm.models.lora_targets import LoraTargets
from shmllm.models.weights import load_weights
from shmllm.worker.batch import InputBatch
from shmllm.worker.cpu.arena import HostArena
from shmllm.worker.cpu.cache import CpuKVCache, cache_bytes, layout_of
from shmllm.worker.cpu.lora import CpuAdapter, CpuLora
from shmllm.worker.cpu.program import CpuProgram

SIZES = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
}
CONFIGS: dict[str, type[PreTrainedConfig]] = {
    "afmoe": AfmoeConfig,
    "apertus": ApertusConfig,
    "apertus1p5": Apertus1p5TextConfig,
    "arcee": ArceeConfig,
    "aria": AriaTextConfig,
    "axk1": AXK1Config,
    "axk2": AXK2Config,
    "baichuan": BaichuanConfig,
    "bailing_moe": BailingMoeConfig,
    "bailing_moe_v2": BailingMoeV2Config,
    "bailing_moe_v3": BailingHybridConfig,
    "exaone": ExaoneConfig,
    "internlm": InternLMConfig,
    "internlm2": InternLM2Config,
    "internlm3": InternLM3Config,
    "iquestcoder": IQuestCoderConfig,
    "bamba": BambaConfig,
    "beam": BeamConfig,
    "biogpt": BioGptConfig,
    "bitnet": BitNetConfig,
    "bloom": BloomConfig,
    "codegen": CodeGenConfig,
    "cohere": CohereConfig,
    "cohere2_moe": Cohere2MoeConfig,
    "cohere2": Cohere2Config,
    "cohere_compass": CohereCompassTextConfig,
    "cwm": CwmConfig,
    "dbrx": DbrxConfig,
    "deepseek": DeepseekConfig,
    "deepseek_v2": DeepseekV2Config,
    "deepseek_v3": DeepseekV3Config,
    "deepseek_v32": DeepseekV32Config,
    "glm_moe_dsa": GlmMoeDsaConfig,
    "dots1": Dots1Config,
    "ernie4_5": Ernie4_5Config,
    "ernie4_5_moe": Ernie4_5_MoeConfig,
    "exaone4": Exaone4Config,
    "exaone_moe": ExaoneMoeConfig,
    "falcon": FalconConfig,
    "falcon_h1": FalconH1Config,
    "falcon_mamba": FalconMambaConfig,
    "flex_olmo": FlexOlmoConfig,
    "flint": FlintConfig,
    "gemma": GemmaConfig,
    "gemma2": Gemma2Config,
    "gemma3": Gemma3TextConfig,
    "gemma3n": Gemma3nTextConfig,
    "gemma4": Gemma4TextConfig,
    "gemma4_unified": Gemma4UnifiedTextConfig,
    "glm": GlmConfig,
    "glm4": Glm4Config,
    "glm4_moe": Glm4MoeConfig,
    "glm4_moe_lite": Glm4MoeLiteConfig,
    "gpt2": GPT2Config,
    "gpt_neo": GPTNeoConfig,
    "gpt_neox": GPTNeoXConfig,
    "gpt_neox_japanese": GPTNeoXJapaneseConfig,
    "gpt_bigcode": GPTBigCodeConfig,
    "gptj": GPTJConfig,
    "gpt_oss": GptOssConfig,
    "granite": GraniteConfig,
    "granite_moe": GraniteMoeConfig,
    "granite_moe_hybrid": GraniteMoeHybridConfig,
    "granite_moe_shared": GraniteMoeSharedConfig,
    "granite_moe_swa": GraniteMoeSWAConfig,
    "hy_v3": HYV3Config,
    "deepseek_v4": DeepseekV4Config,
    "hy_v4": HYV4Config,
    "mellum": MellumConfig,
    "minicpm3": MiniCPM3Config,
    "minicpm": MiniCPMConfig,
    "mimo": MiMoConfig,
    "mimo_v2_flash": MiMoV2FlashConfig,
    "decilm": DeciLMConfig,
    "minimax": MiniMaxConfig,
    "minimax_m2": MiniMaxM2Config,
    "minimax_m3": MiniMaxM3VLTextConfig,
    "helium": HeliumConfig,
    "hyperclovax": HyperCLOVAXConfig,
    "jais2": Jais2Config,
    "jamba": JambaConfig,
    "kimi_linear": KimiLinearConfig,
    "kolibri1": Kolibri1Config,
    "granite_swa": GraniteSWAConfig,
    "hunyuan_v1_dense": HunYuanDenseV1Config,
    "hunyuan_v1_moe": HunYuanMoEV1Config,
    "laguna": LagunaConfig,
    "lara_mini": LaraMiniConfig,
    "lfm2": Lfm2Config,
    "lfm2_moe": Lfm2MoeConfig,
    "lfm3": Lfm3Config,
    "llama": LlamaConfig,
    "llama4": Llama4TextConfig,
    "longcat_flash": LongcatFlashConfig,
    "mamba": MambaConfig,
    "mamba2": Mamba2Config,
    "ministral": MinistralConfig,
    "ministral3": Ministral3Config,
    "mistral": MistralConfig,
    "mistral4": Mistral4Config,
    "modernbert_decoder": ModernBertDecoderConfig,
    "mpt": MptConfig,
    "nanochat": NanoChatConfig,
    "nemotron": NemotronConfig,
    "nemotron_h": NemotronHConfig,
    "nemotron_3": NemotronHConfig,
    "nemotron_h_puzzle": NemotronHPuzzleConfig,
    "olmo": OlmoConfig,
    "olmo2": Olmo2Config,
    "olmo3": Olmo3Config,
    "olmo_hybrid": OlmoHybridConfig,
    "openai_gpt": OpenAIGPTConfig,
    "opt": OPTConfig,
    "orion": OrionConfig,
    "persimmon": PersimmonConfig,
    "phi": PhiConfig,
    "phimoe": PhimoeConfig,
    "phi3": Phi3Config,
    "phi4_multimodal": Phi4MultimodalConfig,
    "sarvam_mla": SarvamMLAConfig,
    "sarvam_moe": SarvamMoEConfig,
    "seed_oss": SeedOssConfig,
    "smollm3": SmolLM3Config,
    "solar_open": SolarOpenConfig,
    "stablelm": StableLmConfig,
    "starcoder2": Starcoder2Config,
    "step3p5": Step3p7TextConfig,
    "domyn_edge": DomynEdgeConfig,
    "pangu_embedded": PanguEmbeddedConfig,
    "telechat2": TeleChat2Config,
    "teleflm": TeleFLMConfig,
    "vaultgemma": VaultGemmaConfig,
    "xglm": XGLMConfig,
    "youtu": YoutuConfig,
    "zamba2": Zamba2Config,
    "qwen2": Qwen2Config,
    "mixtral": MixtralConfig,
    "olmoe": OlmoeConfig,
    "qwen2_moe": Qwen2MoeConfig,
    "qwen3": Qwen3Config,
    "qwen3_moe": Qwen3MoeConfig,
    "qwen3_next": Qwen3NextConfig,
    "qwen3_5": Qwen3_5TextConfig,
    "qwen3_5_moe": Qwen3_5MoeTextConfig,
}


def allocate(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Storage full of NaN, where there is one, so that a weight nobody loads is seen."""
    return torch.full(shape, float("nan") if dtype.is_floating_point else 77, dtype=dtype)


STATE_PARAMETERS = (
    *("conv1d.weight", "conv1d.bias", "A_log", "dt_bias", ".D"),
    *("conv.conv.weight", "conv.conv.bias"),
    *("_coefs.weight", "modality_router.weight"),
)
"""The parameters of recurrent layers that are no matrices of products, and those that mix
streams."""


HEAD_NORMS = ("q_norm.weight", "k_norm.weight")
"""Norms that have weights of their own for each head."""


def reference_model(
    family: str, scale: float = 1.0, dtype: str = "float32", **options: Any
) -> PreTrainedModel:
    """A random transformers model; matrices and biases multiplied by ``scale``."""
    settings = SIZES | ({"head_dim": 16} if family == "qwen3" else {}) | options
    torch.manual_seed(11)
    config = CONFIGS[family](**settings)
    model = model_of(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_norm = "norm" in name and (parameter.ndim == 1 or name.endswith(HEAD_NORMS))
            if is_norm or ".ln_" in name or name.endswith("scale"):
                parameter.normal_(1.0, 0.2)
            elif name.endswith(STATE_PARAMETERS):
                parameter.normal_(0.0, 0.5)
            else:
                parameter.normal_(0.0, 0.05).mul_(scale)
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.normal_(1.0, 0.2)
            if name.endswith(("e_score_correction_bias", "expert_bias")):
                buffer.normal_(0.0, 0.2)
            if name.endswith("tid2eid"):
                buffer.random_(config.num_local_experts)
    model.to(getattr(torch, dtype))
    return model


def save(model: PreTrainedModel, directory: Path, **options: Any) -> Path:
    model.save_pretrained(directory, **options)
    assert AutoConfig.from_pretrained(directory).model_type == model.config.model_type
    return directory


def load(
    directory: Path, dtype: torch.dtype = torch.float32, quantization: str | None = None
) -> DecoderModel:
    model = create_model(ModelConfig.from_directory(directory), dtype, allocate, quantization)
    load_weights(model, directory, None)
    return model


BLOCK_SIZE = 16


def make_program(
    model: DecoderModel, num_tokens: int, lora: CpuLora | None = None
) -> tuple[CpuProgram, InputBatch]:
    """What runs one sequence of at most that many tokens, in blocks from 1 on."""
    config = model.config
    num_blocks = -(-num_tokens // BLOCK_SIZE)
    stored = str(model.dtype).removeprefix("torch.")
    shape = cache_shape(
        config, BLOCK_SIZE, lambda heads: layout_of(heads, BLOCK_SIZE, stored).block_bytes
    )
    num_groups = len(shape.groups)
    num_all = num_groups * num_blocks + 1
    arena = HostArena(cache_bytes(shape, num_all, num_all), "the cache")
    batch = InputBatch(
        1, num_blocks * BLOCK_SIZE, BLOCK_SIZE, config.vocab_size, num_groups,
        spans_prompts=config.spans_prompts,
    )  # fmt: skip
    batch.block_tables[:, 0] = np.arange(1, num_all).reshape(num_groups, num_blocks)
    cache = CpuKVCache(config, stored, shape, num_all, arena, num_all)
    return CpuProgram(model, cache, batch, num_tokens, 1, lora=lora), batch


@torch.inference_mode()
def our_logits(
    model: DecoderModel,
    token_ids: list[int],
    adapter: LoraWeights | None = None,
    chosen: Sequence[str] | None = None,
) -> Tensor:
    """[tokens, vocab] of one sequence, computed in one step, with an adapter of chosen modules or
    without."""
    length, lora = len(token_ids), None
    if adapter is not None:
        targets = LoraTargets(model, chosen)
        lora = CpuLora(targets, 1, 64, length, model.dtype)
        lora.fill([CpuAdapter(adapter, len(targets.products))], np.array([length]))
    program, batch = make_program(model, length, lora)
    batch.token_ids[0, :length] = token_ids
    if batch.num_prompt_tokens is not None:
        batch.num_prompt_tokens[0] = length
    inputs = batch.inputs(StepPlan(1, rows=[0], starts=[0], counts=[length], num_tokens=length))
    program.inputs.fill(inputs)
    hidden, _ = program.run(inputs)
    return program.compute_logits(hidden)


@one_thread()
@torch.inference_mode()
def reference_logits(model: PreTrainedModel, token_ids: list[int], **inputs: Tensor) -> Tensor:
    """transformers' logits, [tokens, vocab]; ``inputs`` are those of its model beside tokens."""
    logits: Tensor = model(torch.tensor([token_ids]), **inputs).logits[0].float()
    return logits


def assert_logits_close(ours: Tensor, reference: Tensor, tolerance: float) -> None:
    """The largest difference is within ``tolerance`` of the largest reference logit."""
    assert ours.dtype == torch.float32
    assert ours.shape == reference.shape
    difference = float((ours - reference).abs().max() / reference.abs().max())
    assert difference < tolerance, f"relative difference {difference:.2e}"
