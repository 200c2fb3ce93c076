"""A small random Whisper, made by transformers, and the tokens it generates."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers
from support.one_thread import one_thread
from support.vision_models import draw_weights, tokenizer_with

RATE = 16000
SECONDS = 1
"""The longest sound."""
NUM_MELS = 16
MARKS = (
    *("<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|de|>", "<|translate|>"),
    *("<|transcribe|>", "<|nospeech|>", "<|notimestamps|>"),
    *(f"<|{hundredths / 100:.2f}|>" for hundredths in range(0, 100 * SECONDS + 1, 2)),
)
PROMPT = "<|startoftranscript|><|en|><|transcribe|><|notimestamps|>"


def make_whisper(directory: Path, **fields: Any) -> Any:
    """A random float32 Whisper of transformers' in `directory`.

    Args:
        directory: where its files are written to.
        fields: further fields of config.json.
    """
    torch.manual_seed(11)
    tokenizer = tokenizer_with(MARKS, first_mark=300)
    ids = {mark: tokenizer.token_to_id(mark) for mark in MARKS}
    end = ids["<|endoftext|>"]
    own: dict[str, Any] = {
        "vocab_size": 512,
        "d_model": 32,
        "encoder_layers": 2,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 64,
        "decoder_layers": 3,
        "decoder_attention_heads": 2,
        "decoder_ffn_dim": 64,
        "num_mel_bins": NUM_MELS,
        "max_source_positions": 50 * SECONDS,
        "max_target_positions": 48,
        "decoder_start_token_id": ids["<|startoftranscript|>"],
        "bos_token_id": end,
        "eos_token_id": end,
        "pad_token_id": end,
        "suppress_tokens": None,
        "tie_word_embeddings": False,  # tied random ones repeat one token
        "begin_suppress_tokens": None,
    }
    model = transformers.WhisperForConditionalGeneration(
        transformers.WhisperConfig(**own | fields)
    ).eval()
    draw_weights(model, 1.0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:  # so that the sound and the text decide, and not the biases
                parameter.mul_(4)
    model.save_pretrained(directory)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "feature_extractor_type": "WhisperFeatureExtractor",
        "feature_size": NUM_MELS,
        "chunk_length": SECONDS,
    }
    languages = {f"<|{name}|>": ids[f"<|{name}|>"] for name in ("en", "de")}
    generation = {
        "eos_token_id": end,
        "decoder_start_token_id": ids["<|startoftranscript|>"],
        "lang_to_id": languages,
        "task_to_id": {name: ids[f"<|{name}|>"] for name in ("transcribe", "translate")},
        "no_timestamps_token_id": ids["<|notimestamps|>"],
        "max_initial_timestamp_index": 50,
        "is_multilingual": True,
    }
    for name, content in {
        "generation_config.json": generation,
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "<|endoftext|>",
        },
        "preprocessor_config.json": settings,
    }.items():
        (directory / name).write_text(json.dumps(content, indent=2))
    return model


def make_sound(seconds: float, seed: int) -> npt.NDArray[np.float32]:
    """A tone that rises and falls, and noise."""
    times = np.arange(int(RATE * seconds)) / RATE
    tone = np.sin(2 * np.pi * (300 + 400 * seed) * times * (1 + times))
    noise = np.random.default_rng(seed).normal(0, 0.02, len(times))
    sound: npt.NDArray[np.float32] = (tone * np.abs(np.sin(5 * times)) + noise).astype(np.float32)
    return sound


def features(sounds: Sequence[npt.NDArray[np.float32]]) -> torch.Tensor:
    """What transformers' model takes for sounds with RATE samples a second."""
    extractor = transformers.WhisperFeatureExtractor(feature_size=NUM_MELS, chunk_length=SECONDS)
    found: torch.Tensor = extractor(list(sounds), sampling_rate=RATE, return_tensors="pt")[
        "input_features"
    ]
    return found


@one_thread()
@torch.inference_mode()
def reference_tokens(
    model: Any,
    prompt_ids: Sequence[int],
    sound: npt.NDArray[np.float32],
    max_new_tokens: int = 12,
    penalty: float = 1.0,
) -> list[int]:
    """transformers' most likely tokens, one after the other; nothing but their number ends them."""
    ids = list(prompt_ids)
    penalise = transformers.RepetitionPenaltyLogitsProcessor(penalty)
    encoded = model.get_encoder()(features([sound]))
    for _ in range(max_new_tokens):
        known = torch.tensor([ids])
        logits = model(encoder_outputs=encoded, decoder_input_ids=known).logits[:, -1]
        ids.append(int(penalise(known, logits).argmax()))
    return ids[len(prompt_ids) :]
