"""Hydra's group ``method`` with methods of other packages: ``method=my_package.my_module:MyMethod`` needs no file.

A second source of configs beside conf/, by Hydra's own search path. It knows every name of the group that has a colon:
a config with that name and no options. Options are added as ``+method.options.window=64``, and in residency a further
method beside the others as ``+method@methods.mine=my_package.my_module:MyMethod``.
"""

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigLoadError, ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf

GROUP = "method/"


class OwnMethodSource(ConfigSource):
    """Configs that are made of their name."""

    @staticmethod
    def scheme() -> str:
        return "method"

    def load_config(self, config_path: str) -> ConfigResult:
        if not self.is_config(config_path):
            raise ConfigLoadError(f"{config_path}: no method of another package")
        name = _name(config_path)
        config = OmegaConf.create({"name": name, "options": {}})
        return ConfigResult(
            config=config, path=f"{self.scheme()}://{name}", provider=self.provider, header={"package": None}
        )

    def available(self) -> bool:
        return True

    def is_group(self, config_path: str) -> bool:
        return False

    def is_config(self, config_path: str) -> bool:
        module, colon, attribute = _name(config_path).partition(":")
        parts = [*module.split("."), attribute]
        return config_path.startswith(GROUP) and bool(colon) and all(part.isidentifier() for part in parts)

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        return []


class OwnMethods(SearchPathPlugin):
    """Puts that source behind conf/."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        search_path.append(provider="dualdecoder", path=f"{OwnMethodSource.scheme()}://")


def register_own_methods() -> None:
    """Make the source known to Hydra; every experiment imports what calls this."""
    for plugin in (OwnMethodSource, OwnMethods):
        Plugins.instance().register(plugin)


def _name(config_path: str) -> str:
    return config_path.removeprefix(GROUP).removesuffix(".yaml")
