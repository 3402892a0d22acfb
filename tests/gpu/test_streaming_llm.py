"""StreamingLLM on a GPU."""

import pytest
from gpu_support import check_gpu, check_synthetic

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("window", [60, 2000])
def test_gpu_equals_cpu_and_graph_equals_eager(window: int) -> None:
    check_gpu("streaming_llm", {"sinks": 4, "window": window})


def test_synthetic_context() -> None:
    check_synthetic("streaming_llm", {}, 122_000)
