"""What lm-eval's task files in `experiments/lm_eval_tasks` call: documents, and the score of an answer."""

from typing import Any

from dualdecoder.checkpoints import load_tokenizer
from dualdecoder.errors import ConfigError
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
    files = DataFiles(**{name: settings[name] for name in ("essays", "squad", "hotpot") if name in settings})
    sampler, length, seed = (
        Sampler(load_tokenizer(source), files),
        settings.get("length", 4096),
        settings.get("seed", 42),
    )
    made = [sampler.sample(ruler_task, length, index, seed) for index in range(settings.get("samples", 500))]
    rows = [{"prompt": item.prompt, "answers": list(item.answers), "task": item.task} for item in made]
    return {"test": Dataset.from_list(rows)}


def process_results(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """RULER's score of one answer, 0 to 100."""
    return {"ruler_score": score(results[0], doc["answers"], task_named(doc["task"]).match)}
