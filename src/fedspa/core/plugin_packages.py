"""Plug-ins: packages of others whose options stand beside those of fedspa.

A package becomes a plug-in by an entry point of the group `fedspa.plugins`, whose value is the package's name. Its
folder conf/ has the layout of fedspa's: conf/<group>/<option>.yaml. The classes of the package are trusted. A plug-in
is only imported when one of its options is used.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin

from fedspa.core.errors import UserError

GROUP = "fedspa.plugins"


@dataclass(frozen=True)
class Plugin:
    """An installed plug-in."""

    package: str
    conf: Path
    """The package's folder of YAML files. It may not exist."""

    @property
    def options(self) -> set[str]:
        """The options of the package, such as "mask/lottery"."""
        return {file.relative_to(self.conf).with_suffix("").as_posix() for file in self.conf.rglob("*.yaml")}


@cache
def plugins() -> tuple[Plugin, ...]:
    """The installed plug-ins by name. A plug-in without a package is named on stderr and left out."""
    found = []
    for name in sorted({point.value for point in entry_points(group=GROUP)}):
        spec = None
        if name.isidentifier():  # a dotted name would import its parent
            spec = find_spec(name)
        if spec is None or not spec.submodule_search_locations:
            print(f"The plug-in {name} is left out: there is no package of that name.", file=sys.stderr)
            continue
        found.append(Plugin(name, Path(next(iter(spec.submodule_search_locations))) / "conf"))
    return tuple(found)


def packages() -> list[str]:
    """The packages of the plug-ins. A YAML may name their classes."""
    return [plugin.package for plugin in plugins()]


def register_plugins(conf: Path) -> None:
    """Let Hydra find the options of the plug-ins beside those in `conf`.

    Raises `UserError` if two packages have an option of the same name.
    """
    owners = dict.fromkeys(Plugin("fedspa", conf).options, "fedspa")
    for plugin in plugins():
        for option in sorted(plugin.options):
            if option in owners:
                raise UserError(
                    f"Both {owners[option]} and the plug-in {plugin.package} have an option {option}: rename one "
                    "of them, or uninstall a plug-in."
                )
            owners[option] = plugin.package
    if plugins():
        Plugins.instance().register(PluginOptions)


class PluginOptions(SearchPathPlugin):
    """Tells Hydra where to look for the YAML files of plug-ins."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for plugin in plugins():
            search_path.append(f"plug-in {plugin.package}", plugin.conf.as_uri())
