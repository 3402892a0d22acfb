"""The numbers of baselines/README.md are those of the code."""

import re
from pathlib import Path

import pytest
import torch

from dualdecoder.method import REGISTRY, method_class, method_config
from dualdecoder.shapes import SHAPES

README = (Path(__file__).resolve().parents[2] / "baselines" / "README.md").read_text(encoding="utf-8")
LINES = [[cell.strip() for cell in line.strip("|").split("|")] for line in re.findall(r"^\| .*", README, re.MULTILINE)]
ROWS = {line[0]: line[1:7] for line in LINES if line[0] in REGISTRY}


def test_the_lines_are_methods_and_each_has_a_section() -> None:
    assert {line[0] for line in LINES} - set(REGISTRY) == {"method", "---"}
    assert list(ROWS) == [name for name in REGISTRY if name in ROWS]
    assert set(re.findall(r"^### (\w+)", README, re.MULTILINE)) == set(ROWS)


@pytest.mark.parametrize("name", ROWS)
def test_promises_and_bytes_are_those_of_the_code(name: str) -> None:
    chosen, config = method_class(name), method_config(name, {})
    can = chosen.capabilities
    short, long = (
        chosen.plan(SHAPES["llama-3-8b"], config, 1, tokens, torch.bfloat16, "cuda") for tokens in (65536, 131072)
    )
    rows = chosen(SHAPES["tiny"], config, batch=1, context=64, dtype=torch.float32, device="meta").rows
    flags = ["yes" if flag else "no" for flag in (can.exact, can.recalls, can.offloads)]
    grown = (long.gpu_total - short.gpu_total, long.host_total - short.host_total)
    assert ROWS[name] == [*flags, str(rows), *(f"{size / 65536:,.0f}" for size in grown)]
