"""Any image data set of the Hugging Face hub, by its name: found, downloaded once, and pinned to its revision.

Both caches are the libraries' own: the files in HF_HUB_CACHE, the tables made of them in HF_DATASETS_CACHE (both lie
in HF_HOME). A revision that was read once needs no network any more.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from fedspa.core.errors import UserError, brief, nearest
from fedspa.data.tabular import TableImages

if TYPE_CHECKING:
    import datasets

_builders: dict[tuple[str | None, ...], datasets.DatasetBuilder] = {}

COMMIT = re.compile("[0-9a-f]{40}")
SUGGESTIONS = 200
"""Of an organisation's data sets, so many are compared with a name that is not one of them."""


@dataclass(kw_only=True)
class HubTable(TableImages):
    """`name` is the data set's on the hub: organisation/name."""

    subset: str | None = None
    """The hub's "config" or "subset" of a data set that has several; null: the only one, or the default."""
    revision: str | None = None
    """A branch, a tag or a commit; null: the newest. A run records the commit."""

    @property
    def origin(self) -> str:
        return f"dataset.name={self.name}"

    @property
    def key(self) -> tuple[str | None, ...]:
        return ("hub", self.name, self.subset, self.revision)

    def pinned(self) -> Self:
        if not self.name:
            raise UserError("dataset=hub needs dataset.name=<organisation/name>, such as ylecun/mnist.")
        if self.subset and COMMIT.fullmatch(self.revision or ""):
            return self
        commit = commit_of(self.name, self.revision)
        pinned = replace(self, revision=commit)
        return replace(pinned, subset=pinned._builder().config.name)

    def open(self) -> Mapping[str, datasets.Dataset]:
        builder = self._builder()
        try:
            builder.download_and_prepare()
            return builder.as_dataset()
        except Exception as error:  # the network, the hub and the disk fail in many ways
            raise UserError(
                f"{self.origin} cannot be downloaded ({_reason(error)}): whole files stay, and the same command "
                "goes on with the others."
            ) from error

    def _builder(self) -> datasets.DatasetBuilder:
        """What reads the pinned revision: from the cache where that has it, else through the network."""
        if self.key not in _builders:
            _builders[self.key] = self._new_builder()
        return _builders[self.key]

    def _new_builder(self) -> datasets.DatasetBuilder:
        from datasets import load_dataset_builder

        assert self.revision is not None
        kept = cached_subsets(self.name, self.revision)
        if self.subset in kept:
            return _from_cache(self.name, kept[self.subset])
        problem: Exception | None = None
        try:
            builder = load_dataset_builder(self.name, self.subset, revision=self.revision)
            if builder.hash == self.revision:
                return builder
        except Exception as error:  # as above
            problem = error
        if self.subset is None and len(kept) == 1:  # out of reach, but here is what the network would give
            return _from_cache(self.name, next(iter(kept.values())))
        if isinstance(problem, ValueError) and (told := self._wrong_subset()):
            raise told from problem
        reason = f" ({_reason(problem)})" if problem else ""
        raise UserError(
            f"{self.origin} cannot be had in revision {self.revision}{reason}: it is not in the cache, and the hub "
            "does not give it."
        ) from problem

    def _wrong_subset(self) -> UserError | None:
        from datasets import get_dataset_config_names

        try:
            valid = get_dataset_config_names(self.name, revision=self.revision)
        except Exception:  # then the first reason is the one to tell
            return None
        if self.subset is None:
            return UserError(
                f"{self.origin} has several subsets: set dataset.subset to one of {', '.join(valid)}."
            )
        if self.subset in valid:
            return None
        return UserError(
            f"dataset.subset={self.subset} is no subset of {self.origin}: {nearest(self.subset, valid)}."
        )


@lru_cache
def commit_of(name: str, revision: str | None) -> str:
    """The commit that a revision of a data set stands for; out of the hub's reach, the one it last stood for.

    Asked once in a process, so that all jobs of a sweep have the same one. Raises `UserError` where there is no such
    data set or revision, or it may not be seen.
    """
    from huggingface_hub import HfApi
    from huggingface_hub import errors as hub

    _quiet()
    try:
        return HfApi().resolve_revision(name, repo_type="dataset", revision=revision).resolved
    except hub.GatedRepoError as error:
        raise UserError(
            f"dataset.name={name} is gated: ask for access on its page of the hub, and log in with hf auth login or "
            "HF_TOKEN."
        ) from error
    except hub.RevisionNotFoundError as error:
        raise UserError(f"dataset.revision={revision} is no branch, tag or commit of {name}.") from error
    except hub.RepositoryNotFoundError as error:
        raise UserError(
            f"dataset.name={name} is no data set of the hub that you may see{_suggestion(name)}."
        ) from error
    except hub.HFValidationError as error:
        raise UserError(
            f"dataset.name={name} is no name on the hub: it must be <organisation/name>, such as ylecun/mnist."
        ) from error
    except Exception as error:  # no network, or a hub that is down
        raise UserError(
            f"dataset.name={name} is not in the cache, and the hub cannot be reached ({_reason(error)}): check the "
            "network, or HF_HUB_OFFLINE."
        ) from error


def _quiet() -> None:
    """Have the libraries tell of what goes wrong, once: they print by themselves, and each request besides."""
    for library in ("huggingface_hub", "datasets"):
        logging.getLogger(library).propagate = False
    for library in ("httpx", "httpx2"):
        logging.getLogger(library).setLevel(logging.WARNING)
    logging.getLogger("huggingface_hub.repocard").setLevel(logging.ERROR)  # many data sets have no metadata


def _suggestion(name: str) -> str:
    """The end of the sentence about a name that the hub does not know."""
    from huggingface_hub import HfApi

    organisation, _, rest = name.partition("/")
    try:
        found = HfApi().list_datasets(author=organisation, limit=SUGGESTIONS) if rest else []
        names = [info.id for info in found]
    except Exception:  # it is only a hint
        names = []
    close = nearest(name, names) if names else ""
    if close.startswith("did you mean"):
        return f" ({close.partition(' (valid')[0]})"
    return " (private ones need hf auth login or HF_TOKEN)"


def cached_subsets(name: str, commit: str) -> dict[str | None, tuple[str, str, str]]:
    """The subsets of a data set in this revision that were read before: (subset, version, commit) by subset."""
    from datasets import config
    from datasets.naming import camelcase_to_snakecase

    organisation, _, rest = name.rpartition("/")
    folder = "___".join([*filter(None, [organisation]), camelcase_to_snakecase(rest)])
    found = Path(config.HF_DATASETS_CACHE).expanduser().glob(f"{folder}/*/*/{commit}/dataset_info.json")
    places = [file.parent.parts[-3:] for file in found]
    return {subset: (subset, version, commit) for subset, version, commit in places}


def _from_cache(name: str, place: tuple[str, str, str]) -> datasets.DatasetBuilder:
    """What reads a table that was made before; it asks nobody."""
    from datasets.packaged_modules.cache.cache import Cache

    subset, version, commit = place
    return Cache(
        dataset_name=name.rpartition("/")[2], repo_id=name, config_name=subset, version=version, hash=commit
    )


def _reason(error: BaseException) -> str:
    """What went wrong at the bottom: the libraries wrap it in sentences of their own."""
    told: Any = error
    while told.__cause__ is not None:
        told = told.__cause__
    return brief(told)
