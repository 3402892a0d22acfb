"""Decode attention over all tokens of a batch on a GPU: the kernel of full_kv beside torch's SDPA, one layer.

    python -m experiments.attention_time
    python -m experiments.attention_time -m batch=1,8 context=32768,124928

Bytes are those of the keys and values, each read once, whatever a variant really reads. SDPA "heads packed" takes the
query heads of a KV head as rows; "enable_gqa" leaves the sharing to torch; "repeated heads" is what is left without
either: every query head reads keys and values of its own, copied beforehand.
"""

from collections.abc import Callable, Iterator
from typing import Any

import hydra
import torch
import torch.nn.functional as F
from omegaconf import DictConfig
from torch import Tensor

from dualdecoder.config import ModelConfig, dtype_from_name
from dualdecoder.errors import require
from dualdecoder.ledger import Ledger
from experiments.harness.checks import (
    check_model,
    is_integer,
    require_gpu,
    require_list,
    require_natural,
    require_positive,
)
from experiments.harness.gpu import measured_rates, median_ms
from experiments.harness.model_names import shape_in
from experiments.harness.points import run_point
from experiments.reporting.terminal import show_point

Variant = tuple[str, Callable[[], Tensor]]
# bf16 keeps 8 bits of a weight and of an output: a few thousandths.
MOST_ERROR = 0.02


@hydra.main(version_base="1.3", config_path="../conf", config_name="attention_time")
def main(cfg: DictConfig) -> None:
    """Record and print all variants at one batch and context."""
    show_point(run_point("attention_time", cfg, measure, check=check, weights=False))


def check(cfg: DictConfig) -> None:
    """Raise ConfigError for settings that cannot be measured."""
    require_positive(cfg, "context", "batch")
    require(cfg.context >= 2, "context", cfg.context, "at least 2 tokens: the last one is the step's own")
    require_natural(cfg, "seed")
    if len(cfg.tunings) > 0:
        require_list(cfg, "tunings", _is_tuning, "lists of three: tokens of a tile, warps, stages")
    check_model(cfg)


def _is_tuning(numbers: Any) -> bool:
    return isinstance(numbers, list) and len(numbers) == 3 and all(is_integer(number, 1) for number in numbers)


def measure(cfg: DictConfig) -> list[dict[str, Any]]:
    """One row a variant: microseconds, bytes per second, share of the copy rate, distance from the fp32 result."""
    check(cfg)
    require_gpu()
    copy_rate = measured_rates().copy
    shape, dtype = shape_in(cfg.model), dtype_from_name(cfg.model.dtype)
    torch.manual_seed(cfg.seed)
    size = (cfg.batch, shape.kv_heads, 2, cfg.context, shape.head_dim)
    past_BKXPD = torch.randn(size, dtype=dtype, device="cuda")
    q_BHD = torch.randn(cfg.batch, shape.query_heads, shape.head_dim, dtype=dtype, device="cuda")
    expected_BHD = _exact(q_BHD, past_BKXPD)
    rows = []
    for name, call in _variants(cfg, shape, q_BHD, past_BKXPD):
        error = float((call().float() - expected_BHD).norm() / expected_BHD.norm())
        if not error < MOST_ERROR:
            raise RuntimeError(f"{name}: relative error {error:.3g} against fp32; its speed means nothing")
        ms = median_ms(call)
        speed = {"us": ms * 1e3, "gb_s": past_BKXPD.nbytes / ms / 1e6}
        share = past_BKXPD.nbytes / ms * 1e3 / copy_rate
        rows.append({"variant": name, **speed, "share_of_copy": share, "error": error})
    common = {"model": cfg.model.name, "dtype": cfg.model.dtype, "context": cfg.context, "batch": cfg.batch}
    return [{**common, **row, "bytes": past_BKXPD.nbytes, "copy_rate": copy_rate} for row in rows]


def _exact(q_BHD: Tensor, past_BKXPD: Tensor) -> Tensor:
    """Softmax attention in fp32, one sequence after the other."""
    outputs = []
    for q_HD, past_KXPD in zip(q_BHD.float(), past_BKXPD, strict=True):
        k_KPD, v_KPD = past_KXPD.float().unbind(1)
        q_KGD = q_HD.unflatten(0, (len(k_KPD), -1))
        weight_KGP = torch.softmax(q_KGD @ k_KPD.transpose(1, 2) / q_HD.shape[1] ** 0.5, dim=-1)
        outputs.append((weight_KGP @ v_KPD).flatten(0, 1))
    return torch.stack(outputs)


def _variants(cfg: DictConfig, shape: ModelConfig, q_BHD: Tensor, past_BKXPD: Tensor) -> Iterator[Variant]:
    yield from _ours(cfg, shape, q_BHD, past_BKXPD)
    k_BKPD, v_BKPD = past_BKXPD.unbind(2)
    q_BKGD = q_BHD.unflatten(1, (shape.kv_heads, -1))
    yield "SDPA, heads packed", lambda: F.scaled_dot_product_attention(q_BKGD, k_BKPD, v_BKPD).flatten(1, 2)
    q_BH1D = q_BHD[:, :, None]
    gqa = {"enable_gqa": True}
    yield "SDPA, enable_gqa", lambda: F.scaled_dot_product_attention(q_BH1D, k_BKPD, v_BKPD, **gqa)[:, :, 0]
    k_BHPD, v_BHPD = (t.repeat_interleave(shape.group, dim=1) for t in (k_BKPD, v_BKPD))
    yield "SDPA, repeated heads", lambda: F.scaled_dot_product_attention(q_BH1D, k_BHPD, v_BHPD)[:, :, 0]


def _ours(cfg: DictConfig, shape: ModelConfig, q_BHD: Tensor, past_BKXPD: Tensor) -> Iterator[Variant]:
    """The default first. The last token of the past is given as the step's own row, so that SDPA sees the same."""
    from baselines.kernels.dense_attention import DEFAULT_TUNING, Cache, allocate_workspace, dense_attention
    from dualdecoder.kernels.sparse_attention import Tuning

    own_B1KXD = past_BKXPD[:, :, :, -1][:, None]
    k_B1KD, v_B1KD = own_B1KXD.unbind(3)
    length_B = torch.full((cfg.batch,), cfg.context - 1, device="cuda")
    cache = Cache(past_BKXPD, past_BKXPD, length_B, torch.zeros(cfg.batch, dtype=torch.bool, device="cuda"))
    workspace = allocate_workspace(Ledger("cuda"), cfg.batch, shape.kv_heads, shape.head_dim, cfg.context)
    o_B1HD = torch.empty_like(q_BHD[:, None])
    others = [tuning for tuning in (Tuning(*numbers) for numbers in cfg.tunings) if tuning != DEFAULT_TUNING]
    for tuning in (DEFAULT_TUNING, *others):
        text = f"{tuning.tile_tokens} tokens, {tuning.num_warps} warps, {tuning.num_stages} stages"

        def run(tuning: Tuning = tuning) -> Tensor:
            return dense_attention(q_BHD[:, None], k_B1KD, v_B1KD, cache, workspace, o_B1HD, tuning)[:, 0]

        yield f"ours, {text}", run


if __name__ == "__main__":
    main()
