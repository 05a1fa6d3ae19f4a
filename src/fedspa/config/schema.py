"""The groups of the config, and what Hydra has to know before it composes one: the schema and the resolvers."""

from __future__ import annotations

from pathlib import Path

from hydra.core.config_store import ConfigStore
from omegaconf import AnyNode, BooleanNode, DictConfig, OmegaConf

from fedspa.core.components import find_class
from fedspa.core.errors import UserError
from fedspa.core.file_names import file_name
from fedspa.core.paths import config_dir, project_root
from fedspa.core.plugin_packages import register_plugins
from fedspa.core.settings import Config

ONE_EACH = (
    "dataset",
    "partition",
    "layer_sparsity",
    "mask",
    "server_optimizer",
    "method",
    "hardware",
    "engine",
)
"""Groups with one component each."""
SEVERAL = ("metrics", "loggers")
"""Parts of the config with any number of components, by name."""


def register(settings: type[Config] = Config) -> None:
    """Register the schema and the resolvers of conf/ with Hydra and OmegaConf."""
    schema = OmegaConf.structured(settings)
    groups = [schema[group] for group in ("model", *ONE_EACH, *SEVERAL)]
    for open_ended in (*groups, schema.training.optimizer_options):
        # Hydra would refuse options that no YAML mentions; `check` and the optimizer check all options.
        OmegaConf.set_struct(open_ended, False)
    _leave_switches_to_check(schema)
    register_plugins(config_dir())
    ConfigStore.instance().store(name="schema", node=schema)
    OmegaConf.register_new_resolver("project_root", lambda: str(project_root()), replace=True)
    OmegaConf.register_new_resolver("times", lambda one, other: one * other, replace=True)
    OmegaConf.register_new_resolver("last_part", lambda path: Path(str(path or "folder")).name, replace=True)
    OmegaConf.register_new_resolver(
        "file_name", lambda name: file_name([str(name).replace("/", "--")]), replace=True
    )
    OmegaConf.register_new_resolver("used_sparsity", _used_sparsity, replace=True)


def _leave_switches_to_check(node: DictConfig) -> None:
    """Let Hydra accept anything for the schema's booleans. It would turn 2 into true without an error."""
    for key in node:
        child = node._get_node(key)
        if isinstance(child, BooleanNode):
            node._content[key] = AnyNode(child._value(), key=key, parent=node)  # type: ignore[index]
        elif isinstance(child, DictConfig):
            _leave_switches_to_check(child)


def _used_sparsity(*, _root_: DictConfig) -> float:
    """The sparsity in a run's name: 0 for a method that trains dense."""
    try:
        method = find_class("method", _root_.method.get("_target_"), _root_.trusted_packages)
    except (UserError, TypeError):  # `check` reports it
        return _root_.sparsity
    return _root_.sparsity if method.uses_sparsity else 0.0
