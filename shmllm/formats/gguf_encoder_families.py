"""The families of encoders in GGUF files, which make vectors of texts. A family is a row of
ENCODERS.

The names on one side are llama.cpp's, on the other transformers' or the authors'. This module must
not know the fields of config.json, nor import torch.
"""

from __future__ import annotations

from shmllm.formats.gguf_family import NUM_HEADS, OUTSIDE, GgufFamily, HeadRows, Place, Places
from shmllm.formats.gguf_places import (
    ATTENTION,
    DENSE,
    FUSED_QKV,
    GEMMA,
    MLP,
    QK_NORMS,
    without,
)

CLASSIFIER, POOLER = "cls.output", "cls"
"""The modules of a classifier of texts: its last projection, and the one before it."""

_EMBEDDINGS = {
    "token_embd": "embeddings.word_embeddings",
    "token_types": "embeddings.token_type_embeddings",
    "token_embd_norm": "embeddings.LayerNorm",
}
_BERT_EMBEDDINGS = {
    **_EMBEDDINGS,
    "position_embd": "embeddings.position_embeddings",
    POOLER: "pooler.dense",
    CLASSIFIER: "classifier",
}


def _fused(*names: str) -> Places:
    """Queries, keys and values of as many heads, in one tensor."""
    name, *others = names
    place = Place(name=name, others=tuple(others), heads=(HeadRows(NUM_HEADS),) * 3)
    return {FUSED_QKV: place}


_BERT_QKV = tuple(f"attention.self.{kind}" for kind in ("query", "key", "value"))
_BERT_ATTENTION: Places = {
    **dict(zip(("attn_q", "attn_k", "attn_v"), _BERT_QKV, strict=True)),
    **_fused(*_BERT_QKV),
    "attn_output": "attention.output.dense",
    "attn_output_norm": "attention.output.LayerNorm",
}
_BERT: Places = {
    **_BERT_ATTENTION,
    "ffn_up": "intermediate.dense",
    "ffn_down": "output.dense",
    "layer_output_norm": "output.LayerNorm",
}
_NOMIC: Places = {
    **without(ATTENTION, "attn_norm"),
    **MLP,
    "attn_output_norm": "post_attention_layernorm",
    "layer_output_norm": "post_mlp_layernorm",
}
_JINA: Places = {
    **_BERT_ATTENTION,
    "ffn_up": "mlp.gated_layers",
    "ffn_down": "mlp.wo",
    "layer_output_norm": "mlp.layernorm",
}
_MODERNBERT: Places = {
    "attn_norm": "attn_norm",
    FUSED_QKV: "attn.Wqkv",
    "attn_output": "attn.Wo",
    "ffn_norm": "mlp_norm",
    "ffn_up": "mlp.Wi",
    "ffn_down": "mlp.Wo",
}

ENCODERS: dict[tuple[str, bool], GgufFamily] = {
    ("bert", False): GgufFamily(
        title="BERT, RoBERTa and XLM-RoBERTa",
        architecture="BertModel",
        model_type="bert",
        modules=_BERT,
        outside=_BERT_EMBEDDINGS,
        layers="encoder.layer",
        is_written=False,
    ),
    ("nomic-bert", False): GgufFamily(
        title="Nomic Embed 1 and 1.5",
        architecture="NomicBertModel",
        model_type="nomic_bert",
        modules=_NOMIC,
        outside=_EMBEDDINGS,
        is_written=False,
    ),
    ("gemma-embedding", False): GgufFamily(
        title="EmbeddingGemma",
        architecture="Gemma3TextModel",
        model_type="gemma_embedding",
        modules={**GEMMA, **QK_NORMS},
        outside={**OUTSIDE, "dense_2": "2_Dense.linear", "dense_3": "3_Dense.linear"},
        norm_offset=1.0,
        is_written=False,
    ),
    ("jina-bert-v2", False): GgufFamily(
        title="Jina Embeddings 2",
        architecture="JinaBertModel",
        model_type="jina_bert",
        modules=_JINA,
        outside=_EMBEDDINGS,
        layers="encoder.layer",
        is_written=False,
    ),
    ("modern-bert", False): GgufFamily(
        title="ModernBERT",
        architecture="ModernBertModel",
        model_type="modernbert",
        modules=_MODERNBERT,
        outside={
            "token_embd": "model.embeddings.tok_embeddings",
            "token_embd_norm": "model.embeddings.norm",
            "output_norm": "model.final_norm",
        },
        is_written=False,
    ),
    ("eurobert", False): GgufFamily(
        title="EuroBERT",
        architecture="EuroBertModel",
        model_type="eurobert",
        modules=DENSE,
        is_written=False,
    ),
}
"""The families by llama.cpp's architecture, and whether the model has experts."""
