"""Small tokenizers in the files of `tiktoken`: tekken.json, Kimi's tiktoken.model, and GLM-4's
tokenizer.model."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

WORDS = [
    b"th",
    b"he",
    b"the",
    b" t",
    b" th",
    b" the",
    b"in",
    b"ng",
    b"ing",
    b"\xc3\xa9",
    b"\xe7\x9a",
]
RANKED = [bytes([byte]) for byte in range(256)] + WORDS
PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CONTROLS = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "<pad>"]
NUM_SPECIAL = 10
KIMI = {
    "tokenizer_class": "TikTokenTokenizer",
    "eos_token": "[EOS]",
    "added_tokens_decoder": {
        str(len(RANKED)): {"content": "[BOS]", "special": True},
        str(len(RANKED) + 1): {"content": "[EOS]", "special": True},
        str(len(RANKED) + 5): {"content": "<|tool_call_begin|>", "special": False},
    },
}
GLM4 = {
    "auto_map": {"AutoTokenizer": ["tokenization_chatglm.ChatGLM4Tokenizer", None]},
    "tokenizer_class": "ChatGLM4Tokenizer",
    "eos_token": "<|endoftext|>",
    "added_tokens_decoder": {
        str(len(RANKED) + index): {"content": text, "special": True}
        for index, text in enumerate(["<|endoftext|>", "[MASK]", "[gMASK]", "<sop>", "<|user|>"])
    },
}


def encoded(token: bytes) -> str:
    return base64.b64encode(token).decode()


def write_tekken(directory: Path) -> Path:
    """Write a tekken.json with more tokens than the model has, as the published ones."""
    content = {
        "config": {
            "pattern": PATTERN,
            "num_vocab_tokens": len(RANKED) + 2,
            "default_vocab_size": NUM_SPECIAL + len(RANKED),
            "default_num_special_tokens": NUM_SPECIAL,
            "version": "v11",
        },
        "vocab": [
            {"rank": rank, "token_bytes": encoded(token), "token_str": None}
            for rank, token in enumerate([*RANKED, b"thing", b"x" * 9])
        ],
        "special_tokens": [
            {"rank": rank, "token_str": text, "is_control": True}
            for rank, text in enumerate(CONTROLS)
        ],
    }
    (directory / "tekken.json").write_text(json.dumps(content))
    return directory


def write_kimi(directory: Path) -> Path:
    """Write a tiktoken.model with the configuration that names the added tokens."""
    return _write_ranks(directory / "tiktoken.model", KIMI)


def write_glm4(directory: Path) -> Path:
    """Write a tokenizer.model as that of GLM-4-9B, with its configuration."""
    return _write_ranks(directory / "tokenizer.model", GLM4)


def _write_ranks(path: Path, config: dict[str, Any]) -> Path:
    lines = [f"{encoded(token)} {rank}\n" for rank, token in enumerate(RANKED)]
    path.write_text("".join(lines))
    (path.parent / "tokenizer_config.json").write_text(json.dumps(config))
    return path.parent
