"""Small random encoder-decoders of sounds of any length, made by transformers, and the tokens they
generate."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import transformers
from support.encoder_texts import NUM_TOKENS
from support.one_thread import one_thread
from support.vision_models import draw_weights, tokenizer_with
from support.whisper_models import RATE
from torch import Tensor

Samples = npt.NDArray[np.float32]
BEGIN, END = "<s>", "</s>"


class Recipe(NamedTuple):
    """
    Attributes:
        kind: the type of the model.
        fields: those of its configuration.
        settings: those of its feature extractor.
        prompt: the text that its decoder begins with.
        most_seconds: the length of the longest sound.
        inputs: what transformers' model takes for a sound.
        language: of its transcripts.
    """

    kind: str
    fields: dict[str, Any]
    settings: dict[str, Any]
    prompt: str
    most_seconds: float
    inputs: Callable[[Samples], dict[str, Tensor]]
    language: str | None = None


_MOONSHINE: dict[str, Any] = {
    "hidden_size": 72,
    "intermediate_size": 96,
    "encoder_num_hidden_layers": 2,
    "decoder_num_hidden_layers": 3,
    "encoder_num_attention_heads": 2,
    "decoder_num_attention_heads": 2,
    "max_position_embeddings": 64,
    "decoder_start_token_id": 300,
}
_WAVES: dict[str, Any] = {
    "feature_extractor_type": "Wav2Vec2FeatureExtractor",
    "do_normalize": False,
    "return_attention_mask": True,
}


def _waves(sound: Samples) -> dict[str, Tensor]:
    own = {name: value for name, value in _WAVES.items() if not name.endswith("type")}
    extractor = transformers.Wav2Vec2FeatureExtractor(**own)
    found = extractor([sound], sampling_rate=RATE, padding=True, return_tensors="pt")
    return dict(found)


RECIPES: dict[str, Recipe] = {
    "moonshine": Recipe("moonshine", _MOONSHINE, _WAVES, BEGIN, 64, _waves),
    "moonshine with biases": Recipe(
        "moonshine",
        _MOONSHINE | {"attention_bias": True, "rope_parameters": {"rope_theta": 500.0}},
        _WAVES,
        BEGIN,
        64,
        _waves,
    ),
}
FIRST = {"moonshine"}
"""Those whose kernels differ."""


def make_sound_encoder(directory: Path, name: str, **fields: Any) -> Any:
    """A random float32 model of transformers' in `directory`.

    Args:
        directory: where its files are written to.
        name: of RECIPES.
        fields: further fields of config.json.
    """
    torch.manual_seed(11)
    recipe = RECIPES[name]
    options = {"vocab_size": NUM_TOKENS, **recipe.fields, **fields}
    config = transformers.AutoConfig.for_model(recipe.kind, **options)
    model = transformers.AutoModelForSpeechSeq2Seq.from_config(config).eval()
    draw_weights(model, 1.0)
    with torch.no_grad():
        for parameter in model.parameters():
            # so that the sound and the text decide, and not the biases
            parameter.mul_(3 if parameter.ndim > 1 else 0.5)
    model.save_pretrained(directory)
    tokenizer = tokenizer_with((BEGIN, END), first_mark=300)
    tokenizer.save(str(directory / "tokenizer.json"))
    for file, content in {
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast"},
        "preprocessor_config.json": recipe.settings,
    }.items():
        (directory / file).write_text(json.dumps(content))
    return model


@one_thread()
@torch.inference_mode()
def reference_tokens(
    model: Any,
    name: str,
    prompt_ids: Sequence[int],
    sound: Samples,
    max_new_tokens: int = 12,
    penalty: float = 1.0,
) -> list[int]:
    """transformers' most likely tokens, one after the other; nothing but their number ends them.

    Args:
        model: what `make_sound_encoder` returned.
        name: of RECIPES.
        prompt_ids: what the decoder begins with.
        sound: the sound, with RATE samples a second.
        max_new_tokens: their number.
        penalty: the repetition penalty.
    """
    ids = list(prompt_ids)
    penalise = transformers.RepetitionPenaltyLogitsProcessor(penalty)
    inputs = RECIPES[name].inputs(sound)
    encoded = model.get_encoder()(**inputs)
    for _ in range(max_new_tokens):
        known = torch.tensor([ids])
        logits = model(encoder_outputs=encoded, decoder_input_ids=known).logits[:, -1]
        ids.append(int(penalise(known, logits).argmax()))
    return ids[len(prompt_ids) :]
