"""Composes a config with Hydra for the Python API, from the words that the command line would have."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString
from omegaconf import DictConfig, OmegaConf, open_dict

from fedspa.config.schema import ONE_EACH, register
from fedspa.core.errors import UserError, nearest, written
from fedspa.core.explaining import left_out
from fedspa.core.paths import config_dir

ELSEWHERE = {
    "hydra": "which is for the command line: fedspa.run takes folder=<where the run's files go>",
    "sweep": "which stands for many runs: call fedspa.run once for each, or python src/train.py -m",
}
"""Settings for the command line only, and the reason for each."""


def composed(
    words: Sequence[str], defaults: Sequence[str] = (), nodes: Mapping[str, Mapping[str, Any]] | None = None
) -> tuple[DictConfig, DictConfig]:
    """The unchecked config, and Hydra's own config, whose `run.dir` names the folder for the run's files.

    Args:
        words: settings in the form of the command line, each at most once.
        defaults: words that give way to the others.
        nodes: the config's records of Python objects, by group. In these groups nothing can be set.

    Raises `UserError`, and errors of Hydra and OmegaConf.
    """
    nodes = nodes or {}
    _check(words, nodes)
    # An option of these two groups may set other groups and sections too, and must not do so here.
    removed = [f"~{group}" for group in ("dataset", "method") if group in nodes]
    register()
    with _hydra_with_our_conf():
        whole = hydra.compose("config", [*removed, *defaults, *words], return_hydra_config=True)
    for group, node in nodes.items():
        OmegaConf.update(whole, group, dict(node), merge=False)
    config = whole.copy()
    with open_dict(config):
        del config["hydra"]
    return config, whole.hydra


def parsed(words: Sequence[str]) -> list[Override]:
    """The words in Hydra's form. Raises `UserError` for a group that does not get the name of an option, and for words
    that are no settings."""
    for word in words:
        if not isinstance(word, str) or "\0" in word:
            raise UserError(f"{word!r} is not a setting in words, such as 'dataset=digits'.")
    overrides = OverridesParser.create().parse_overrides(list(words))
    for override in overrides:
        group, word = override.key_or_group, str(override.input_line)
        if not group:
            raise UserError(f"{word} names no setting: it is written as key=value.")
        options = [file.stem for file in (config_dir() / group).glob("*.yaml")]
        if override.is_delete() and group in ("model", *ONE_EACH):
            raise left_out(group)
        if override.is_delete() or override.is_sweep_override() or not options:
            continue
        value = override.value()
        if isinstance(value, list) and group in ("model", *ONE_EACH):
            raise UserError(f"{word} is a list: {group} takes one option, as in {group}=<name>.")
        for option in value if isinstance(value, list) else [value]:
            if not isinstance(option, str) or option == "???":
                raise UserError(
                    f"{group}={written(option)} is not known: {nearest(written(option), options)}."
                )
    return overrides


def _check(words: Sequence[str], nodes: Mapping[str, Any]) -> None:
    """Raise `UserError` for words that only the command line has, for several values, and for a setting that is set
    twice or beside an object."""
    seen = set[str]()
    for override in parsed(words):
        key = override.key_or_group
        section = key.replace("/", ".").partition(".")[0]
        if section in ELSEWHERE:
            raise UserError(f"{override.input_line} sets {section}, {ELSEWHERE[section]}.")
        if override.is_sweep_override():
            raise several_values(str(override.input_line), "call fedspa.run once for each")
        if section in nodes:
            raise UserError(f"{key} has no effect beside an own {section}: leave it out.")
        if key in seen:
            raise UserError(f"{key} is set twice: leave one out.")
        seen.add(key)


def several_values(word: str, remedy: str) -> UserError:
    """The sentence about a word that gives one run several values, perhaps by a comma for a decimal point."""
    key, _, values = word.partition("=")
    usual = OmegaConf.select(composed([])[0], key.lstrip("+"))
    if isinstance(usual, float) and re.fullmatch(r"-?\d+,\d+", values):
        return UserError(f"{word} is two values: did you mean {values.replace(',', '.')}? (or {remedy})")
    no_list = isinstance(usual, bool | int | float)
    return UserError(f"{word} is several values: {remedy}{'' if no_list else ', or write a list as [a,b]'}.")


@contextmanager
def _hydra_with_our_conf() -> Iterator[None]:
    """Hydra with conf/. Afterwards the caller's own Hydra state is restored."""
    callers = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        with hydra.initialize_config_dir(str(config_dir()), version_base="1.3"):
            yield
    finally:
        if callers is not None:
            GlobalHydra.instance().initialize(callers)


def as_words(settings: Mapping[str, Any]) -> list[str]:
    """Settings by name in the form of the command line. A dict sets several settings of a section, an empty one none.

    Raises `UserError` for a value that a config cannot contain.
    """
    words = []
    for name, value in settings.items():
        own = isinstance(value, Mapping) and name not in ELSEWHERE
        items = {f"{name}.{key}": item for key, item in value.items()} if own else {name: value}
        words += [f"{key}={_spelled(key, item)}" for key, item in items.items()]
    return words


def _spelled(where: str, value: Any) -> str:
    """A value in Hydra's grammar. NumPy numbers become Python numbers, and paths become text."""
    if callable(item := getattr(value, "item", None)) and getattr(value, "ndim", None) == 0:
        value = item()
    match value:
        case None | bool():
            return {None: "null", True: "true", False: "false"}[value]
        case int() | float():
            return str(value)
        case str() | Path():
            return QuotedString(str(value), Quote.double).with_quotes()
        case list() | tuple():
            return f"[{','.join(_spelled(where, item) for item in value)}]"
        case Mapping():
            return f"{{{','.join(f'{key}:{_spelled(where, item)}' for key, item in value.items())}}}"
    raise UserError(
        f"{where}={value!r} is of type {type(value).__name__}: a setting is a number, a text, True, False, None, or a "
        "list or dict of these."
    )
