"""The options that a front end reads itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shmllm.config.options import (
    Directory,
    Flag,
    Free,
    JsonObject,
    Number,
    Section,
    Text,
    Whole,
    option,
)
from shmllm.config.parallel import MOST_PROCESSES
from shmllm.errors import EngineStartError

Progress = Callable[[int, int], None]
"""Called with (done, total)."""


@dataclass(frozen=True, slots=True)
class FrontEndConfig(Section):
    """The options that the front end reads and does not send to the engine as they are."""

    model: str = option(
        "tiny", "Bundled name, Hugging Face model directory, GGUF file, or hub id.", Free()
    )
    tokenizer: str | None = option(
        None,
        "Directory or hub id of another tokenizer.",
        Free(),
        default_text="the model's",
    )
    revision: str | None = option(None, "Branch, tag or commit on the hub.", Text())
    tokenizer_revision: str | None = option(
        None,
        "Branch, tag or commit of a tokenizer on the hub.",
        Text(),
        default_text="revision",
        flag="",
    )
    hf_token: bool | str | None = option(
        None,
        "The token for the hub; True takes the stored one.",
        Text(or_flag=True),
        default_text="HF_TOKEN, or the stored one",
        flag="",
    )
    download_dir: str | None = option(
        None,
        "Directory that models of the hub are downloaded to and read from.",
        Directory(),
        default_text="the hub's cache",
        flag="",
    )
    skip_tokenizer_init: bool = option(
        False,
        "Load no tokenizer: prompts are token ids, and outputs have no text.",
        Flag(),
        flag="",
    )
    generation_config: str = option(
        "auto",
        'Where sampling defaults come from: "auto" reads the model\'s generation_config.json, '
        '"shmllm" does not.',
        Free(),
        flag="",
    )
    override_generation_config: dict[str, Any] | None = option(
        None,
        "Fields of generation_config.json that take the place of the model's, such as "
        '{"temperature": 0.6, "max_new_tokens": 512}.',
        JsonObject(),
        default_text="none",
        flag="",
    )
    stream_interval: int = option(
        1,
        "After how many new tokens of a request a stream yields its next output, unless its "
        "parameters say so.",
        Whole(),
        flag="",
    )
    default_mm_loras: dict[str, Any] | None = option(
        None,
        'Adapters of prompts with items that name none: {"audio": DIRECTORY}.',
        JsonObject(),
        default_text="none",
        flag="",
    )
    chat_template: Any = option(
        None,
        "The template of `chat` in place of the model's default: a file, the Jinja source, or the "
        "name of one of the model's templates.",
        Free(),
        default_text="the model's",
        flag="",
    )
    compilation_config: Any = option(
        None,
        "A mapping with `cudagraph_mode`, `cudagraph_capture_sizes` and "
        "`max_cudagraph_capture_size`: which CUDA graphs are captured.",
        Free(),
        flag="",
    )
    pooler_config: Any = option(
        None,
        "Defaults of `encode`, `embed` and `score`: a PoolerConfig or a dict.",
        Free(),
        flag="",
    )
    limit_mm_per_prompt: dict[str, Any] | None = option(
        None,
        'Most items of one prompt: {"image": 2, "audio": 1, "video": 1}; 0 allows none.',
        JsonObject(),
        default_text="999",
    )
    mm_processor_kwargs: dict[str, Any] | None = option(
        None,
        "How items are prepared where that differs from the model's preprocessor_config.json, "
        'such as {"max_pixels": 1003520}.',
        JsonObject(),
        default_text="the model's",
    )
    allowed_local_media_path: str = option(
        "",
        "Folder below which image_url, audio_url and video_url may name files as file:///...; "
        "empty: nowhere.",
        Free(),
        flag="",
    )
    media_io_kwargs: dict[str, Any] | None = option(
        None,
        'Which frames of encoded videos are used: {"video": {"num_frames": 32, "fps": 2}}; -1 sets '
        "no bound.",
        JsonObject(),
        default_text="those that the model's video processor chooses",
        flag="",
    )
    enable_mm_embeds: bool = option(
        False,
        "Take embeddings in place of images, sounds and videos, too.",
        Flag(),
        flag="",
    )
    structured_outputs_config: Any = option(
        None,
        "Defaults of structured outputs: a dict with `disable_any_whitespace` and "
        "`disable_additional_properties`.",
        Free(),
        flag="",
    )
    reasoning_parser: str = option(
        "auto",
        "How the replies of `chat` show reasoning; auto reads the chat template, and an empty text "
        "turns it off.",
        Free(),
        flag="",
    )
    reasoning_config: dict[str, Any] | None = option(
        None,
        "What begins reasoning, and what ends it when its thinking_token_budget is used: "
        '{"reasoning_start_str": ..., "reasoning_end_str": ...}.',
        JsonObject(),
        default_text="what reasoning_parser says",
        flag="",
    )
    tool_parser: str = option(
        "auto",
        "How they show tool calls; as for reasoning_parser.",
        Free(),
        flag="",
    )
    profiler_config: dict[str, Any] | None = option(
        None,
        'Where profiles are written, and of which steps: {"torch_profiler_dir": ..., '
        '"delay_iterations": 0, "max_iterations": 0}.',
        Free(),
        default_text="the working directory",
        flag="",
    )
    stat_loggers: Any = option(
        None,
        "Classes that get the engine's statistics, or functions that make such objects; those of "
        "installed plugins come first.",
        Free(),
        default_text="those of plugins",
        flag="",
    )
    stat_interval: float = option(
        10.0, "Seconds between two records of stat loggers.", Number(unit="seconds"), flag=""
    )
    speculative_config: Any = option(
        None,
        'Draft tokens that one step checks together, which changes no output: {"method": "ngram"}, '
        '"suffix" or "mtp", or {"model": ...}.',
        Free(),
        flag="--draft",
    )
    io_processor_plugin: str | None = option(
        None,
        'The installed plugin that makes prompts of {"data": ...} and results of outputs.',
        Free(),
        default_text="the one that config.json names",
        flag="",
    )
    data_parallel_size: int = option(
        1,
        "Engines that share the requests, each with the whole model. On a CPU they divide "
        "num_threads and kv_cache_memory_bytes.",
        Whole(1, MOST_PROCESSES),
        flag="--engines",
    )
    prefill_engines: int = option(
        0,
        "Engines of these that compute long prompts into the cache of shared_kv_cache_bytes, and "
        "leave the rest to the others.",
        Whole(0, MOST_PROCESSES - 1),
    )
    multiprocess: bool = option(
        True, "False runs the engine in the caller's process, for debugging.", Free(), flag=""
    )
    startup_timeout: float = option(
        600.0, "Seconds until the engine has to be ready.", Number(unit="seconds"), flag=""
    )
    on_load_progress: Progress | None = option(
        None,
        "Called with (bytes read, bytes in all) while the weights load.",
        Free(),
        flag="",
    )
    on_capture_progress: Progress | None = option(
        None,
        "Called with (sizes captured, sizes in all) while CUDA graphs are captured.",
        Free(),
        flag="",
    )

    def __post_init__(self) -> None:
        Section.__post_init__(self)
        if self.prefill_engines and self.prefill_engines >= self.data_parallel_size:
            count = self.data_parallel_size
            possible = f"0 to {count - 1} are possible" if count > 1 else "only 0 is possible"
            raise EngineStartError(
                f"prefill_engines {self.prefill_engines} leaves no engine that decodes: with "
                f"data_parallel_size {count} {possible}"
            )
