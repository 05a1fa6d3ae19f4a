"""Reads, checks and repeats the config that a run recorded in its folder.

`--config-dir <run> --config-name config` repeats a run. Hydra alone would use conf/config.yaml of the same name.
"""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from functools import cache
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from fedspa import __version__
from fedspa.config.checking import check_objects
from fedspa.config.plan import Plan, check
from fedspa.config.schema import ONE_EACH, SEVERAL
from fedspa.core.components import known_class
from fedspa.core.errors import UserError, brief
from fedspa.core.identity import CONFIG_HASH
from fedspa.core.paths import config_dir
from fedspa.core.roles import flat
from fedspa.core.settings import Config

NODE = "repeated_run"
"""The name of the repeated run's config in Hydra."""
KEYS = {"model": "model", **{group: group for group in ONE_EACH}, "metric": "metrics", "logger": "loggers"}
"""The part of the config that each group sets."""
OF_A_SWEEP = ("parent_run_id", "run_name")
"""Settings of loggers that a sweep sets for its jobs."""


def recorded_config(file: Path) -> dict[str, Any]:
    """The resolved config in a run's config.yaml. Raises `UserError` if it cannot be read."""
    try:
        config = OmegaConf.to_container(OmegaConf.load(file))
        if isinstance(config, dict):
            return config  # type: ignore[return-value]
        raise ValueError("it holds no settings")
    except (OSError, ValueError, YAMLError, OmegaConfBaseException) as error:
        raise UserError(f"{file} cannot be read ({brief(error)}): put it back as it was.") from error


def recorded_plan(file: Path, objects: Mapping[str, Any] | None = None) -> Plan:
    """The plan of a recorded config, without the place of its data and without its trackers.

    `objects`: the user's own objects in the run, as for `check`.

    Raises `UserError` for a config that this version does not know.
    """
    config = recorded_config(file) | {"loggers": {}}
    check_objects(config, objects or {})
    if isinstance(config.get("dataset"), dict) and "path" in config["dataset"]:
        config["dataset"] |= {"path": None}
    try:
        return check(OmegaConf.create(config), objects)
    except UserError as error:
        raise UserError(
            f"{file}, which {_writer(file.parent)} wrote, does not fit this version, {__version__}: {error}"
        ) from error


def settings_today(config: Mapping[str, Any], trusted: Sequence[str] = ()) -> dict[str, Any]:
    """The settings of a recorded config by dotted name, with today's defaults of those that its version did not know.

    So a new setting does not make a finished run another experiment. `trusted`: packages besides fedspa and plug-ins
    whose classes may be imported for their defaults.
    """
    found = _defaults(Config)
    metrics = config.get("metrics")
    named = (
        {f"metrics.{name}": part for name, part in metrics.items()} if isinstance(metrics, Mapping) else {}
    )
    for where, part in {**{group: config.get(group) for group in ONE_EACH}, **named}.items():
        kind = known_class(where, part.get("_target_"), trusted) if isinstance(part, Mapping) else None
        if isinstance(kind, type) and is_dataclass(kind):
            found = found | {f"{where}.{name}": value for name, value in _defaults(kind).items()}
    return found | flat(config)


@cache
def _defaults(kind: type) -> dict[str, Any]:
    """The defaults of a section or component by dotted name, as `build` fills them in."""
    values: Any = OmegaConf.to_container(OmegaConf.structured(kind))
    return {name: value for name, value in flat(values).items() if value != "???"}


def _writer(folder: Path) -> str:
    try:
        return f"fedspa {json.loads((folder / 'summary.json').read_text())['version']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another version of fedspa"


def repeating(options: Namespace) -> list[str]:
    """Further options for a command line that names a run's config as the main one; else none.

    The run's config is registered with Hydra. Single settings may follow. A group that is chosen again replaces the
    run's choice. Settings of the first run alone are left out: its place in a sweep, `resume`, the seed in its name.

    `options`: the command line as Hydra reads it.

    Raises `UserError` for a sweep, for a config of an unknown version, and for a main config that Hydra would ignore
    because conf/ has one of the same name.
    """
    folder, named = options.config_dir or options.config_path, options.config_name
    if folder is None:
        return []
    file = Path(folder) / f"{(named or 'config').removesuffix('.yaml')}.yaml"
    if not _is_of_a_run(file):
        ours = config_dir() / file.name
        if named and file.is_file() and ours.is_file() and not file.samefile(ours):
            raise UserError(
                f"--config-name={named} is the name of a file of conf/ too, which wins over {file}: give that another "
                "name."
            )
        _check_used(Path(folder), file)
        return []
    if options.multirun:
        raise UserError(f"-m cannot repeat the run of {file}: repeat it once for each value, as in seed=1.")
    recorded_plan(file)
    ConfigStore.instance().store(name=NODE, node=_repeated(recorded_config(file), options.overrides))
    # The last of several equal options counts.
    return [f"--config-dir={config_dir()}", f"--config-path={config_dir()}", f"--config-name={NODE}"]


def _check_used(folder: Path, file: Path) -> None:
    """Raise `UserError` for a folder without effect: it has neither the named config nor options."""
    if not folder.is_dir():
        raise UserError(
            f"--config-dir={folder} is not a folder: it must be a run's folder, or one laid out as conf/."
        )
    groups = {group.name for group in config_dir().iterdir() if group.is_dir()}
    if not file.is_file() and not groups & {inside.name for inside in folder.iterdir()}:
        raise UserError(
            f"--config-dir={folder} holds no {file.name}, and no folder of options as conf/ has them: it must be the "
            "folder of one run, as in outputs/<date>/<time>_<name>, or one laid out as conf/."
        )


def _is_of_a_run(file: Path) -> bool:
    try:
        with file.open(encoding="utf-8") as lines:
            return lines.readline().startswith(CONFIG_HASH)
    except (OSError, UnicodeDecodeError):
        return False


def _repeated(config: dict[str, Any], arguments: Sequence[str]) -> dict[str, Any]:
    """The main config of a repeated run."""
    for logger in config["loggers"].values():
        for key in OF_A_SWEEP:
            logger.pop(key, None)
    name = config.pop("name")
    if OmegaConf.create(config | {"name": Config.name}).name != name:  # the user chose the name
        seed = str(config["seed"])
        config["name"] = f"{name.removesuffix(seed)}${{seed}}" if name.endswith(f"seed{seed}") else name
    chosen = {argument.partition("=")[0] for argument in arguments} & KEYS.keys()
    groups: list[dict[str, Any]] = []
    for group in (group for group in KEYS if group in chosen):
        groups.append({group: [] if KEYS[group] in SEVERAL else None})
        del config[KEYS[group]]
    main = OmegaConf.to_container(OmegaConf.load(config_dir() / "config.yaml"))
    assert isinstance(main, dict)
    defaults = ["schema", "_self_", *groups, {"override hydra/sweeper": "study"}]
    return {"defaults": defaults, **config, "resume": None, "dry_run": False, "hydra": main["hydra"]}
