"""The options of the prefix cache that engines of one machine share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from shmllm.config.options import Bytes, Free, OneOf, Section, option
from shmllm.errors import EngineStartError

Role = Literal["both", "prefill", "decode"]
Reads = Literal["auto", "in_place", "copy"]


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
        "Directory of a copy on disk of the shared cache, which outlives the machine's memory.",
        Free(),
        name="shared_kv_cache_path",
    )
    role: Role = option(
        "both",
        'What an engine of a pool does: "prefill" computes prompts into the shared cache, "decode" '
        "the rest of the requests.",
        OneOf(get_args(Role)),
        in_llm=False,
    )

    def check_role(self) -> None:
        """Raise EngineStartError if the engine has a role and no shared cache."""
        if self.role != "both" and self.num_bytes is None:
            raise EngineStartError(
                f"the role {self.role!r} needs a cache in which prompts reach the engines that "
                "decode: shared_kv_cache_bytes, such as --shared-kv-cache-bytes 1GiB"
            )
