"""Small tokenizers in the files of `tiktoken`: tekken.json, and the tiktoken.model of Kimi."""

from __future__ import annotations

import base64
import json
from pathlib import Path

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
    lines = [f"{encoded(token)} {rank}\n" for rank, token in enumerate(RANKED)]
    (directory / "tiktoken.model").write_text("".join(lines))
    (directory / "tokenizer_config.json").write_text(json.dumps(KIMI))
    return directory
