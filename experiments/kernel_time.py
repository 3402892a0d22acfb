"""Each kernel of a decode step alone on a GPU, against the bytes it must move.

python -m experiments.kernel_time
"""

from collections.abc import Iterator
from typing import Any

import hydra
import torch
from omegaconf import DictConfig

from dualdecoder.buffers import ChunkBuffer
from dualdecoder.config import DualDecoderConfig, ModelConfig, dtype_from_name
from dualdecoder.dual import DualDecoder
from dualdecoder.ledger import Ledger
from dualdecoder.ops import Counting, History, LayerState
from experiments.harness.checks import (
    check_model,
    check_synthetic,
    require_gpu,
    require_positive,
    require_positive_list,
)
from experiments.harness.gpu import measured_rates, median_ms
from experiments.harness.model_names import shape_in
from experiments.harness.points import run_point
from experiments.reporting.terminal import show_point

GATHERS = ((32, 4, 4), (16, 4, 4), (8, 8, 8), (132, 4, 4))


@hydra.main(version_base="1.3", config_path="../conf", config_name="kernel_time")
def main(cfg: DictConfig) -> None:
    """Record and print all kernels at the configured batches."""
    show_point(run_point("kernel_time", cfg, measure, check=check, weights=False))


def check(cfg: DictConfig) -> None:
    """Raise ConfigError for settings that cannot be measured."""
    require_positive(cfg, "context", "budget")
    require_positive_list(cfg, "batches")
    check_model(cfg)
    check_synthetic(cfg, DualDecoderConfig(budget=cfg.budget), decoded=1)


def measure(cfg: DictConfig) -> list[dict[str, Any]]:
    """One row a kernel and variant: ms, bytes and the time those bytes take at the measured rate."""
    check(cfg)
    require_gpu()
    rates = measured_rates()
    rows = [
        {"kernel": "copy", "variant": "device", "batch": 0, "gb_s": rates.copy / 1e9},
        {"kernel": "copy", "variant": "link", "batch": 0, "gb_s": rates.link / 1e9},
    ]
    for batch in cfg.batches:
        for kernel, variant, ms, moved, rate in _kernels(cfg, batch):
            floor_ms = moved / (rates.link if rate == "link" else rates.copy) * 1e3
            row = {"kernel": kernel, "variant": variant, "batch": batch, "ms": ms, "bytes": moved}
            rows.append({**row, "gb_s": moved / ms / 1e6, "floor_ms": floor_ms, "times_floor": ms / floor_ms})
    return rows


def _kernels(cfg: DictConfig, batch: int) -> Iterator[tuple[str, str, float, int, str]]:
    """(kernel, variant, ms, bytes, rate) of every kernel on a two-layer method of this batch."""
    whole = shape_in(cfg.model)
    shape = ModelConfig(**{**vars(whole), "layers": 2})
    config = DualDecoderConfig(budget=cfg.budget, host_sequences=1)
    dtype = dtype_from_name(cfg.model.dtype)
    method = DualDecoder(shape, config, batch=batch, context=cfg.context, dtype=dtype, device="cuda")
    method.fill_synthetic(cfg.context - 1)
    method.ops.begin_step(method.chunks_B)
    yield from _select(method, whole)
    yield from _attend(method, whole)
    yield from _find(method)
    yield from _gather(method)
    del method
    torch.cuda.empty_cache()


def _select(method: DualDecoder, shape: ModelConfig) -> Iterator[tuple[str, str, float, int, str]]:
    state = method.layers[0]
    for rows in (1, 2):
        q_BRHD = torch.randn(method.batch, rows, shape.query_heads, shape.head_dim, device="cuda", dtype=method.dtype)
        ms = median_ms(lambda q=q_BRHD: method.ops.select(q, state, method.slots))
        yield "scores + top", f"{rows} rows", ms, state.landmarks_BKND.nbytes, "copy"
    from dualdecoder.kernels.selection import Selection
    from dualdecoder.kernels.top import select_top

    group, chunks = shape.query_heads // shape.kv_heads, state.landmarks_BKND.shape[2]
    sets_BRKS = method.ops.sets.view(method.batch, 2, shape.kv_heads, -1)
    sizes = {"batch": method.batch, "rows": 2, "chunks": chunks, "count": method.slots, "halved": False}
    at_once = Selection(Ledger("cuda"), shape, **sizes)
    ms = median_ms(lambda: at_once(q_BRHD, state, sets_BRKS))
    yield "scores + top", "2 rows, batch in one piece", ms, state.landmarks_BKND.nbytes, "copy"
    scores, top = at_once.parts[0].scores, at_once.parts[0].top
    ms = median_ms(lambda: select_top(scores, state.chunks_B, group, chunks, sets_BRKS, top))
    yield "top", "2 rows", ms, scores.logits.nbytes, "copy"
    keys_BRKN = torch.randn(method.batch, 2, shape.kv_heads, chunks, device="cuda")
    ms = median_ms(lambda: keys_BRKN.topk(method.slots, dim=-1))
    yield "top", "torch.topk, 2 rows", ms, keys_BRKN.nbytes, "copy"


def _attend(method: DualDecoder, shape: ModelConfig) -> Iterator[tuple[str, str, float, int, str]]:
    state, buffer = method.layers[0], method.buffers[0]
    chosen_BKS = torch.arange(method.slots, device="cuda").expand(method.batch, shape.kv_heads, -1).contiguous()
    slot_BKS = chosen_BKS.int()
    moved = buffer.records_BKSXCD.nbytes + state.outlier_records_BKOXCD.nbytes + state.window_BKXWD.nbytes
    for rows in (1, 2):
        q, k, v = (
            torch.randn(method.batch, rows, heads, shape.head_dim, device="cuda", dtype=method.dtype)
            for heads in (shape.query_heads, shape.kv_heads, shape.kv_heads)
        )
        ms = median_ms(lambda q=q, k=k, v=v: method.ops.attend(q, k, v, state, buffer, chosen_BKS, slot_BKS))
        yield "attention", f"{rows} rows", ms, moved, "copy"


def _find(method: DualDecoder) -> Iterator[tuple[str, str, float, int, str]]:
    """Slots, misses, counters and tables of one layer; the counters' reset is timed with it."""
    state, buffer = method.layers[0], method.buffers[0]
    wanted_BKS, following_BKS = (_random_chunks(method, state, buffer) for _ in range(2))
    history = History(method.predicted[0], method.selected[0], following_BKS, comparable=True)
    everyone_B = torch.ones(method.batch, dtype=torch.bool, device="cuda")
    counting = Counting(method.telemetry.counts[0], everyone_B, history)
    wanted_BKS = wanted_BKS.contiguous()

    def find() -> None:
        method.ops.begin_step(method.chunks_B)
        method.ops.find(wanted_BKS, buffer, counting)

    yield "slots", "with counters", median_ms(find), 5 * wanted_BKS.nbytes, "copy"


def _gather(method: DualDecoder) -> Iterator[tuple[str, str, float, int, str]]:
    from dualdecoder.kernels.gather import gather_records

    buffer, state = method.buffers[0], method.layers[0]
    fetch, host = method.ops.replace(buffer, _random_chunks(method, state, buffer)), method.host.records[0]
    for programs, rows, warps in GATHERS:
        options = {"programs": programs, "rows": rows, "num_warps": warps}
        ms = median_ms(lambda o=options: gather_records(host, buffer.records_BKSXCD, fetch, **o))
        yield "gather", f"{programs} programs, {rows} rows, {warps} warps", ms, buffer.records_BKSXCD.nbytes, "link"


def _random_chunks(method: DualDecoder, state: LayerState, buffer: ChunkBuffer) -> torch.Tensor:
    noise_BKN = torch.rand(state.landmarks_BKND.shape[:3], device="cuda")
    return noise_BKN.argsort(dim=-1)[..., : buffer.held_BKS.shape[-1]].sort(dim=-1).values


if __name__ == "__main__":
    main()
