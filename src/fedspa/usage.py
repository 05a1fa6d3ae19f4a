"""The text of `--help`: the use of a command, and the groups of the config with a line each."""

from __future__ import annotations

from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.object_type import ObjectType
from omegaconf import DictConfig, OmegaConf

WIDTH = 100
"""The width of the screen in columns."""
GROUPS = {
    "dataset": "images, a table, text",
    "partition": "how clients get them",
    "model": "the network",
    "method": "what clients train",
    "mask": "how a mask moves",
    "layer_sparsity": "sparsity by tensor",
    "server_optimizer": "the server's step",
    "metric": "scores",
    "logger": "where results go too",
    "hardware": "what it runs on",
    "engine": "how it computes",
    "experiment": "presets",
    "sweep": "studies, with -m",
    "hydra/launcher": "where sweep jobs run",
}
"""The subject of each group. Groups of other packages are listed without one."""


def register_usage(text: str) -> None:
    """Register the text of a command for `--help`, with the groups. hydra.help.template in conf/config.yaml uses it."""

    def usage(*, _root_: DictConfig) -> str:
        shown = (
            f"{text.strip()}\n\nGroups, each with [what is chosen] and what else there is:\n{groups(_root_)}"
        )
        return shown.replace("$", "$$")  # Hydra reads it as a template

    OmegaConf.register_new_resolver("usage", usage, replace=True)


def groups(config: DictConfig) -> str:
    """A line for each group: its name, its subject, and as many options as fit."""
    loader, chosen = GlobalHydra.instance().config_loader(), HydraConfig.get().runtime.choices
    several = {
        "metric": set(config.metrics),
        "logger": set(config.loggers),
    }  # Hydra does not record these choices
    others = [name for name in loader.get_group_options("", ObjectType.GROUP) if name != "hydra"]
    lines = []
    for group in dict.fromkeys([*GROUPS, *others]):
        options = loader.get_group_options(group, ObjectType.CONFIG)
        choices = several.get(group, {chosen.get(group)})
        listed = [f"[{option}]" for option in options if option in choices]
        listed += [option for option in options if option not in choices]
        if listed:
            lines.append(_line(f"  {group:<14}  {GROUPS.get(group, ''):<20}  ", listed))
    return "\n".join(lines)


def _line(head: str, options: list[str]) -> str:
    for shown in range(len(options), 0, -1):
        rest = len(options) - shown
        line = head + ", ".join(options[:shown]) + (f", {rest} more" if rest else "")
        if len(line) <= WIDTH:
            break
    return line
