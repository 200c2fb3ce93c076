"""The options of the prefix cache that engines of one machine share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from shmllm.config.options import Bytes, Directory, OneOf, Section, option
from shmllm.errors import EngineStartError

Role = Literal["both", "prefill", "decode"]
Reads = Literal["auto", "in_place", "copy"]


DISK_FACTOR = 4
"""How much more there may be on disk than in shared memory."""


@dataclass(frozen=True, slots=True)
class SharedKVConfig(Section):
    """The prefix cache that engines of one machine share."""

    num_bytes: int | None = option(
        None,
        "Bytes of shared memory for full KV blocks, which other engines with the same weights, and "
        "the next start of this one, read.",
        Bytes(),
        name="shared_kv_cache_bytes",
        default_text="no shared cache",
    )
    reads: Reads = option(
        "auto",
        'How hits in the shared cache are used: "in_place" reads them where they lie, "copy" '
        "copies them into the engine's own cache; auto is in_place where that is possible.",
        OneOf(get_args(Reads)),
        name="shared_kv_cache_reads",
    )
    path: str | None = option(
        None,
        "Directory of a copy on disk of the shared cache, which outlives the machine's memory. "
        "Blocks are written there behind their computation.",
        Directory(),
        name="shared_kv_cache_path",
        default_text="no copy on disk",
    )
    path_bytes: int | None = option(
        None,
        "Most bytes of all files in shared_kv_cache_path; what was used longest ago gives way.",
        Bytes(),
        name="shared_kv_cache_path_bytes",
        default_text="four times shared_kv_cache_bytes",
    )
    role: Role = option(
        "both",
        'What an engine of a pool does: "prefill" computes prompts into the shared cache, "decode" '
        "the rest of the requests.",
        OneOf(get_args(Role)),
        in_llm=False,
    )

    @property
    def disk_bytes(self) -> int:
        """The most bytes of all files in `path`."""
        return self.path_bytes or DISK_FACTOR * (self.num_bytes or 0)

    def __post_init__(self) -> None:
        Section.__post_init__(self)
        if self.path is not None and self.num_bytes is None:
            raise EngineStartError(
                "shared_kv_cache_path is the directory of a copy of the shared KV cache, and this "
                "engine has none: pass shared_kv_cache_bytes, too, for example '1GiB'"
            )
        if self.reads != "auto" and self.num_bytes is None:
            raise EngineStartError(
                f"shared_kv_cache_reads {self.reads!r} says how a shared KV cache is read, and "
                "this engine has none: pass shared_kv_cache_bytes, too, for example '1GiB'"
            )
        if self.path_bytes is not None and self.path is None:
            raise EngineStartError(
                "shared_kv_cache_path_bytes is the limit of shared_kv_cache_path: pass both, or "
                "leave it out"
            )

    def check_role(self) -> None:
        """Raise EngineStartError if the engine has a role and no shared cache."""
        if self.role != "both" and self.num_bytes is None:
            raise EngineStartError(
                f"the role {self.role!r} needs a cache in which prompts reach the engines that "
                "decode: shared_kv_cache_bytes, such as --shared-kv-cache-bytes 1GiB"
            )
