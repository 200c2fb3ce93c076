"""The names of tensors in checkpoints, as far as they do not depend on the family.

The checkpoint of a multimodal model has the weights of its language model under a prefix, beside
those of towers for images or sound, which are left out.
"""

from __future__ import annotations

from collections.abc import Mapping

from shmllm.formats import thinker

LM_HEAD = "lm_head.weight"
"""The name of an LM head that does not share the embedding table."""

TABLE = "model.embed_tokens.weight"
"""The default name of the embedding table."""

RENAMED_PREFIXES = {
    "model.language_model.model.": "model.",  # of HyperCLOVA X
    "model.language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
    "language_model.model.encoder.layers.": "model.layers.",  # of Qianfan-OCR, by transformers
    "language_model.model.": "model.",
    "language_model.backbone.": "model.",
    "language_model.lm_head.": "lm_head.",
    "language_model.output.": "lm_head.",
    "language_model.": "model.",
    "language.model.": "model.",  # of DeepSeek-VL2
    "language.lm_head.": "lm_head.",
    "model.text_model.": "model.",
    "text_model.": "model.",
    "backbone.": "model.",
    "gpt_neox.": "model.",
    "gpt_neox_japanese.": "model.",
    "lfm2.": "model.",
    "embed_out.": "lm_head.",
    "biogpt.": "model.",
    "output_projection.": "lm_head.",
    "custom_text_proj.": "embedding_proj_layer.",  # of ColQwen3
    **{f"decoder.{kind}": f"lm_head.{kind}" for kind in ("weight", "bias")},
    "output.": "lm_head.",
    "proj_out.": "lm_head.",
    "log_softmax.mlp.layer0.": "lm_head.",
    **{f"{name}.": f"model.{name}." for name in ("transf_decoder", "encoder_decoder_proj")},
    **{f"{name}_encoder.bert_model.": "" for name in ("ctx", "question")},
    **{f"{name}.layers.": "model.layers." for name in ("nomic_bert", "roberta", "gte")},
    **{f"{name}.": "" for name in ("bert", "roberta", "distilbert", "mpnet", "electra")},
    **{f"{name}.": "" for name in ("nomic_bert", "gte", "new", "deberta", "albert", "ernie")},
    **{
        f"{name}.": f"transformer.{name}."
        for name in (
            *("h", "blocks", "wte", "wpe", "word_embeddings", "ln_f", "norm_f"),
            *("tokens_embed", "positions_embed"),
        )
    },
    "word_embeddings_layernorm.": "transformer.word_embeddings_layernorm.",
    **{f"{name}.": f"model.{name}." for name in ("layers", "embed_tokens", "norm", "embed_in")},
    **{
        f"{name}.": f"model.{name}."
        for name in ("final_layer_norm", "final_layernorm", "embedding_norm")
    },
    **{
        f"decoder.{name}.": f"model.decoder.{name}."
        for name in ("layers", "embed_tokens", "embed_positions", "final_layer_norm")
    },
    **{
        f"{name}.": f"model.{name}."
        for name in ("embeddings.tok_embeddings", "embeddings.norm", "final_norm")
    },
}
"""What a prefix of a model's weights stands for. Mamba's is "backbone", GPT-NeoX's its name; the
first files of GPT-2 and OPT, and those of models without an LM head, have none."""

_SAME = {
    "vision_encoder": "vision_tower",
    "vision_projection": "multi_modal_projector",
    "mlp_AR": "projector",
    "vision_projector": "projector",
}
"""Other names for parts: those of LightOnOCR, of PaddleOCR-VL's files and of HyperCLOVA X's."""

TOWER_PREFIXES = {
    f"{outer}{name}.{inner}": f"{_SAME.get(name, name)}."
    for name, inners in {
        "vision_tower": ("vision_model.", ""),
        "multi_modal_projector": ("",),
        "mm_projector": ("",),
        "patch_merge_mlp": ("",),
        "merger": ("",),
        "vision_encoder": ("",),
        "vision_projection": ("",),
        "vision_adapter": ("",),
        "aligner": ("",),
        "projector": ("",),
        "mlp_AR": ("",),
        "vision_projector": ("",),
        "visual": ("",),
        "visual_projection": ("",),
        "visual_embeddings_table": ("",),
        "vision": ("",),
        "vision_model": ("",),
        "vit": ("",),
        "layerwise_projectors": ("",),
        "spatial_projectors": ("",),
        "connector": ("",),
        "resampler_model": ("",),
        "qformer": ("",),
        "language_projection": ("",),
        "mlp1": ("",),
        "sam_model": ("",),
        "qwen2_model": ("",),
        "audio_tower": ("",),
        "vision_embedder": ("",),
        "embed_vision": ("",),
        "embed_audio": ("",),
    }.items()
    for outer in ("model.", "")
    for inner in inners
} | {
    f"{outer}{name}": name
    for name in ("image_newline", "view_seperator", "view_separator", "query_tokens")
    for outer in ("model.", "")
}
"""The prefixes of the weights of towers, and what they stand for: files and the modules
of transformers' versions have other ones."""

SKIPPED_PREFIXES = (
    "mtp.",  # layers that predict several tokens
    *("talker.", "token2wav.", "code2wav."),  # what makes speech of text
    *("model.vision_tokenizer.", "model.audio_tokenizer."),  # of Apertus 1.5
    *TOWER_PREFIXES,
)
"""The prefixes of tensors that a language model does not have."""

OTHER_LAYOUT = ".other_layout"
"""What the name of a weight has behind it in a model where checkpoints have it in two layouts: the
name of the one that the shape of a tensor tells from that of the model."""

BOUND_SUFFIXES = (".input_min", ".input_max", ".output_min", ".output_max")
"""The ends of the names of bounds, which may be infinite."""

BUFFER_SUFFIXES = (
    *(".layer_scalar", ".e_score_correction_bias", ".expert_bias", ".router_bias"),
    *(".act_fn.beta", ".act_fn.eps"),
    *(".ffn.gate.bias", ".gate.tid2eid"),
    *(".running_mean", ".running_var"),
    *BOUND_SUFFIXES,
    *(".std_bias", ".std_scale"),
)
"""The ends of the names of weights that transformers' modules have as buffers."""

_SKIPPED_SUFFIXES = (
    "rotary_emb.inv_freq",
    "rotary_pos_emb.inv_freq",
    ".attn.bias",
    ".attn.masked_bias",
    ".attn.causal_mask",
    ".attention.bias",
    ".attention.masked_bias",
    ".position_ids",
    ".num_batches_tracked",
)
"""The ends of the names of constants: frequencies, the causal masks in the first files of GPT-2,
GPT-Neo, GPT-NeoX and CodeGen, the numbers of the positions in BERT's, and counts of a training."""

_RENAMED_SUFFIXES = {
    ".LayerNorm.gamma": ".LayerNorm.weight",
    ".LayerNorm.beta": ".LayerNorm.bias",
}
"""What the first files of BERT call the weights of norms."""


def renamed(name: str, parts: Mapping[str, str]) -> str:
    """Returns a name with parts replaced, one after the other.

    Args:
        name: the default name of a weight.
        parts: a family's own name for each part of default names.
    """
    for part, own in parts.items():
        name = name.replace(part, own)
    return name


def _inner_name(name: str) -> str:
    """Returns the name of a tensor within the part of a model that reads prompts."""
    prefix = next((each for each in thinker.PREFIXES if name.startswith(each)), "")
    return name.removeprefix(prefix)


def tower_name(name: str, further: Mapping[str, str] | None = None) -> str | None:
    """Returns the name under which a tower knows a checkpoint's tensor; None: the tensor is none of
    a tower's weights.

    Args:
        name: the name in the checkpoint.
        further: as TOWER_PREFIXES, of one tower.
    """
    if name.endswith(_SKIPPED_SUFFIXES):
        return None
    name = _inner_name(name)
    prefixes = {**(further or {}), **TOWER_PREFIXES}
    found = ((p, meaning) for p, meaning in prefixes.items() if name.startswith(p))
    return next((meaning + name.removeprefix(prefix) for prefix, meaning in found), None)


def model_name(name: str, tied: bool) -> str | None:
    """Returns the name under which a model knows a checkpoint's tensor.

    Args:
        name: the name in the checkpoint.
        tied: whether the LM head shares the embedding table.

    Returns:
        The name in `DecoderModel.named_weights`, if the model has such a weight. None: a checkpoint
        may contain the tensor although the model does not keep it: constants, the LM head of a
        tied model, what is not part of a language model.
    """
    name = _inner_name(name)
    if name.startswith(SKIPPED_PREFIXES) or name.endswith(_SKIPPED_SUFFIXES):
        return None
    for prefix, meaning in RENAMED_PREFIXES.items():
        if name.startswith(prefix):
            name = meaning + name.removeprefix(prefix)
            break
    for suffix, meaning in _RENAMED_SUFFIXES.items():
        if name.endswith(suffix):
            name = name.removesuffix(suffix) + meaning
    return None if tied and name == LM_HEAD else name
