"""The local cache of the Hugging Face hub, read as files: nothing is downloaded and no client is imported.

The cache is `$HF_HUB_CACHE`, else `$HF_HOME/hub`, else ~/.cache/huggingface/hub. A repository org/name lies in
models--org--name; refs/<revision> holds the commit, snapshots/<commit> the files.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from kvtool.errors import Missing


def hub_cache(env: Mapping[str, str] = os.environ) -> Path:
    if env.get("HF_HUB_CACHE"):
        return Path(env["HF_HUB_CACHE"])
    home = env.get("HF_HOME") or str(Path(env.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "huggingface")
    return Path(home) / "hub"


def hub_snapshot(recipe: str, repo: str, revision: str, cache: Path | None = None) -> Path:
    """The directory of `repo` at `revision` (a branch, a tag or a commit) in the cache.

    Raises:
        Missing: it is not there; the sentence has the line that brings it.
    """
    there = (cache or hub_cache()) / f"models--{repo.replace('/', '--')}"
    reference = there / "refs" / revision
    commit = reference.read_text(encoding="utf-8").strip() if reference.is_file() else revision
    found = there / "snapshots" / commit
    if (found / "config.json").is_file():
        return found
    raise Missing(
        f"recipe {recipe}: the checkpoint {repo} (revision {revision}) is not in {cache or hub_cache()}; bring it "
        f"with: hf download {repo} --revision {revision}, or name a directory that holds it with --checkpoint"
    )
