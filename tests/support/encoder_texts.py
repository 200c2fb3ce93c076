"""Small random encoder-decoders of texts, made by transformers, and the tokens they generate."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from support.one_thread import one_thread
from support.vision_models import draw_weights, tokenizer_with
from tokenizers.processors import TemplateProcessing

LENGTH = 64
"""The most tokens of a text for the encoder, and of the decoder's."""
NUM_TOKENS = 512
END, LANGUAGES = "</s>", ("eng_Latn", "fra_Latn")
"""The tokens around a text for the encoder: the first language is before that of M2M100."""
_OF_BART: dict[str, Any] = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": LENGTH,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
}
_OF_MARIAN = {
    "decoder_start_token_id": NUM_TOKENS - 1,
    "pad_token_id": NUM_TOKENS - 1,
    "bad_words_ids": [[NUM_TOKENS - 1]],
    "scale_embedding": True,
}
_OF_T5: dict[str, Any] = {
    "d_model": 32,
    "d_kv": 16,
    "d_ff": 64,
    "num_heads": 4,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 20,
    "decoder_start_token_id": 0,
    "n_positions": LENGTH,
}
OF_GEMMA: dict[str, Any] = {
    "vocab_size": NUM_TOKENS,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "query_pre_attn_scalar": 12,
    "attn_logit_softcapping": 3.0,
    "max_position_embeddings": LENGTH,
    "sliding_window": LENGTH,
}
_OF_T5GEMMA = {
    "encoder": OF_GEMMA | {"hidden_size": 48, "num_hidden_layers": 2, "sliding_window": 7},
    "decoder": OF_GEMMA,
    "decoder_start_token_id": 2,
    "tie_word_embeddings": False,  # random models that are tied repeat themselves
}
RECIPES: dict[str, tuple[str, dict[str, Any]]] = {
    "bart": ("bart", _OF_BART),
    "mbart": ("mbart", _OF_BART | {"scale_embedding": True}),
    "m2m_100": ("m2m_100", _OF_BART),
    "pegasus": ("pegasus", _OF_BART | {"decoder_start_token_id": 0, "scale_embedding": True}),
    "marian": ("marian", _OF_BART | _OF_MARIAN),
    "t5": ("t5", _OF_T5),
    "t5 v1.1": ("t5", _OF_T5 | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    "mt5": ("mt5", _OF_T5),
    "umt5": ("umt5", _OF_T5),
    "t5gemma": ("t5gemma", _OF_T5GEMMA),
}
"""By name, the type of a model and fields of its configuration."""
POST_NORM = {"bart", "marian"}
PADDING = {"m2m_100": 1, "marian": NUM_TOKENS - 1}
"""The token that some models do not count as a position, or never generate."""


def make_encoder_decoder(directory: Path, name: str, **fields: Any) -> Any:
    """A random float32 model of transformers' in `directory`.

    Args:
        directory: where its files are written to.
        name: of RECIPES.
        fields: further fields of config.json.
    """
    return _make(directory, name, transformers.AutoModelForSeq2SeqLM, fields)


def make_classifier(directory: Path, name: str, **fields: Any) -> Any:
    """The same with a classifier in place of the LM head."""
    return _make(directory, name, transformers.AutoModelForSequenceClassification, fields)


def _make(directory: Path, name: str, kind_of_model: Any, fields: dict[str, Any]) -> Any:
    torch.manual_seed(11)
    kind, recipe = RECIPES[name]
    config = transformers.AutoConfig.for_model(kind, vocab_size=NUM_TOKENS, **{**recipe, **fields})
    # Other kinds of attention leave the caps of scores out.
    model = kind_of_model.from_config(config, attn_implementation="eager").eval()
    draw_weights(model, 1.0)
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if weight.ndim > 1:  # so that the texts decide, and not the biases
                weight.mul_(3)
            if kind in POST_NORM and "encoder_attn.out_proj" in key:  # and not one text alone
                weight.mul_(0.1)
        for module in model.modules():
            if hasattr(module, "create_weight"):  # sinusoids
                module.weight.copy_(module.create_weight())
        if name == "t5 v1.1":
            model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight))
        for bias in (buffer for key, buffer in model.named_buffers() if "logits_bias" in key):
            bias.normal_(0, 0.3)
            if (padding := PADDING.get(kind)) is not None:
                bias[0, padding] = -100
    model.save_pretrained(directory)
    tokenizer = tokenizer_with((END, *LANGUAGES), first_mark=300)
    ids = [(mark, tokenizer.token_to_id(mark)) for mark in (END, *LANGUAGES)]
    first = f"{LANGUAGES[0]} " if kind == "m2m_100" else ""
    tokenizer.post_processor = TemplateProcessing(f"{first}$A {END}", f"$A $B {END}", ids)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return model


@one_thread()
@torch.inference_mode()
def reference_tokens(
    model: Any,
    text: Sequence[int],
    prompt: Sequence[int],
    max_new_tokens: int = 12,
    penalty: float = 1.0,
) -> list[int]:
    """transformers' most likely tokens, one after the other; nothing but their number ends them.

    Args:
        model: the model.
        text: what the encoder reads.
        prompt: what the decoder begins with.
        max_new_tokens: their number.
        penalty: the repetition penalty.
    """
    ids = list(prompt)
    penalise = transformers.RepetitionPenaltyLogitsProcessor(penalty)
    encoded = model.get_encoder()(input_ids=torch.tensor([text]))
    for _ in range(max_new_tokens):
        known = torch.tensor([ids])
        logits = model(encoder_outputs=encoded, decoder_input_ids=known).logits[:, -1]
        ids.append(int(penalise(known, logits).argmax()))
    return ids[len(prompt) :]
