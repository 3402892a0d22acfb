"""What a model is called and shaped where a config gives no more than its source.

The configs of models ask for both: ``name: ${model_name:${.source}}`` follows ``model.source=FOLDER`` from the command
line, so that no record or table calls a checkpoint by the name of another.
"""

from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from dualdecoder.checkpoints import EMBEDDED, RANDOM_PREFIX, named_shape, shape_of
from dualdecoder.config import ModelConfig
from dualdecoder.errors import require
from dualdecoder.shapes import SHAPES

_EMBEDDED_SHAPE = "smollm2-135m"
# The hub's cache keeps OWNER/NAME as models--OWNER--NAME/snapshots/COMMIT.
_HUB_FOLDER = "models--"


def model_name(source: str) -> str:
    """A shape's name, ``smollm2``, a hub id, or of a path its last two parts: runs often end in the same one."""
    text = str(source)
    if text.startswith(RANDOM_PREFIX):
        return text.removeprefix(RANDOM_PREFIX)
    path = Path(text).expanduser()
    if text == EMBEDDED or not path.exists():
        return text
    parts = path.resolve().with_suffix("" if path.suffix == ".gguf" else path.suffix).parts[1:]
    cached = [part for part in parts if part.startswith(_HUB_FOLDER)]
    return cached[-1].removeprefix(_HUB_FOLDER).replace("--", "/") if cached else "/".join(parts[-2:])


def model_shape(source: str) -> str:
    """The name of a shape in ``SHAPES``; a checkpoint's shape is in its config, and its source stands for it."""
    text = str(source)
    return _EMBEDDED_SHAPE if text == EMBEDDED else text.removeprefix(RANDOM_PREFIX)


def shape_in(model: DictConfig) -> ModelConfig:
    """The shape that ``model.shape`` means; reads a checkpoint's config, never its weights.

    Raises ConfigError for a shape that is not known or not that of ``model.source``.
    """
    expected = model_shape(model.source)
    require(model.shape == expected, "model.shape", model.shape, f"{expected}, that of model.source={model.source}")
    if model.shape in SHAPES or str(model.source).startswith(RANDOM_PREFIX):
        return named_shape(model.shape)
    return shape_of(model.source)


def register_resolvers() -> None:
    """Make ``${model_name:...}`` and ``${model_shape:...}`` known to all configs."""
    OmegaConf.register_new_resolver("model_name", model_name, replace=True)
    OmegaConf.register_new_resolver("model_shape", model_shape, replace=True)
