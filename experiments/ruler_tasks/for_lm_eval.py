"""What lm-eval's task files in `experiments/lm_eval_tasks` call: documents, and the score of an answer."""

from typing import Any

from dualdecoder.checkpoints import load_tokenizer
from dualdecoder.errors import ConfigError, require
from dualdecoder.units import parse_tokens
from experiments.ruler_tasks.material import DataFiles
from experiments.ruler_tasks.samples import Sampler, task_named
from experiments.ruler_tasks.scoring import score


def build(ruler_task: str, **settings: Any) -> dict[str, Any]:
    """The data set of one task as lm-eval wants it.

    Args:
        ruler_task: RULER's name of the task.
        settings: lm-eval's metadata.  `tokenizer`, `pretrained` or `model` says whose tokenizer counts, in the forms
            that `load_tokenizer` takes; `length` (4096), `samples` (500), `seed` (42), `essays`, `squad`, `hotpot`.

    Raises:
        ConfigError: no tokenizer is named, or what `Sampler.sample` raises.
    """
    from datasets import Dataset

    source = next((settings[key] for key in ("tokenizer", "pretrained", "model") if settings.get(key)), None)
    if source is None:
        raise ConfigError(
            "metadata.tokenizer is missing; allowed: a model source, as lengths are counted in its tokens"
        )
    length = parse_tokens(settings.get("length", 4096), "metadata.length")
    samples, seed = _integer(settings, "samples", 500, least=1), _integer(settings, "seed", 42, least=0)
    sampler = Sampler(load_tokenizer(str(source)), _files(settings))
    made = [sampler.sample(ruler_task, length, index, seed) for index in range(samples)]
    rows = [{"prompt": item.prompt, "answers": list(item.answers), "task": item.task} for item in made]
    return {"test": Dataset.from_list(rows)}


def _integer(settings: dict[str, Any], name: str, default: int, least: int) -> int:
    value = settings.get(name, default)
    whole = isinstance(value, int) and not isinstance(value, bool) and value >= least
    require(whole, f"metadata.{name}", value, f"an integer of at least {least}")
    return value


def _files(settings: dict[str, Any]) -> DataFiles:
    given = {name: settings[name] for name in ("essays", "squad", "hotpot") if name in settings}
    for name, value in given.items():
        require(isinstance(value, str), f"metadata.{name}", value, "a path, hub:OWNER/NAME/FILE, or an empty text")
    return DataFiles(**given)


def process_results(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """RULER's score of one answer, 0 to 100."""
    return {"ruler_score": score(results[0], doc["answers"], task_named(doc["task"]).match)}
