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
from dualdecoder.prefill import prefill_into
from experiments.harness.gpu import require_gpu
from experiments.harness.points import run_point
from experiments.harness.workload import require_positive
from experiments.reporting.terminal import show_point


@hydra.main(version_base="1.3", config_path="../conf", config_name="prefill_time")
def main(cfg: DictConfig) -> None:
    """Record and print one context."""
    show_point(run_point("prefill_time", cfg, measure))


def measure(cfg: DictConfig) -> list[dict[str, Any]]:
    """One row; the prompt fills the context up to 64 tokens."""
    require_positive(cfg, "context", "budget")
    require_gpu()
    dtype = dtype_from_name(cfg.model.dtype)
    model = load_model(cfg.model.source, dtype, "cuda")
    config = DualDecoderConfig(budget=cfg.budget)
    method = DualDecoder(model.config, config, batch=1, context=cfg.context, dtype=dtype, device="cuda")
    generator = torch.Generator().manual_seed(cfg.seed)
    tokens = torch.randint(model.config.vocabulary, (cfg.context - 64,), generator=generator).tolist()
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
