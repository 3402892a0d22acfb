"""H2O on a GPU."""

import pytest
from gpu_support import check_gpu, check_synthetic

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("heavy", [40, 1000])
def test_gpu_equals_cpu_and_graph_equals_eager(heavy: int) -> None:
    check_gpu("h2o", {"heavy": heavy, "recent": 30})


def test_synthetic_context() -> None:
    check_synthetic("h2o", {}, 122_000)
