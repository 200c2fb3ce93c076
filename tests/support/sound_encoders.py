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

from shmllm.frontend.transcription.questions import QUESTIONS

Samples = npt.NDArray[np.float32]
BEGIN, END = "<s>", "</s>"
TASK = QUESTIONS["CanaryForConditionalGeneration"].begin_of("en")


class Recipe(NamedTuple):
    """
    Attributes:
        kind: the type of the model.
        fields: those of its configuration.
        settings: those of its feature extractor.
        prompt: the tokens that its decoder begins with, with spaces between them.
        most_seconds: the length of the longest sound.
        inputs: what transformers' model takes for a sound.
        language: of its transcripts.
        seed: of its weights, with which it does not write the same of each sound, or nothing.
    """

    kind: str
    fields: dict[str, Any]
    settings: dict[str, Any]
    prompt: str
    most_seconds: float
    inputs: Callable[[Samples], dict[str, Tensor]]
    language: str | None = None
    seed: int = 11

    @property
    def text(self) -> str:
        """The text that its decoder begins with."""
        return "".join(self.prompt.split())


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


_PARAKEET: dict[str, Any] = {
    "model_type": "parakeet_encoder",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "num_mel_bins": 16,
    "subsampling_conv_channels": 8,
    "scale_input": False,
}
_DECODER: dict[str, Any] = {
    "vocab_size": NUM_TOKENS,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}
_COHERE: dict[str, Any] = _DECODER | {
    "encoder_config": _PARAKEET | {"hidden_size": 48, "subsampling_factor": 4},
    "num_key_value_heads": 2,
}
_CANARY: dict[str, Any] = {
    "encoder_config": _PARAKEET,
    "decoder_config": _DECODER,
    "decoder_start_token_id": 300,
    "tie_word_embeddings": False,  # tied random ones repeat one token
}
_PLAIN: dict[str, Any] = _CANARY | {
    "encoder_config": _PARAKEET
    | {"attention_bias": False, "convolution_bias": False, "scale_input": True},
    "decoder_config": _DECODER | {"attention_bias": False, "hidden_act": "gelu"},
}
_OF_PARAKEET = {"feature_extractor_type": "ParakeetFeatureExtractor", "feature_size": 16}
_OF_COHERE = {"feature_extractor_type": "CohereAsrFeatureExtractor", "feature_size": 16}


def parakeet_inputs(sound: Samples) -> dict[str, Tensor]:
    extractor = transformers.ParakeetFeatureExtractor(feature_size=16)
    return dict(extractor(sound, sampling_rate=RATE, return_tensors="pt"))


def _cohere(sound: Samples) -> dict[str, Tensor]:
    extractor = transformers.CohereAsrFeatureExtractor(feature_size=16)
    found = dict(extractor(sound, sampling_rate=RATE, return_tensors="pt"))
    del found["audio_chunk_index"]
    return found


RECIPES: dict[str, Recipe] = {
    "cohere_asr": Recipe("cohere_asr", _COHERE, _OF_COHERE, f"▁ {TASK}", 35, _cohere, "en", 14),
    "canary": Recipe("canary", _CANARY, _OF_PARAKEET, TASK, 40, parakeet_inputs, "en"),
    "canary without biases": Recipe(
        "canary", _PLAIN, _OF_PARAKEET, TASK, 40, parakeet_inputs, "en", 17
    ),
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
FIRST = {"moonshine", "canary"}
"""Those whose kernels differ."""


def make_sound_encoder(directory: Path, name: str, **fields: Any) -> Any:
    """A random float32 model of transformers' in `directory`.

    Args:
        directory: where its files are written to.
        name: of RECIPES.
        fields: further fields of config.json.
    """
    recipe = RECIPES[name]
    torch.manual_seed(recipe.seed)
    options = {"vocab_size": NUM_TOKENS, **recipe.fields, **fields}
    config = transformers.AutoConfig.for_model(recipe.kind, **options)
    model = transformers.AutoModelForSpeechSeq2Seq.from_config(config).eval()
    draw_weights(model, 1.0)
    with torch.no_grad():
        for key, buffer in model.named_buffers():  # norms by fixed numbers
            if key.endswith(("running_mean", "running_var")):
                buffer.uniform_(0.5, 1.5)
        for parameter in model.parameters():
            # so that the sound and the text decide, and not the biases
            parameter.mul_(3 if parameter.ndim > 1 else 0.5)
    model.save_pretrained(directory)
    marks = dict.fromkeys([*recipe.prompt.split(), END])
    tokenizer = tokenizer_with(tuple(marks), first_mark=300)
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
