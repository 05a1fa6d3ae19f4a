"""Makes a config from words (`"dataset=digits"`) and Python values (`training={"lr": 0.05}`), for the Python API."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict

from fedspa.config.plan import ONE_EACH, SEVERAL, register
from fedspa.config.recorded import KEYS
from fedspa.core.errors import UserError, nearest, written
from fedspa.core.paths import config_dir
from fedspa.core.settings import Config

GROUPS = (*KEYS, "experiment")
"""The groups: each chooses from a folder of conf/."""
SECTIONS = {
    *("model", *ONE_EACH, *SEVERAL),
    *(field.name for field in fields(Config) if is_dataclass(field.default_factory)),
}
"""The sections: parts of the config that contain settings."""
ELSEWHERE = {
    "hydra": "which is for the command line: fedspa.run takes folder=<where the run's files go>",
    "sweep": "which stands for many runs: call fedspa.run once for each, or python src/train.py -m",
}
"""Settings for the command line only, and the reason for each."""


def composed(
    words: Sequence[str], settings: Mapping[str, Any], nodes: Mapping[str, Mapping[str, Any]] | None = None
) -> tuple[DictConfig, DictConfig]:
    """The unchecked config, and Hydra's own config, whose `run.dir` names the folder for the run's files.

    Args:
        words: settings in the form of the command line.
        settings: values by name; a dict sets several of a section. They replace values of a chosen option.
        nodes: the config's records of Python objects, by group. In these groups nothing is chosen.

    Raises `UserError`, and errors of Hydra and OmegaConf.
    """
    values, choices = _split(settings)
    keys, nodes = {_key(word) for word in words}, nodes or {}
    for key in (*nodes, *values, *(word.partition("=")[0] for word in choices)):
        if key in keys:
            raise UserError(f"{key} is set twice, in words and as a keyword: leave one out.")
    for key in keys:
        if (group := key.partition(".")[0]) in nodes:
            raise UserError(f"{key} is no setting of an own {group}: leave it out, or give it as a keyword.")
    if "logger" not in keys | settings.keys():
        choices.append("logger=none")
    # An option of these two groups may set other groups and sections too, and must not do so here.
    choices += [f"~{group}" for group in ("dataset", "method") if group in nodes]
    register()
    with _hydra_with_our_conf():
        whole = hydra.compose("config", [*words, *choices], return_hydra_config=True)
    for group, node in nodes.items():
        OmegaConf.update(whole, group, dict(node), merge=False)
    for key, value in values.items():
        OmegaConf.update(whole, key, value)
    config = whole.copy()
    with open_dict(config):
        del config["hydra"]
    return config, whole.hydra


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


def _key(word: object) -> str:
    """The key of a word's setting. Raises `UserError` if the word is not a setting."""
    if not isinstance(word, str):
        raise UserError(
            f"{word!r} is not a setting: write it in words, as in 'dataset=digits', or as a keyword, as in "
            "dataset='digits'."
        )
    if word.startswith("-"):
        raise UserError(f"{word} is for the command line: fedspa.run takes settings, as in 'dataset=digits'.")
    try:
        override = OverridesParser.create().parse_override(word)
    except HydraException as error:
        raise UserError(
            f"{word} cannot be read: write key=value, or give the value as a keyword, as in "
            "training={'lr': 0.05}."
        ) from error
    if override.is_sweep_override():
        raise UserError(f"{word} is several values: call fedspa.run once for each, or write a list as [a,b].")
    _refuse(override.key_or_group, word)
    return override.key_or_group


def _refuse(key: str, text: str) -> None:
    """Raise `UserError` for settings that only the command line has."""
    for part, reason in ELSEWHERE.items():
        if key == part or key.startswith((f"{part}.", f"{part}/")):
            raise UserError(f"{text} sets {part}, {reason}.")


def _split(settings: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The values of single settings by dotted name, and the choices in groups as words."""
    values: dict[str, Any] = {}
    choices: list[str] = []
    for name, value in settings.items():
        _refuse(name, f"{name}={value!r}")
        if name in GROUPS and not isinstance(value, Mapping):
            choices.append(_choice(name, value))
        elif name in SECTIONS and isinstance(value, Mapping):
            values |= {f"{name}.{key}": _plain(f"{name}.{key}", item) for key, item in value.items()}
        elif name in SECTIONS:
            raise UserError(
                f"{name}={value!r} is no section: set what is in it by a dict, as in {name}={{...}}."
            )
        else:
            values[name] = _plain(name, value)
    return values, choices


def _choice(group: str, value: Any) -> str:
    """A choice from a group as a word. Raises `UserError` for a value that is not the name of an option."""
    names = list(value) if isinstance(value, list | tuple) else [value]
    for name in names:
        missing = name is None and group == "experiment"
        if not missing and (not isinstance(name, str) or not name or set(name) & set("[]{},= '\"$")):
            options = [file.stem for file in (config_dir() / group).glob("*.yaml")]
            raise UserError(f"{group}={value!r} is not known: {nearest(str(name), options)}.")
    return f"{group}={written(names if isinstance(value, list | tuple) else value)}"


def _plain(where: str, value: Any) -> Any:
    """A value as configs contain it: NumPy numbers become Python numbers, and paths become text.

    Raises `UserError` for any other object.
    """
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _plain(f"{where}.{key}", item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(where, item) for item in value]
    if callable(item := getattr(value, "item", None)) and getattr(value, "ndim", None) == 0:
        return item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise UserError(
        f"{where}={value!r} is of type {type(value).__name__}: a setting is a number, a text, True, False, None, or a "
        "list or dict of these."
    )
