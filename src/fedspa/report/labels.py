"""The names in print of methods, searchers, data sets and partitions."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from fedspa.core.components import known_class

DATASETS = {
    "emnist_letters": "EMNIST-L",
    "cifar10": "CIFAR-10",
    "cifar100": "CIFAR-100",
    "digits": "Digits",
    "mnist": "MNIST",
    "fashion_mnist": "Fashion-MNIST",
    "synthetic": "Synthetic",
}
PARTITIONS = {
    "iid": "IID",
    "dirichlet": "Dirichlet {gamma}",
    "dirichlet_balanced": "balanced Dirichlet {gamma}",
    "shards": "{classes_per_client} classes a client",
}


def component(group: str, config: Mapping[str, Any]) -> str:
    """A method or searcher in print, by its name in the config, and the `label` or the name of its class.

    pFedMe for pfedme, FedSpa head for fedspa_head, and for some FedAvg FedAvgM, LG-FedAvg, FedPer, FedBN. A report runs
    no code of packages that only a run's config trusts: their classes are known by name.
    """
    name, target = str(config["name"]), str(config.get("_target_") or "")
    own = target.rpartition(".")[2]
    if kind := known_class(group, target):
        own = vars(kind).get("label", own)
    if slug(name).replace("-", "") != slug(own).replace("-", ""):
        own = " ".join(_capitals(word, own) for word in name.split("_"))
    return re.sub("(?<=[A-Za-z]{2})(?=Fed)", "-", own)


def _capitals(word: str, own: str) -> str:
    before, base, after = word.partition(own.lower()) if own else (word, "", "")
    if base:
        return before.upper() + own + after.capitalize()
    fed, rest = word[:3], word[3:]
    if fed != "fed":
        return word
    return fed.capitalize() + (rest.capitalize() if set(rest) & set("aeiou") else rest.upper())


def partition(name: str, options: Mapping[str, Any]) -> str:
    """A partition in print, such as `Dirichlet 0.3`. `options`: its settings."""
    try:
        return PARTITIONS.get(name, name).format(**options)
    except KeyError:
        return name


def slug(text: str) -> str:
    """A text as a file's name or an anchor."""
    return "-".join(re.findall(r"[^\W_]+(?:\.[0-9]+)?", text.lower()))
