"""Prefill of one long random prompt on a GPU: seconds, tokens per second, and peak device memory beside the weights.

python -m experiments.prefill_time context=65536
"""

import time
from typing import Any

import hydra
import torch
from omegaconf import DictConfig

from dualdecoder.checkpoints import load_model
from dualdecoder.config import DualDecoderConfig, dtype_from_name
from dualdecoder.dual import DualDecoder
from dualdecoder.errors import require
from dualdecoder.prefill import prefill_into
from experiments.harness.checks import check_model, require_gpu, require_natural, require_positive
from experiments.harness.points import run_point
from experiments.reporting.terminal import show_point

# Tokens of the context that the prompt leaves free.
ROOM = 64


@hydra.main(version_base="1.3", config_path="../conf", config_name="prefill_time")
def main(cfg: DictConfig) -> None:
    """Record and print one context."""
    show_point(run_point("prefill_time", cfg, measure, check=check))


def check(cfg: DictConfig) -> None:
    """Raise ConfigError for settings that cannot be measured."""
    require_positive(cfg, "context", "budget")
    require_natural(cfg, "seed")
    require(cfg.context > ROOM, "context", cfg.context, f"more than {ROOM} tokens, which stay free")
    check_model(cfg)
    DualDecoderConfig(budget=cfg.budget)


def measure(cfg: DictConfig) -> list[dict[str, Any]]:
    """One row; the prompt fills the context up to 64 tokens."""
    check(cfg)
    require_gpu()
    dtype = dtype_from_name(cfg.model.dtype)
    model = load_model(cfg.model.source, dtype, "cuda")
    config = DualDecoderConfig(budget=cfg.budget)
    method = DualDecoder(model.config, config, batch=1, context=cfg.context, dtype=dtype, device="cuda")
    generator = torch.Generator().manual_seed(cfg.seed)
    tokens = torch.randint(model.config.vocabulary, (cfg.context - ROOM,), generator=generator).tolist()
    prefill_into(model, method, 0, tokens[:4096])
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    held, begin = torch.cuda.memory_allocated(), time.perf_counter()
    prefill_into(model, method, 0, tokens)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - begin
    return [
        {
            "model": cfg.model.name,
            "tokens": len(tokens),
            "seconds": seconds,
            "tokens_per_s": len(tokens) / seconds,
            "weight_bytes": model.weight_bytes(),
            "method_bytes": method.ledger.plan().gpu_total,
            "peak_bytes": torch.cuda.max_memory_allocated(),
            "transient_bytes": torch.cuda.max_memory_allocated() - held,
        }
    ]


if __name__ == "__main__":
    main()
