"""Equal budgets in the configs of methods: ``${attended:${budget}}`` is what DualDecoder attends to with a budget."""

from omegaconf import OmegaConf

from dualdecoder.config import DualDecoderConfig
from dualdecoder.errors import ConfigError


def attended(budget: int, share: float = 1, multiple: int = 1, less: int = 0) -> int:
    """A share of DualDecoder's attended tokens (selected, outliers, local), rounded down to a multiple, then less.

    A budget that is not allowed comes back as it is: the method that takes it names the field.
    """
    try:
        total = DualDecoderConfig(budget=budget).attended_tokens
    except ConfigError:
        return budget
    return int(total * share) // multiple * multiple - less


def register_resolvers() -> None:
    """Make ``${attended:...}`` known to all configs; every experiment imports what calls this."""
    OmegaConf.register_new_resolver("attended", attended, replace=True)
