"""Data sets of the Hugging Face hub by name: found, downloaded once, and pinned to a revision.

Both caches are the libraries' own: the files in HF_HUB_CACHE, the tables made of them in HF_DATASETS_CACHE (both lie
in HF_HOME). A revision that was read once needs no network any more.
"""

from __future__ import annotations

import logging
import re
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedspa.core.errors import UserError, brief, nearest, written

if TYPE_CHECKING:
    import datasets

COMMIT = re.compile("[0-9a-f]{40}")


@lru_cache
def commit_of(name: str, revision: str | None, origin: str) -> str:
    """The commit that a revision of a data set stands for; out of the hub's reach, the one it last stood for.

    Asked once in a process, so that all jobs of a sweep have the same one. Raises `UserError` where there is no such
    data set or revision, or it may not be seen.
    """
    from huggingface_hub import HfApi
    from huggingface_hub import errors as hub

    # The libraries print what goes wrong by themselves, and each request besides: it is to be said once.
    for library in ("huggingface_hub", "datasets"):
        logging.getLogger(library).propagate = False
    for library in ("httpx", "httpx2"):
        logging.getLogger(library).setLevel(logging.WARNING)
    logging.getLogger("huggingface_hub.repocard").setLevel(logging.ERROR)  # many data sets have no metadata
    if COMMIT.fullmatch(revision or ""):
        return str(revision)
    reasons: dict[type[Exception], str] = {
        hub.GatedRepoError: f"{origin} is gated: ask for access on its page of the hub, and log in with hf auth login "
        "or HF_TOKEN.",
        hub.RevisionNotFoundError: f"dataset.revision={revision} is no branch, tag or commit of {name}.",
        hub.RepositoryNotFoundError: f"{origin} is no data set of the hub that you may see (private ones need hf auth "
        "login or HF_TOKEN).",
        hub.HFValidationError: f"{origin} is no name on the hub: it must be <organisation/name>, such as "
        "ylecun/mnist.",
    }
    try:
        return str(HfApi().resolve_revision(name, repo_type="dataset", revision=revision).resolved)
    except Exception as error:
        known = (sentence for kind, sentence in reasons.items() if isinstance(error, kind))
        other = (
            f"{origin} is not in the cache, and the hub cannot be reached ({_reason(error)}): check the network, or "
            "HF_HUB_OFFLINE, or set dataset.path to a folder with its files."
        )
        raise UserError(next(known, other)) from error


def pinned(name: str, subset: str | None, revision: str | None, origin: str) -> tuple[str, str]:
    """The subset and the commit of a data set. If both are given, the hub is not asked. Raises `UserError`."""
    if subset and COMMIT.fullmatch(revision or ""):
        return subset, str(revision)
    commit = commit_of(name, revision, origin)
    return builder(name, subset, commit, origin).config.name, commit


def open_tables(
    name: str, subset: str | None, revision: str | None, origin: str
) -> dict[str, datasets.Dataset]:
    """The splits by name. Raises `UserError` if they are not in the cache and cannot be downloaded."""
    found = builder(name, subset, commit_of(name, revision, origin), origin)
    try:
        found.download_and_prepare()
        return dict(found.as_dataset())
    except Exception as error:  # the network, the hub and the disk fail in many ways
        raise UserError(
            f"{origin} cannot be downloaded ({_reason(error)}): whole files stay, and the same command goes on "
            "with the others."
        ) from error


@lru_cache
def builder(name: str, subset: str | None, commit: str, origin: str) -> datasets.DatasetBuilder:
    """A reader of a revision: from the cache where that has it, else through the network.

    Raises `UserError` if it is neither in the cache nor on the hub, or has no such subset.
    """
    from datasets import get_dataset_config_names, load_dataset_builder
    from datasets.packaged_modules.cache.cache import Cache

    kept = _cached_subsets(name, commit)

    def from_cache(subset: str) -> datasets.DatasetBuilder:
        short = name.rpartition("/")[2]
        return Cache(dataset_name=short, repo_id=name, config_name=subset, version=kept[subset], hash=commit)

    if subset in kept:
        return from_cache(str(subset))
    valid, reason = [], "the hub gives another revision"
    try:
        found = load_dataset_builder(name, subset, revision=commit)
        if found.hash == commit:
            return found
    except Exception as error:  # as above
        reason = _reason(error)
        if isinstance(error, ValueError):
            with suppress(Exception):  # then the first reason is the one to tell
                valid = get_dataset_config_names(name, revision=commit)
    if subset is None and len(kept) == 1:  # out of reach, but here is what the network would give
        return from_cache(next(iter(kept)))
    if valid and subset not in valid:
        given = written(subset)
        raise UserError(f"dataset.subset={given} is no subset of {origin}: {nearest(given, valid)}.")
    raise UserError(f"{origin} has no revision {commit} to read: it is not in the cache, and {reason}.")


def _cached_subsets(name: str, commit: str) -> dict[str, str]:
    """The version of each subset of a data set in this revision that was read before."""
    from datasets import config
    from datasets.naming import camelcase_to_snakecase

    organisation, _, rest = name.rpartition("/")
    folder = "___".join([*filter(None, [organisation]), camelcase_to_snakecase(rest)])
    found = Path(config.HF_DATASETS_CACHE).expanduser().glob(f"{folder}/*/*/{commit}/dataset_info.json")
    return {file.parts[-4]: file.parts[-3] for file in found}


def _reason(error: BaseException) -> str:
    """The first cause of an error: the libraries wrap it in further errors."""
    cause: Any = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    return brief(cause)
