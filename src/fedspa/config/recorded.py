"""The config that a run recorded in its folder: read again, checked, and run once more.

`--config-dir <run> --config-name config` repeats a run. Hydra alone would take conf/config.yaml, of the same name.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from fedspa import __version__
from fedspa.config.plan import ONE_EACH, SEVERAL, Plan, check
from fedspa.core.errors import UserError, brief
from fedspa.core.identity import CONFIG_HASH
from fedspa.core.paths import config_dir
from fedspa.core.settings import Config

NODE = "repeated_run"
"""The name under which Hydra finds the config of the run to repeat."""
KEYS = {"model": "model", **{group: group for group in ONE_EACH}, "metric": "metrics", "logger": "loggers"}
"""The part of the config that each group fills."""
OF_A_SWEEP = ("parent_run_id", "run_name")
"""What a sweep sets in its jobs' loggers."""


def recorded_config(file: Path) -> dict[str, Any]:
    """The resolved config in a run's config.yaml. Raises `UserError` where it cannot be read."""
    try:
        config = OmegaConf.to_container(OmegaConf.load(file))
        if isinstance(config, dict):
            return config  # type: ignore[return-value]
        raise ValueError("it holds no settings")
    except (OSError, ValueError, YAMLError, OmegaConfBaseException) as error:
        raise UserError(f"{file} cannot be read ({brief(error)}): put it back as it was.") from error


def recorded_plan(file: Path) -> Plan:
    """The plan of a recorded config, without what no model needs: its data's place, and what followed the run.

    Raises `UserError` for a config that this version does not know.
    """
    config = recorded_config(file) | {"loggers": {}}
    if isinstance(config.get("dataset"), dict) and "path" in config["dataset"]:
        config["dataset"] |= {"path": None}
    try:
        return check(OmegaConf.create(config))
    except UserError as error:
        raise UserError(
            f"{file}, which {_writer(file.parent)} wrote, does not fit this version, {__version__}: {error}"
        ) from error


def _writer(folder: Path) -> str:
    try:
        return f"fedspa {json.loads((folder / 'summary.json').read_text())['version']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another version of fedspa"


def repeating(arguments: Sequence[str]) -> list[str]:
    """The command line; where it names a run's config for the main one, that config is made known to Hydra.

    Single settings may follow. A group that is chosen again replaces what the run has of it. What belongs to the
    first run alone is left out: its place in a sweep, `resume`, and in its name the seed.

    Raises `UserError` for a sweep, for a config of a version that is not understood, and for a main config that would
    be passed over since conf/ has one of that name.
    """
    rest = list(arguments)
    folder = _taken(rest, "--config-dir", "-cd") or _taken(rest, "--config-path", "-cp")
    if folder is None:
        return list(arguments)
    named = _taken(rest, "--config-name", "-cn")
    file = Path(folder) / f"{(named or 'config').removesuffix('.yaml')}.yaml"
    if not _is_of_a_run(file):
        ours = config_dir() / file.name
        if named and file.is_file() and ours.is_file() and not file.samefile(ours):
            raise UserError(
                f"--config-name={named} is the name of a file of conf/ too, which wins over {file}: give that another "
                "name."
            )
        _check_used(Path(folder), file)
        return list(arguments)
    if {"-m", "--multirun"} & set(rest):
        raise UserError(f"-m cannot repeat the run of {file}: repeat it once for each value, as in seed=1.")
    recorded_plan(file)
    ConfigStore.instance().store(name=NODE, node=_repeated(recorded_config(file), rest))
    return ["--config-name", NODE, *rest]


def _check_used(folder: Path, file: Path) -> None:
    """Raise `UserError` for a folder that would change nothing: without the named config, and without options."""
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


def _taken(arguments: list[str], *names: str) -> str | None:
    """Take an option of Hydra out of the command line; its value, None where it is not there."""
    for place, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name in names and (equals or place + 1 < len(arguments)):
            value = value if equals else arguments.pop(place + 1)
            del arguments[place]
            return value
    return None


def _is_of_a_run(file: Path) -> bool:
    try:
        with file.open(encoding="utf-8") as lines:
            return lines.readline().startswith(CONFIG_HASH)
    except (OSError, UnicodeDecodeError):
        return False


def _repeated(config: dict[str, Any], arguments: Sequence[str]) -> dict[str, Any]:
    """The main config of a run that is repeated."""
    for logger in config["loggers"].values():
        for key in OF_A_SWEEP:
            logger.pop(key, None)
    name = config.pop("name")
    if OmegaConf.create(config | {"name": Config.name}).name != name:  # the user's own
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
