"""Numbers of tokens in a config as people write them: context=128K, budgets=[1K,2K]."""

from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

from dualdecoder.units import parse_tokens

# The fields of experiments that count tokens, and those inside of others.
FIELDS = ("context", "length", "budget", "budgets", "metadata.length")


def with_token_counts(cfg: DictConfig) -> DictConfig:
    """A copy of `cfg` whose numbers of tokens are whole numbers. Raises ConfigError naming the field.

    References stay as they are: what they point to is a number afterwards.
    """
    changed = cfg.copy()
    for field in FIELDS:
        place, _, name = field.rpartition(".")
        inside = changed.get(place) if place else changed
        if isinstance(inside, DictConfig) and name in inside and not OmegaConf.is_interpolation(inside, name):
            inside[name] = _counts(inside[name], field)
    return changed


def _counts(value: Any, field: str) -> Any:
    if isinstance(value, ListConfig):
        return [_counts(item, field) for item in value]
    return parse_tokens(value, field) if isinstance(value, str) else value
