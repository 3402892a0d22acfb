"""RULER: quality of every method on the same samples and the same prefill (Table 4).

    python -m experiments.ruler task=vt length=2048 'methods=[full_kv,dualdecoder,streaming_llm]'
    python -m experiments.ruler -m task=niah_single_2,cwe length=1024,4096 samples=32 device=cuda dtype=bfloat16
    python -m experiments.ruler task=qa_1 data.squad=dev-v2.0.json data.essays=essays.txt

All 13 tasks of RULER (see ``experiments/ruler_tasks``). A question task without its file is recorded as having no data.
"""

import time
from collections.abc import Iterator
from typing import Any

import hydra
from omegaconf import DictConfig

from dualdecoder.engine import Engine
from dualdecoder.prefill import PrefillSnapshot
from experiments.harness.checks import (
    check_context,
    check_device,
    check_methods,
    check_text_model,
    require_positive,
)
from experiments.harness.points import run_point
from experiments.harness.statistics import mean_interval
from experiments.harness.workload import engine_for, progress, with_methods
from experiments.reporting.terminal import show_point
from experiments.ruler_tasks import DataFiles, NoData, RulerSample, Sampler, prompts_used, score, task_named
from experiments.ruler_tasks.material import HUB, local_file

# What a row says of the answers where there are none.
_NO_DATA: dict[str, Any] = dict.fromkeys(("score", "scores", "ci95", "interval", "prefill_s", "answer_s"))


@hydra.main(version_base="1.3", config_path="../conf", config_name="ruler")
def main(cfg: DictConfig) -> None:
    """Record and print one task and length, all methods."""
    show_point(run_point("ruler", cfg, measure, check=check, prepare=with_methods))


def check(cfg: DictConfig) -> None:
    """Raise ConfigError for settings that cannot be measured, and for a data file that is not there."""
    require_positive(cfg, "samples", "batch", "length")
    task_named(cfg.task)
    check_device(cfg.device)
    check_methods(cfg, cfg.device)
    check_context(cfg, check_text_model(cfg, cfg.dtype), "length")
    for name, source in cfg.data.items():
        # One on the hub is left to the process that measures: it may be large.
        if source and not source.startswith(HUB):
            local_file(name, source)


def measure(cfg: DictConfig) -> list[dict[str, Any]]:
    """One row a method: score 0 to 100, per-sample scores, answers, 95 % interval, seconds."""
    cfg = with_methods(cfg)
    check(cfg)
    engines = {
        label: engine_for(cfg.model, m.name, m.options, cfg.device, cfg.dtype) for label, m in cfg.methods.items()
    }
    try:
        samples = _samples(cfg, next(iter(engines.values())))
    except NoData:
        return [{**_head(cfg, label, engine), "samples": 0, **_NO_DATA} for label, engine in engines.items()]
    return _rows(cfg, engines, samples)


def _samples(cfg: DictConfig, engine: Engine) -> list[RulerSample]:
    sampler = Sampler(engine.tokenizer, DataFiles(**cfg.data))
    return [sampler.sample(cfg.task, cfg.length, index, cfg.seed) for index in range(cfg.samples)]


def _rows(cfg: DictConfig, engines: dict[str, Engine], samples: list[RulerSample]) -> list[dict[str, Any]]:
    answers: dict[str, list[str]] = {label: [] for label in engines}
    seconds = dict.fromkeys(engines, 0.0)
    begin = time.perf_counter()
    for group, snapshots in _prefilled(cfg, next(iter(engines.values())), samples):
        for label, engine in engines.items():
            started = time.perf_counter()
            answers[label] += _answer(engine, snapshots, group[0].new_tokens)
            seconds[label] += time.perf_counter() - started
    prefill_s = time.perf_counter() - begin - sum(seconds.values())
    return [
        {
            **_head(cfg, label, engine),
            **_result(samples, answers[label]),
            "prefill_s": prefill_s,
            "answer_s": seconds[label],
        }
        for label, engine in engines.items()
    ]


def _prefilled(
    cfg: DictConfig, engine: Engine, samples: list[RulerSample]
) -> Iterator[tuple[list[RulerSample], list[PrefillSnapshot]]]:
    """Groups of ``cfg.batch`` samples with the prefills that all methods share, on the model's device."""
    starts = range(0, len(samples), cfg.batch)
    for start in progress(starts, f"ruler {cfg.task} {cfg.length}", total=len(starts)):
        group = samples[start : start + cfg.batch]
        yield group, [engine.prefill(sample.token_ids) for sample in group]


def _answer(engine: Engine, snapshots: list[PrefillSnapshot], new_tokens: int) -> list[str]:
    """Greedy answers of one ragged batch, up to the stop token."""
    run = engine.resume(snapshots, new_tokens, stop_ids=engine.stop_ids)
    tokens = [[token] for token in run.first_tokens]
    for step in run.steps:
        for answer, token, active in zip(tokens, step.token_B, step.active_B, strict=True):
            if active:
                answer.append(token)
    return [engine.text(answer) for answer in tokens]


def _head(cfg: DictConfig, label: str, engine: Engine) -> dict[str, Any]:
    return {
        "task": cfg.task,
        "length": cfg.length,
        "method": label,
        "model": cfg.model.name,
        "budget": getattr(engine.config, "budget", None),
        "attended_tokens": getattr(engine.config, "attended_tokens", None),
        **prompts_used(DataFiles(**cfg.data)),
    }


def _result(samples: list[RulerSample], answers: list[str]) -> dict[str, Any]:
    pairs = zip(answers, samples, strict=True)
    scores = [score(answer, sample.answers, task_named(sample.task).match) for answer, sample in pairs]
    kind, interval = mean_interval(scores)
    return {
        "score": sum(scores) / len(scores),
        "scores": scores,
        "samples": len(scores),
        "ci95": interval,
        "interval": kind,
        "tokens": [sample.total_tokens for sample in samples],
        "answers": answers,
        "expected": [list(sample.answers) for sample in samples],
    }


if __name__ == "__main__":
    main()
