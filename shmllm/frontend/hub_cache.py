"""Lists the models in the cache of the Hugging Face hub, without a network."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

_PREFIX = "models--"


@dataclass(frozen=True, slots=True)
class CachedModel:
    """A model in the cache.

    Attributes:
        name: its hub id.
        directory: the files of the revision that was used last.
        size_bytes: the space that all of its revisions take on disk.
    """

    name: str
    directory: Path
    size_bytes: int


def cached_names() -> list[str]:
    """The hub ids of the models in the cache, which may be incomplete there."""
    from huggingface_hub import constants

    found = Path(constants.HF_HUB_CACHE).glob(f"{_PREFIX}*")
    return sorted(path.name.removeprefix(_PREFIX).replace("--", "/") for path in found)


def cached_models() -> list[CachedModel]:
    """The models in the cache, by name. A model without a complete revision is left out."""
    from huggingface_hub import CacheNotFound, constants, scan_cache_dir

    try:
        repos = scan_cache_dir(constants.HF_HUB_CACHE).repos
    except CacheNotFound:
        return []
    found = []
    for repo in repos:
        if repo.repo_type == "model" and repo.revisions:
            last = max(repo.revisions, key=lambda each: (len(each.refs), each.last_modified))
            found.append(CachedModel(repo.repo_id, last.snapshot_path, repo.size_on_disk))
    return sorted(found, key=lambda each: each.name)
