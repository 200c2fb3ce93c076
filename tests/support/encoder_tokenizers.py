"""Small tokenizers with the special tokens of encoders and of embedding models.

The names say whose they are like: "bert" and "roberta" have templates for one text and for pairs,
of which only BERT's gives the second text token type 1; "qwen" ends a text with a token, "llama"
begins it with one; "gpt" has no special tokens.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from shmllm.frontend.text.tokenizer import Tokenizer
from shmllm.frontend.text.tokenizer_backend import FastBackend

KINDS = ("bert", "roberta", "qwen", "llama", "gpt")
CORPUS = (
    "The quick brown fox jumps over the lazy dog, and then it does it again.",
    "What is the capital of France? Paris is the capital and largest city of France.",
    "Encoders read both ways; rerankers read a query and a document together.",
)
_SPECIAL = {
    "bert": ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"],
    "roberta": ["<s>", "<pad>", "</s>", "<unk>", "<mask>"],
    "qwen": ["<|endoftext|>"],
    "llama": ["<s>", "</s>"],
    "gpt": ["<|endoftext|>"],
}


def library_tokenizer(kind: str) -> tokenizers.Tokenizer:
    """A tokenizer of the library `tokenizers`; in one process always the same."""
    return tokenizers.Tokenizer.from_str(_trained(kind))


@cache
def _trained(kind: str) -> str:
    """As JSON. Two trainings may differ in the order of equally frequent pieces."""
    tokenizer = _wordpiece() if kind == "bert" else _byte_level(_SPECIAL[kind])
    match kind:
        case "bert":
            tokenizer.post_processor = processors.TemplateProcessing(
                single="[CLS] $A [SEP]",
                pair="[CLS] $A [SEP] $B:1 [SEP]:1",
                special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
            )
        case "roberta":
            tokenizer.post_processor = processors.RobertaProcessing(
                ("</s>", 2), ("<s>", 0), add_prefix_space=False
            )
        case "qwen":
            ends = processors.TemplateProcessing(
                single="$A <|endoftext|>",
                pair="$A <|endoftext|> $B <|endoftext|>",
                special_tokens=[("<|endoftext|>", 0)],
            )
            byte_level = processors.ByteLevel(trim_offsets=False)
            tokenizer.post_processor = processors.Sequence([byte_level, ends])
        case "llama":
            tokenizer.post_processor = processors.TemplateProcessing(
                single="<s> $A", pair="<s> $A <s>:1 $B:1", special_tokens=[("<s>", 0)]
            )
    return tokenizer.to_str()


def our_tokenizer(kind: str) -> Tokenizer:
    """The front end's."""
    return Tokenizer(FastBackend(library_tokenizer(kind)))


def transformers_tokenizer(kind: str, **options: Any) -> Any:
    """A tokenizer of transformers that is based on the library's."""
    from transformers import PreTrainedTokenizerFast

    if kind == "bert":
        names = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
        options |= dict(zip(names, _SPECIAL["bert"], strict=True))
    if kind == "roberta":
        names = ("cls_token", "pad_token", "sep_token", "unk_token", "mask_token")
        options |= dict(zip(names, _SPECIAL["roberta"], strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=library_tokenizer(kind), **options)


def save_bert_tokenizer(directory: Path) -> None:
    """Write the files of the one like BERT's."""
    transformers_tokenizer("bert").save_pretrained(directory)


def _wordpiece() -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(
        vocab_size=200, special_tokens=_SPECIAL["bert"], show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def _byte_level(special: list[str]) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=special,
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer
