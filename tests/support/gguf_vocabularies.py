"""A small vocabulary of Gemma 4's kind, and how llama.cpp's conversion stores it."""

from __future__ import annotations

import json
from collections.abc import Sequence

import gguf
import tokenizers
from support.gguf_models import BYTE, CONTROL, NORMAL, UNKNOWN, USER_DEFINED
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

SPECIAL = {"<pad>": CONTROL, "<eos>": CONTROL, "<bos>": CONTROL, "<unk>": UNKNOWN}
SPECIAL |= {"<|turn>": CONTROL, "<turn|>": CONTROL, "<|tool_response>": USER_DEFINED}


def trained_gemma4(texts: Sequence[str]) -> tokenizers.Tokenizer:
    """A tokenizer with the parts of Gemma 4's own: spaces are letters, and what is no token of the
    vocabulary becomes bytes."""
    made = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    made.normalizer = normalizers.Replace(" ", "\u2581")
    made.pre_tokenizer = pre_tokenizers.Split(
        tokenizers.Regex(r"\n+|\u2581?[^\n\u2581]+"), "isolated"
    )
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    made.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=700, special_tokens=[*SPECIAL, *bytes_])
    )
    made.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    made.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return made


def add_gemma4_vocabulary(writer: gguf.GGUFWriter, made: tokenizers.Tokenizer) -> None:
    """Adds the vocabulary of `trained_gemma4`."""
    model = json.loads(made.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    is_byte = [token.startswith("<0x") for token in tokens]
    kinds = [
        SPECIAL.get(token, BYTE if of_bytes else NORMAL)
        for token, of_bytes in zip(tokens, is_byte, strict=True)
    ]
    writer.add_tokenizer_model("gemma4")
    writer.add_token_list(tokens)
    writer.add_token_scores([-1000.0] * len(tokens))
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(pair) for pair in model["merges"]])
    writer.add_add_space_prefix(False)
    for name in ("pad", "eos", "bos", "unk"):
        getattr(writer, f"add_{name}_token_id")(tokens.index(f"<{name}>"))
