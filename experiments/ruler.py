"""RULER-style quality of every method on the same samples and the same prefill (Table 4).

    python -m experiments.ruler task=vt length=2048
    python -m experiments.ruler -m task=niah_single_1,niah_multikey_2,vt,cwe length=1024,2048

Prompts are worded by us (see ``experiments/ruler_tasks``): compare methods here, not with published RULER tables.
"""

from collections.abc import Iterator
from typing import Any

import hydra
from omegaconf import DictConfig

from dualdecoder.engine import Engine
from dualdecoder.prefill import PrefillSnapshot
from experiments.harness.points import run_point
from experiments.harness.statistics import wilson_interval
from experiments.harness.workload import engine_for, progress, require_positive
from experiments.reporting.terminal import show_point
from experiments.ruler_tasks import RulerSample, make_sample, score


@hydra.main(version_base="1.3", config_path="../conf", config_name="ruler")
def main(cfg: DictConfig) -> None:
    """Record and print one task and length, all methods."""
    show_point(run_point("ruler", cfg, measure))


def measure(cfg: DictConfig) -> list[dict[str, Any]]:
    """One row a method: score 0 to 100, per-sample scores, answers, 95 % interval."""
    require_positive(cfg, "samples", "batch", "length")
    engines = {label: engine_for(cfg.model, m.name, m.options) for label, m in cfg.methods.items()}
    first = next(iter(engines.values()))
    samples = [make_sample(cfg.task, first.tokenizer, cfg.length, i, cfg.seed) for i in range(cfg.samples)]
    answers: dict[str, list[str]] = {label: [] for label in engines}
    for group, snapshots in _prefilled(cfg, first, samples):
        for label, engine in engines.items():
            answers[label] += _answer(engine, snapshots, group[0].new_tokens)
    return [_row(cfg, label, engine, samples, answers[label]) for label, engine in engines.items()]


def _prefilled(
    cfg: DictConfig, engine: Engine, samples: list[RulerSample]
) -> Iterator[tuple[list[RulerSample], list[PrefillSnapshot]]]:
    """Groups of ``cfg.batch`` samples with the prefills that all methods share."""
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


def _row(cfg: DictConfig, label: str, engine: Engine, samples: list[RulerSample], answers: list[str]) -> dict[str, Any]:
    scores = [score(answer, sample.answers) for answer, sample in zip(answers, samples, strict=True)]
    mean = sum(scores) / len(scores)
    return {
        "task": cfg.task,
        "length": cfg.length,
        "method": label,
        "model": cfg.model.name,
        "budget": getattr(engine.config, "budget", None),
        "score": mean,
        "scores": scores,
        "samples": len(scores),
        "ci95": wilson_interval(mean, len(scores)),
        "attended_tokens": getattr(engine.config, "attended_tokens", None),
        "answers": answers,
        "expected": [list(sample.answers) for sample in samples],
    }


if __name__ == "__main__":
    main()
