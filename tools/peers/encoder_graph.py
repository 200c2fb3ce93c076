"""What the embedding peers without sentence-transformers share.

This module owns the model as a torch module that can be exported, and batches of texts of similar
lengths. A batch runs in one of several streams, which are threads with a part of the cores each.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

BATCH_SIZES = (1, 4, 8, 16, 32, 64)

Array = np.ndarray[Any, np.dtype[Any]]
Run = Callable[[Array, Array], Array]
"""(token ids, mask) -> embeddings; both arguments are int64 [batch, longest], the result is float32
[batch, width]."""


class MeanPooled(torch.nn.Module):
    """An encoder with mean pooling and normalization, as the modules of all-MiniLM-L6-v2.

    Args:
        directory: the model's, as sentence-transformers writes it.
        attention: transformers' name of the implementation of attention.
    """

    def __init__(self, directory: str, attention: str) -> None:
        from transformers import AutoModel

        super().__init__()
        pooling = json.loads((Path(directory) / "1_Pooling" / "config.json").read_text())
        if not pooling["pooling_mode_mean_tokens"]:
            raise ValueError(f"{directory} has another pooling than the mean of all tokens")
        self.encoder = AutoModel.from_pretrained(
            directory, dtype=torch.float32, attn_implementation=attention
        ).eval()

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """Embeds a batch.

        Args:
            input_ids: int64 [batch, longest].
            attention_mask: int64 [batch, longest], 0 for padding.

        Returns:
            float32 [batch, width].
        """
        # ONNX Runtime's optimizer recognizes this form of the mask.
        batch, length = input_ids.shape
        keys = attention_mask.unsqueeze(1).unsqueeze(2).expand(batch, 1, length, length)
        hidden_keys = 1.0 - keys.to(torch.float32)
        bias = torch.where(hidden_keys.to(torch.bool), -10000.0, hidden_keys)
        types = torch.zeros_like(input_ids)
        hidden = self.encoder(input_ids=input_ids, attention_mask=bias, token_type_ids=types)[0]
        mask = attention_mask.unsqueeze(-1).to(hidden.dtype)
        mean = (hidden * mask).sum(1) / mask.sum(1)
        vectors: torch.Tensor = mean / mean.norm(dim=1, keepdim=True)
        return vectors


def example_batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and mask of a batch to trace the model with; the second text is shorter."""
    mask = torch.ones(2, 8, dtype=torch.long)
    mask[1, 6:] = 0
    return 1000 + torch.arange(16).view(2, 8), mask


class SortedBatches:
    """Embeds texts in batches of similar lengths, each padded to its longest text.

    Args:
        directory: the model's.
    """

    def __init__(self, directory: str) -> None:
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_file(str(Path(directory) / "tokenizer.json"))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    def embed(self, texts: list[str], batch_size: int, streams: list[Run]) -> Array:
        """Embeds the texts, the longest first.

        Args:
            texts: any number of texts.
            batch_size: how many run together.
            streams: one function for each batch that runs at the same time.

        Returns:
            float32 [texts, width].
        """
        encodings = self._tokenizer.encode_batch_fast(texts)
        tokens = [np.array(encoding.ids, np.int64) for encoding in encodings]
        order = np.argsort([-len(ids) for ids in tokens], kind="stable")
        free = list(streams)

        def run(rows: Array) -> Array:
            stream = free.pop()
            ids, mask = padded([tokens[row] for row in rows])
            vectors = stream(ids, mask)
            free.append(stream)
            return vectors

        batches = [order[i : i + batch_size] for i in range(0, len(order), batch_size)]
        if len(streams) == 1:
            vectors = list(map(run, batches))
        else:
            with ThreadPoolExecutor(len(streams)) as pool:
                vectors = list(pool.map(run, batches))
        found = np.empty((len(texts), vectors[0].shape[1]), np.float32)
        found[order] = np.concatenate(vectors)
        return found


def padded(tokens: list[Array]) -> tuple[Array, Array]:
    """Token ids, padded with 0 to the longest text, and the mask; int64 [batch, longest]."""
    lengths = np.array([len(ids) for ids in tokens])
    mask = (np.arange(lengths.max()) < lengths[:, None]).astype(np.int64)
    ids = np.zeros_like(mask)
    ids[mask.astype(bool)] = np.concatenate(tokens)
    return ids, mask
