"""Keys and values in 2 bits or 1, as SpeCache keeps them (arXiv 2503.16163, after KIVI, arXiv 2402.02750).

Keys share a scale and a zero per channel over a group of W consecutive tokens, values per token over a group of E
channels. Keys are quantised when a group is complete, a value when W newer ones exist; until then they are exact, in a
ring of the last W tokens. While the ring still holds tokens of a completed group, their keys in it are the dequantised
ones: ``dequantised`` up to ``length - W`` and the ring from there on are the whole cache.
A 16-bit word packs codes of 16 / bits tokens that lie W apart, so that the j-th codes of W words are one group of keys;
a GPU unpacks two words at a time. Words next to each other hold keys of neighbouring channels, but values of
neighbouring tokens: neighbours in the sums of attention's two products.
Suffixes: B sequences, K KV heads, D head size, W tokens of a group and of the ring, N groups, P blocks of words
(16 / bits groups each), T = N W tokens of capacity, C groups of E channels, X = K and V, L = scale and zero.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from dualdecoder import window
from dualdecoder.config import ModelConfig
from dualdecoder.errors import require
from dualdecoder.ledger import Ledger

# With 16 bits nothing is quantised: a code is the number itself, its scale 1 and its zero 0.
UNQUANTISED = 16
BITS = (1, 2, UNQUANTISED)


def codes_per_word(bits: int) -> int:
    """Codes that are stored in one element; an unquantised number is an element of its own."""
    return UNQUANTISED // bits


def quantise(x: Tensor, dim: int, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes (int16), scale and zero (dtype of x, size 1 in ``dim``) of groups along ``dim``.

    2 bits: levels from the smallest to the largest number. 1 bit: levels at 1/4 and 3/4 of that range.
    """
    if bits == UNQUANTISED:
        one = torch.ones_like(x.narrow(dim, 0, 1))
        return x, one, torch.zeros_like(one)
    wide = x.float()
    low, high = wide.amin(dim, keepdim=True), wide.amax(dim, keepdim=True)
    zero, scale = ((3 * low + high) / 4, (high - low) / 2) if bits == 1 else (low, (high - low) / (2**bits - 1))
    # The codes are chosen for the scale and zero as stored. All numbers of a group without a range are its zero.
    scale, zero = scale.to(x.dtype), zero.to(x.dtype)
    steps = (wide - zero.float()) / torch.where(scale > 0, scale, 1).float()
    codes = (steps + 0.5).floor().clamp(0, 2**bits - 1)
    return codes.to(torch.int16), scale, zero


def dequantise(codes: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """Numbers in the dtype of ``scale``; the three broadcast."""
    return (codes.float() * scale.float() + zero.float()).to(scale.dtype)


def pack(codes_NWD: Tensor, bits: int) -> Tensor:
    """Words ``[P, W, D]`` of N groups of codes, the last block filled up with zeros."""
    count = codes_per_word(bits)
    missing = -len(codes_NWD) % count
    codes_PJWD = F.pad(codes_NWD, (0, 0, 0, 0, 0, missing)).unflatten(0, (-1, count))
    packed_PWD = codes_PJWD[:, 0].clone()
    for j in range(1, count):
        packed_PWD |= codes_PJWD[:, j] << (bits * j)
    return packed_PWD


def unpack(packed: Tensor, bits: int) -> Tensor:
    """Codes ``[..., N, W, D]`` of words ``[..., P, W, D]``."""
    count = codes_per_word(bits)
    if count == 1:
        return packed
    codes = torch.stack([(packed >> (bits * j)) & (2**bits - 1) for j in range(count)], dim=-3)
    return codes.flatten(-4, -3)


def _insert(packed: Tensor, codes: Tensor, group_B: Tensor, bits: int) -> Tensor:
    """Words with the codes of one group of each sequence replaced; all but the first dimension are alike."""
    if bits == UNQUANTISED:
        return codes
    shift = (group_B % codes_per_word(bits) * bits).to(torch.int16).view(-1, *[1] * (codes.dim() - 1))
    others = ~(torch.full_like(shift, 2**bits - 1) << shift)
    return (packed & others) | (codes << shift)


def _write_where(target: Tensor, at: tuple[Tensor | slice, ...], new: Tensor, where_B: Tensor) -> None:
    kept = target[at]
    target[at] = torch.where(where_B.view(-1, *[1] * (kept.dim() - 1)), new, kept)


@dataclass(frozen=True)
class LowBitCache:
    """One layer's tokens. Codes are int16 words, or the numbers themselves with 16 bits; levels are scale and zero.

    Position p lies in group p // W; the ring holds it in slot p % W.
    """

    bits: int
    key_codes_BKPWD: Tensor
    key_levels_BKNLD: Tensor
    value_codes_BKPDW: Tensor
    value_levels_BKLCT: Tensor
    ring_BKXWD: Tensor

    @classmethod
    def allocate(
        cls, model: ModelConfig, batch: int, context: int, bits: int, group: int, dtype: torch.dtype, ledger: Ledger
    ) -> LowBitCache:
        """For ``context`` tokens in groups of ``group``, booked under ``low_bit`` and ``residual``.

        Raises ``ConfigError`` if the channels of a head cannot be divided into groups.
        """
        head_dim, lead, count = model.head_dim, (batch, model.kv_heads), codes_per_word(bits)
        channels = min(group, head_dim)
        require(head_dim % channels == 0, "model.head_dim", head_dim, f"a multiple of group ({channels} channels)")
        blocks = math.ceil(context / (group * count))
        code_type = dtype if bits == UNQUANTISED else torch.int16
        groups, key_codes = blocks * count, (*lead, blocks, group, head_dim)
        return cls(
            bits,
            ledger.on_device("low_bit", key_codes, code_type),
            ledger.on_device("low_bit", (*lead, groups, 2, head_dim), dtype),
            ledger.on_device("low_bit", (*lead, blocks, head_dim, group), code_type),
            ledger.on_device("low_bit", (*lead, 2, head_dim // channels, groups * group), dtype),
            ledger.on_device("residual", (*lead, 2, group, head_dim), dtype),
        )

    @property
    def group(self) -> int:
        """Tokens of a group and of the ring (W)."""
        return self.ring_BKXWD.shape[3]

    @property
    def tokens(self) -> int:
        """Tokens that there is room for (T)."""
        return self.value_levels_BKLCT.shape[-1]

    @property
    def token_bytes(self) -> float:
        """Bytes of one token of one sequence in low bits."""
        tensors = (self.key_codes_BKPWD, self.key_levels_BKNLD, self.value_codes_BKPDW, self.value_levels_BKLCT)
        return sum(tensor[0].nbytes for tensor in tensors) / self.tokens

    def write_prompt(self, sequence: int, k_TKD: Tensor, v_TKD: Tensor) -> None:
        """Take a prompt. Head by head, which bounds the transient memory."""
        for head in range(k_TKD.shape[1]):
            k_TD, v_TD = k_TKD[:, head], v_TKD[:, head]
            self._write_values(sequence, head, v_TD[: max(0, len(v_TD) - self.group)])
            last_WD = self._write_keys(sequence, head, k_TD)
            self._write_ring(sequence, head, k_TD, v_TD, last_WD)

    def _write_keys(self, sequence: int, head: int, k_TD: Tensor) -> Tensor:
        """Returns the last complete group, dequantised: ``[W, D]``, or ``[0, D]`` if there is none."""
        groups = len(k_TD) // self.group
        key_NWD = k_TD[: groups * self.group].unflatten(0, (groups, self.group))
        codes_NWD, scale_N1D, zero_N1D = quantise(key_NWD, 1, self.bits)
        self.key_levels_BKNLD[sequence, head, :groups] = torch.cat((scale_N1D, zero_N1D), dim=1)
        self._write_codes(self.key_codes_BKPWD[sequence, head], codes_NWD)
        return dequantise(codes_NWD[-1:], scale_N1D[-1:], zero_N1D[-1:]).flatten(0, 1)

    def _write_values(self, sequence: int, head: int, v_TD: Tensor) -> None:
        channel_groups = self.value_levels_BKLCT.shape[3]
        codes_TCE, scale_TC1, zero_TC1 = quantise(v_TD.unflatten(1, (channel_groups, -1)), 2, self.bits)
        levels_TCL = torch.cat((scale_TC1, zero_TC1), dim=2)
        self.value_levels_BKLCT[sequence, head, :, :, : len(v_TD)] = levels_TCL.permute(2, 1, 0)
        codes_TD = F.pad(codes_TCE.flatten(1), (0, 0, 0, -len(v_TD) % self.group))
        codes_NWD = codes_TD.unflatten(0, (len(codes_TD) // self.group, self.group))
        self._write_codes(self.value_codes_BKPDW[sequence, head].transpose(1, 2), codes_NWD)

    def _write_codes(self, target_PWD: Tensor, codes_NWD: Tensor) -> None:
        packed_PWD = pack(codes_NWD, self.bits)
        target_PWD[: len(packed_PWD)] = packed_PWD

    def _write_ring(self, sequence: int, head: int, k_TD: Tensor, v_TD: Tensor, last_WD: Tensor) -> None:
        start, complete = max(0, len(k_TD) - self.group), len(k_TD) // self.group * self.group
        k_TD = torch.cat((last_WD[len(last_WD) - max(0, complete - start) :], k_TD[complete:]))
        kv_1XTD = torch.stack((k_TD, v_TD[start:]))[None]
        window.write_prompt(self.ring_BKXWD[sequence, head : head + 1], start, kv_1XTD)

    def commit(self, k_BKD: Tensor, v_BKD: Tensor, length_B: Tensor, commit_B: Tensor) -> None:
        """Append one token to those sequences, of ``length_B`` tokens, where ``commit_B`` holds."""
        self._retire_value(length_B, commit_B & (length_B >= self.group))
        window.write_token(self.ring_BKXWD, length_B, torch.stack((k_BKD, v_BKD), dim=2), commit_B)
        self._close_group(length_B, commit_B & ((length_B + 1) % self.group == 0))

    def _retire_value(self, length_B: Tensor, where_B: Tensor) -> None:
        """The value whose slot the new token takes goes to low bits."""
        row_B, position_B = _rows(length_B), (length_B - self.group).clamp(min=0)
        group_B, slot_B = position_B // self.group, position_B % self.group
        channel_groups = self.value_levels_BKLCT.shape[3]
        value_BKD = self.ring_BKXWD[row_B, :, 1, slot_B]
        codes_BKCE, scale_BKC1, zero_BKC1 = quantise(value_BKD.unflatten(2, (channel_groups, -1)), 3, self.bits)
        levels_BKLC = torch.cat((scale_BKC1, zero_BKC1), dim=3).transpose(2, 3)
        _write_where(self.value_levels_BKLCT, (row_B, ..., position_B), levels_BKLC, where_B)
        at = (row_B, slice(None), group_B // codes_per_word(self.bits), slice(None), slot_B)
        packed_BKD = _insert(self.value_codes_BKPDW[at], codes_BKCE.flatten(2), group_B, self.bits)
        _write_where(self.value_codes_BKPDW, at, packed_BKD, where_B)

    def _close_group(self, length_B: Tensor, where_B: Tensor) -> None:
        """The ring's keys are a complete group and go to low bits; the ring keeps what attention sees of them."""
        row_B, group_B = _rows(length_B), length_B.clamp(max=self.tokens - 1) // self.group
        key_BKWD = self.ring_BKXWD[:, :, 0]
        codes_BKWD, scale_BK1D, zero_BK1D = quantise(key_BKWD, 2, self.bits)
        levels_BKLD = torch.cat((scale_BK1D, zero_BK1D), dim=2)
        _write_where(self.key_levels_BKNLD, (row_B, slice(None), group_B), levels_BKLD, where_B)
        at = (row_B, slice(None), group_B // codes_per_word(self.bits))
        packed_BKWD = _insert(self.key_codes_BKPWD[at], codes_BKWD, group_B, self.bits)
        _write_where(self.key_codes_BKPWD, at, packed_BKWD, where_B)
        seen_BKWD = dequantise(codes_BKWD, scale_BK1D, zero_BK1D)
        key_BKWD.copy_(torch.where(where_B.view(-1, 1, 1, 1), seen_BKWD, key_BKWD))

    def fill_random(self, generator: torch.Generator) -> None:
        """Random codes, levels as of normal values, and a random ring, for measuring without a prompt."""
        for codes in (self.key_codes_BKPWD, self.value_codes_BKPDW):
            if self.bits == UNQUANTISED:
                codes.normal_(generator=generator)
            else:
                codes.random_(generator=generator)
        for levels, dim in ((self.key_levels_BKNLD, 3), (self.value_levels_BKLCT, 2)):
            levels.select(dim, 0).fill_(1.0)
            levels.select(dim, 1).fill_(0.0 if self.bits == UNQUANTISED else (1 - 2**self.bits) / 2)
        self.ring_BKXWD.normal_(generator=generator)

    def dequantised(self) -> Tensor:
        """All capacity ``[B, K, 2, T, D]`` in the data dtype. What is not quantised yet is undefined, but finite."""
        scale_BKN1D, zero_BKN1D = self.key_levels_BKNLD.split(1, dim=3)
        key_BKNWD = dequantise(unpack(self.key_codes_BKPWD, self.bits), scale_BKN1D, zero_BKN1D)
        scale_BKTC1, zero_BKTC1 = self.value_levels_BKLCT.permute(2, 0, 1, 4, 3).unsqueeze(-1)
        codes_BKTD = unpack(self.value_codes_BKPDW, self.bits).transpose(3, 4).flatten(2, 3)
        value_BKTCE = dequantise(codes_BKTD.unflatten(3, (scale_BKTC1.shape[3], -1)), scale_BKTC1, zero_BKTC1)
        return torch.stack((key_BKNWD.flatten(2, 3), value_BKTCE.flatten(3)), dim=2)


def _rows(length_B: Tensor) -> Tensor:
    return torch.arange(len(length_B), device=length_B.device)
