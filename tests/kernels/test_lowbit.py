"""The low-bit kernels against the cache, attention and choice of the PyTorch reference."""

import math
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from baselines.kernels.lowbit_attention import LowBitTokens, lowbit_attention, wanted_splits
from baselines.kernels.lowbit_commit import commit_lowbit
from baselines.kernels.lowbit_products import NumberFormat
from baselines.kernels.lowbit_top import ChoiceWorkspace, choose_tokens
from baselines.lowbit import LowBitCache
from baselines.specache import ReferenceOps, SpeCacheLayer, Step
from dualdecoder.buffers import ChunkBuffer
from dualdecoder.config import ModelConfig
from dualdecoder.errors import ConfigError
from dualdecoder.host_store import HostStore
from dualdecoder.kernels.online_softmax import TRITON_TYPES
from dualdecoder.kernels.sparse_attention import SparseAttentionWorkspace
from dualdecoder.ledger import Ledger

NAN = float("nan")
# Relative error of a head's output; the interpreter truncates when it converts to bf16.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}


@dataclass(frozen=True)
class Shape:
    lengths: tuple[int, ...] = (300, 17, 64, 1)
    kv_heads: int = 2
    group_heads: int = 2
    rows: int = 2
    head_dim: int = 16
    bits: int = 2
    group: int = 16
    top: int = 5
    splits: int = 3
    dtype: torch.dtype = torch.float32
    new: int = 3

    @property
    def model(self) -> ModelConfig:
        heads = self.kv_heads * self.group_heads
        return ModelConfig("one-layer", 1, 8, 8, heads, self.kv_heads, self.head_dim, 16, 4096)

    @property
    def context(self) -> int:
        return max(self.lengths) + self.new


SHAPES = {
    "plain": Shape(),
    "one row": Shape(rows=1, splits=2),
    "one bit": Shape(bits=1, lengths=(275, 129)),
    "two groups of channels": Shape(head_dim=32, group_heads=3, lengths=(91,)),
    "two groups of channels, one bit": Shape(head_dim=64, group=32, bits=1, lengths=(290, 31), group_heads=1),
    "more splits than blocks": Shape(lengths=(70, 40), kv_heads=1, splits=9, top=1),
    "many exact tokens": Shape(top=40, lengths=(200, 30), group_heads=8, kv_heads=1),
    "blocks of several parts": Shape(head_dim=128, group=64, lengths=(1300, 583), kv_heads=1, top=30),
    "half": Shape(dtype=torch.float16, head_dim=64, group=64, lengths=(400, 130), group_heads=4, top=20),
    "bfloat": Shape(dtype=torch.bfloat16, head_dim=128, group=64, lengths=(330, 65), group_heads=7, kv_heads=1),
    "bfloat, one bit": Shape(dtype=torch.bfloat16, head_dim=64, group=64, bits=1, lengths=(700,), kv_heads=1),
}


def copied(cache: LowBitCache, device: str) -> LowBitCache:
    tensors = {name: t.clone().to(device) for name, t in vars(cache).items() if isinstance(t, Tensor)}
    return replace(cache, **tensors)


class Case:
    """A filled cache with chosen pairs, and one step's rows, on the CPU."""

    def __init__(self, shape: Shape, seed: int = 0, commit: tuple[bool, ...] | None = None) -> None:
        self.shape, self.batch = shape, len(shape.lengths)
        self.generator = torch.Generator().manual_seed(seed)
        ledger, model = Ledger("cpu"), shape.model
        sizes = (model, self.batch, shape.context, shape.bits, shape.group, shape.dtype, ledger)
        self.cache = LowBitCache.allocate(*sizes)
        self.cache.fill_random(self.generator)
        self.host = HostStore(model, self.batch, shape.context, 1, shape.dtype, ledger)
        self.pairs = ChunkBuffer.allocate(model, self.batch, shape.top, 1, shape.dtype, ledger)
        for b, length in enumerate(shape.lengths):
            k_TKD, v_TKD = (self.normal(length, shape.kv_heads, shape.head_dim) for _ in range(2))
            self.cache.write_prompt(b, k_TKD, v_TKD)
            self.host.records[0][b, :, :length, :, 0] = torch.stack((k_TKD, v_TKD), dim=2).transpose(0, 1)
        self._choose_at_random()
        heads = (shape.kv_heads * shape.group_heads, shape.kv_heads, shape.kv_heads)
        fused_BRHD = self.normal(self.batch, shape.rows, sum(heads), shape.head_dim)
        fused_BRHD[:, :, : heads[0]] *= 2
        self.rows = fused_BRHD.split(heads, dim=2)
        self.step = Step.begin(
            shape.rows, torch.tensor(shape.lengths), torch.tensor(commit or [True] * self.batch), shape.group
        )

    def normal(self, *size: int) -> Tensor:
        return torch.randn(size, generator=self.generator).to(self.shape.dtype)

    def _choose_at_random(self) -> None:
        shape, lead = self.shape, (self.batch, self.shape.kv_heads)
        chosen_BKS = torch.full((*lead, shape.top), -1)
        for b, length in enumerate(shape.lengths):
            low = length // shape.group * shape.group
            for head in range(shape.kv_heads):
                count = int(torch.randint(min(low, shape.top) + 1, (1,), generator=self.generator))
                chosen_BKS[b, head, :count] = torch.randperm(low, generator=self.generator)[:count].sort().values
        slot_BKS = torch.rand(chosen_BKS.shape, generator=self.generator).argsort(-1)
        self.pairs.records_BKSXCD.fill_(NAN)
        self.pairs.put(slot_BKS, self.host.read(0, chosen_BKS), chosen_BKS >= 0)
        self.state = SpeCacheLayer(self.cache, self.pairs, chosen_BKS, slot_BKS.int())

    def marked(self) -> Tensor:
        marked_BKT = torch.zeros((self.batch, self.shape.kv_heads, self.cache.tokens + 1), dtype=torch.int8)
        marked_BKT.scatter_(2, self.state.chosen_BKS.where(self.state.chosen_BKS >= 0, self.cache.tokens), 1)
        return marked_BKT[:, :, :-1].contiguous()

    def reference(self) -> tuple[Tensor, Tensor]:
        """Outputs in fp32, and the last row's mean probabilities by position."""
        ops = ReferenceOps(self.shape.context)
        ops.begin_step(self.step)
        cache = LowBitCache(*(t.float() if torch.is_tensor(t) and t.is_floating_point() else t
                              for t in vars(self.cache).values()))  # fmt: skip
        records_BKSXCD = self.pairs.records_BKSXCD.nan_to_num().float()
        pairs = ChunkBuffer(records_BKSXCD, self.pairs.held_BKS)
        o_BRHD = ops.attend(0, replace(self.state, cache=cache, pairs=pairs), *(t.float() for t in self.rows))
        return o_BRHD, ops.probability_BKT

    def tokens(self, device: str) -> LowBitTokens:
        cache, state = self.cache, self.state
        tensors = (
            cache.key_codes_BKPWD, cache.key_levels_BKNLD, cache.value_codes_BKPDW, cache.value_levels_BKLCT,
            cache.ring_BKXWD, self.marked(), self.pairs.records_BKSXCD, state.slot_BKS, state.chosen_BKS,
            self.step.length_B,
        )  # fmt: skip
        return LowBitTokens(*(t.to(device) for t in tensors))

    def workspace(self, device: str) -> SparseAttentionWorkspace:
        s = self.shape
        workspace = SparseAttentionWorkspace.allocate(
            Ledger(device), self.batch, s.kv_heads, s.head_dim, s.context, s.splits
        )
        for tensor in (workspace.partial_BKZMD, workspace.peak_BKZM, workspace.total_BKZM):
            tensor.fill_(NAN)
        return workspace

    def attend(self, device: str, workspace: SparseAttentionWorkspace) -> tuple[Tensor, Tensor]:
        """Outputs and the last row's logits, both full of NaN before."""
        q_BRHD, k_BRKD, v_BRKD = (t.to(device) for t in self.rows)
        lead = (self.batch, self.shape.kv_heads, self.shape.context, self.shape.group_heads)
        logits_BKTG = torch.full(lead, NAN, device=device)
        o_BRHD = torch.full(q_BRHD.shape, NAN, dtype=self.shape.dtype, device=device)
        lowbit_attention(q_BRHD, k_BRKD, v_BRKD, self.tokens(device), workspace, logits_BKTG, o_BRHD)
        return o_BRHD, logits_BKTG


def poison(case: Case) -> None:
    """NaN in all levels and ring slots of tokens that are not there."""
    cache, group = case.cache, case.shape.group
    for b, length in enumerate(case.shape.lengths):
        cache.key_levels_BKNLD[b, :, length // group :] = NAN
        cache.value_levels_BKLCT[b, ..., max(0, length - group) :] = NAN
        cache.ring_BKXWD[b, :, :, length:] = NAN


@pytest.mark.parametrize("name", SHAPES)
def test_attention_and_logits_are_those_of_the_reference(name: str, device: str) -> None:
    case = Case(SHAPES[name], seed=len(name))
    expected_BRHD, probability_BKT = case.reference()
    poison(case)
    workspace = case.workspace(device)
    got_BRHD, logits_BKTG = case.attend(device, workspace)
    error = (got_BRHD.float().cpu() - expected_BRHD).norm(dim=-1) / expected_BRHD.norm(dim=-1)
    assert (error < TOLERANCE[case.shape.dtype]).all(), error.max()
    assert workspace.arrived_BK.count_nonzero() == 0
    check_logits(case, logits_BKTG.cpu(), probability_BKT)
    again_BRHD, _ = case.attend(device, workspace)
    assert torch.equal(again_BRHD, got_BRHD)


def check_logits(case: Case, logits_BKTG: Tensor, probability_BKT: Tensor) -> None:
    """Every candidate has its logit. Probabilities relative to those of the highest one need no logsumexp."""
    for b, candidates in enumerate(case.step.candidates_B.tolist()):
        logits_HT = logits_BKTG[b, :, :candidates].transpose(1, 2).flatten(0, 1)
        assert logits_HT.isfinite().all()
        if case.shape.group_heads == 1:
            expected_HT = probability_BKT[b, :, :candidates].log2()
            got, want = (x - x[:, :1] for x in (logits_HT, expected_HT))
            torch.testing.assert_close(got, want, rtol=0, atol=2e-3 if case.shape.dtype == torch.float32 else 0.1)


@pytest.mark.parametrize("name", [name for name, shape in SHAPES.items() if shape.dtype == torch.float32])
@pytest.mark.parametrize("seed", range(2))
def test_the_choice_is_that_of_the_reference(name: str, seed: int, device: str) -> None:
    shape = SHAPES[name]
    commit = tuple(b != seed for b in range(len(shape.lengths)))
    case = Case(shape, seed, commit)
    ops, step = ReferenceOps(shape.context), case.step
    workspace = case.workspace(device)
    _, logits_BKTG = case.attend(device, workspace)
    chosen_BKS, marked_BKT = case.state.chosen_BKS.clone().to(device), case.marked().to(device)
    choice = ChoiceWorkspace.allocate(Ledger(device), case.batch, shape.kv_heads, shape.context, shape.top)
    per_sequence = (t.to(device) for t in (step.candidates_B, step.exact_from_B, step.chooses_B))
    choose_tokens(logits_BKTG, workspace, shape.rows, *per_sequence, choice, chosen_BKS, marked_BKT)
    case.pairs.records_BKSXCD.nan_to_num_()
    ops.begin_step(step)
    ops.attend(0, case.state, *case.rows)
    ops.choose(0, case.state, torch.zeros(7, dtype=torch.int64))
    assert torch.equal(chosen_BKS.cpu(), case.state.chosen_BKS)
    assert torch.equal(marked_BKT.cpu(), case.marked())


@pytest.mark.parametrize("name", ["plain", "one bit", "two groups of channels, one bit", "half"])
def test_commits_are_those_of_the_cache(name: str, device: str) -> None:
    """Enough tokens that every sequence completes a group, each in some steps only."""
    shape = replace(SHAPES[name], new=SHAPES[name].group * 3 // 2)
    case = Case(shape)
    cache, host = copied(case.cache, device), case.host.records[0].clone()
    host = host.pin_memory() if device == "cuda" else host
    length_B, ops = torch.tensor(shape.lengths), ReferenceOps(shape.context)
    for _ in range(shape.new + 5):
        # The longest sequence gets to the end of its room and stays there.
        commit_B = (torch.rand(case.batch, generator=case.generator) < 0.9) & (length_B < shape.context)
        k_BKD, v_BKD = case.normal(case.batch, 2, 2 * shape.kv_heads, shape.head_dim)[:, 0].chunk(2, dim=1)
        ops.begin_step(Step.begin(1, length_B, commit_B, shape.group))
        ops.commit(0, case.state, case.host, k_BKD, v_BKD)
        commit_lowbit(cache, host, *(t.to(device) for t in (k_BKD, v_BKD, length_B, commit_B)))
        length_B = length_B + commit_B
    assert (length_B - torch.tensor(shape.lengths) > shape.group).all()
    if device == "cuda":
        torch.cuda.synchronize()
    assert torch.equal(host, case.host.records[0])
    for name_, expected in vars(case.cache).items():
        got = getattr(cache, name_)
        if isinstance(expected, Tensor) and expected.dtype == torch.int16:
            assert torch.equal(got.cpu(), expected), name_
        elif isinstance(expected, Tensor):
            torch.testing.assert_close(got.cpu(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("bits", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_bit_patterns_are_the_numbers_they_should_be(dtype: torch.dtype, bits: int) -> None:
    """Also in bf16, which the interpreter computes in fp32. Every place of a byte, and nothing but powers of two."""
    number, code = NumberFormat.of(TRITON_TYPES[dtype]), torch.arange(2**bits)
    for place in range(0, 8, bits):
        pattern = (code << place + number.lift).to(torch.int16)
        for gain, back in ((number.key_gain, number.key_back), (number.value_gain, number.value_back)):
            assert torch.equal(pattern.view(dtype).double() * gain * back, code.double() * 2**place)
    assert all(math.frexp(factor)[0] == 0.5 for factor in number[1:])


def test_a_large_channel_of_keys_overflows_no_half(device: str) -> None:
    """A query's number times a key's scale of 4,740: far below the largest number of fp16, far above what is usual."""
    case = Case(SHAPES["half"])
    case.cache.key_levels_BKNLD[..., 0, 5] = 118.5
    case.rows[0][..., 5] = 40.0
    expected_BRHD, _ = case.reference()
    got_BRHD, _ = case.attend(device, case.workspace(device))
    error = (got_BRHD.float().cpu() - expected_BRHD).norm(dim=-1) / expected_BRHD.norm(dim=-1)
    assert (error < TOLERANCE[torch.float16]).all(), error.max()


@pytest.mark.parametrize(("heads", "blocks", "expected"), [(8, 512, 64), (96, 512, 10), (8, 3, 3), (4096, 9, 1)])
def test_splits_fill_the_gpu_but_not_more(heads: int, blocks: int, expected: int) -> None:
    assert wanted_splits(heads, blocks) == expected


@pytest.mark.parametrize(
    ("shape", "field"),
    [
        (Shape(group_heads=9), "rows"),
        (Shape(head_dim=64), "group"),
        (Shape(bits=16), "bits"),
        (Shape(head_dim=24, group=24), "group"),
        (Shape(splits=1), "splits"),
    ],
)
def test_shapes_without_a_kernel_are_refused(shape: Shape, field: str, device: str) -> None:
    with pytest.raises(ConfigError, match=field):
        case = Case(shape)
        case.attend(device, case.workspace(device))


@pytest.mark.gpu
@pytest.mark.parametrize("bits", [1, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_paper_size_on_the_gpu(bits: int, dtype: torch.dtype) -> None:
    shape = Shape((20_000, 12_345, 700), 8, 4, 2, 128, bits, 64, 64, 17, dtype)
    case = Case(shape, seed=bits)
    expected_BRHD, _ = case.reference()
    poison(case)
    workspace = case.workspace("cuda")
    outputs = [case.attend("cuda", workspace)[0] for _ in range(10)]
    error = (outputs[0].float().cpu() - expected_BRHD).norm(dim=-1) / expected_BRHD.norm(dim=-1)
    assert (error < TOLERANCE[dtype]).all(), error.max()
    assert all(torch.equal(outputs[0], other) for other in outputs)
