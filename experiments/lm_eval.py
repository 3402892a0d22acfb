"""Any lm-eval task through any KV method, recorded like every other experiment.

    python -m experiments.lm_eval 'tasks=[ruler_nv_vt]' method=dualdecoder budget=256 'metadata={length: 2048}'
    python -m experiments.lm_eval 'tasks=[gsm8k]' method=full_kv chat_template=true limit=20 default_tasks=true

Tasks: those of ``experiments/lm_eval_tasks`` (RULER after NVIDIA), of the folder ``include``, and with
``default_tasks=true`` all that come with lm-eval, most of which fetch their data over the network.
"""

from pathlib import Path
from typing import Any

import hydra
from omegaconf import DictConfig, OmegaConf

from dualdecoder.checkpoints import weights_id
from dualdecoder.errors import require
from experiments.harness.checks import (
    check_device,
    check_method,
    check_text_model,
    is_number,
    require_names,
    require_natural,
    require_positive,
)
from experiments.harness.environment import ROOT, code_hash
from experiments.harness.points import results_folder, run_point
from experiments.harness.workload import engine_for
from experiments.reporting.terminal import show_point

TASKS_FOLDER = ROOT / "experiments" / "lm_eval_tasks"


@hydra.main(version_base="1.3", config_path="../conf", config_name="lm_eval")
def main(cfg: DictConfig) -> None:
    """Record and print the tasks of one method."""
    show_point(run_point("lm_eval", cfg, measure, check=check))


def check(cfg: DictConfig) -> None:
    """Raise ConfigError for settings that cannot be measured."""
    require_names(cfg, "tasks", "lm-eval tasks")
    require_positive(cfg, "batch")
    require_natural(cfg, "seed", *(name for name in ("fewshot",) if cfg[name] is not None))
    limit = cfg.limit
    require(limit is None or (is_number(limit) and limit > 0), "limit", limit, "null, or a positive number of samples")
    folder = str(cfg.include)
    require(not folder or Path(folder).is_dir(), "include", folder, "empty, or a folder with task files")
    check_device(cfg.device)
    check_method(cfg.method, cfg.device)
    check_text_model(cfg, cfg.dtype)
    _known(list(cfg.tasks), _task_manager(cfg))


def measure(cfg: DictConfig) -> list[dict[str, Any]]:
    """One row a task and metric."""
    import lm_eval

    from experiments.lm_eval_model import DualDecoderLM

    check(cfg)
    engine = engine_for(cfg.model, cfg.method.name, cfg.method.options, cfg.device, cfg.dtype)
    resume = str(_kept(cfg)) if cfg.resume else ""
    model = DualDecoderLM(engine=engine, batch_size=cfg.batch, resume=resume, weights=weights_id(cfg.model.source))
    manager = _task_manager(cfg)
    results = lm_eval.simple_evaluate(
        model=model,
        tasks=_known(list(cfg.tasks), manager),
        task_manager=manager,
        num_fewshot=cfg.fewshot,
        limit=cfg.limit,
        apply_chat_template=cfg.chat_template,
        random_seed=cfg.seed,
    )
    return [row for task in results["results"] for row in _rows(cfg, engine, task, results)]


def _kept(cfg: DictConfig) -> Path:
    """Where finished requests are kept: a file for each version of the code, as its answers may differ."""
    name = f"{cfg.model.name.replace('/', '-')}-{code_hash()[:10]}.jsonl"
    return results_folder(cfg.results_dir) / "lm_eval" / "kept" / name


def _task_manager(cfg: DictConfig) -> Any:
    from lm_eval.tasks import TaskManager

    folders = [str(TASKS_FOLDER), *([cfg.include] if cfg.include else [])]
    # The task manager, not simple_evaluate, is given the metadata: beside a manager the latter ignores it.
    metadata = {"tokenizer": cfg.model.source, **OmegaConf.to_container(cfg.metadata, resolve=True)}
    return TaskManager(include_path=folders, include_defaults=cfg.default_tasks, metadata=metadata)


def _known(tasks: list[str], manager: Any) -> list[str]:
    unknown = [task for task in tasks if task not in manager.all_tasks]
    few = sorted(manager.all_tasks) if len(manager.all_tasks) < 50 else ["the tasks of lm-eval"]
    require(not unknown, "tasks", unknown, f"{', '.join(few)} (see include and default_tasks)")
    return tasks


def _rows(cfg: DictConfig, engine: Any, task: str, results: dict[str, Any]) -> list[dict[str, Any]]:
    found = results["results"][task]
    head = {
        "task": task,
        "model": cfg.model.name,
        "method": cfg.method.name,
        "budget": getattr(engine.config, "budget", None),
        "samples": results["n-samples"][task]["effective"],
    }
    # lm-eval names a value "metric,filter" and its standard error "metric_stderr,filter".
    values = {name: value for name, value in found.items() if "," in name and "_stderr," not in name}
    return [
        {**head, "metric": name.removesuffix(",none"), "value": value, "stderr": _stderr(found, name)}
        for name, value in values.items()
    ]


def _stderr(found: dict[str, Any], name: str) -> float | None:
    metric, _, kind = name.partition(",")
    value = found.get(f"{metric}_stderr,{kind}")
    return value if isinstance(value, int | float) else None


if __name__ == "__main__":
    main()
