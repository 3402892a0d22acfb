"""InfiniGen on a GPU."""

import pytest
from gpu_support import check_gpu, check_synthetic

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("options", [{"cap": 40}, {"cap": 1000, "alpha": 1e9}, {"cap": 60, "ratio": 1.0}], ids=str)
def test_gpu_equals_cpu_and_graph_equals_eager(options: dict) -> None:
    check_gpu("infinigen", options)


@pytest.mark.parametrize("dense_layers", [1, 2, 4])
def test_any_number_of_dense_layers(dense_layers: int) -> None:
    check_gpu("infinigen", {"cap": 40, "dense_layers": dense_layers})


def test_synthetic_context() -> None:
    check_synthetic("infinigen", {"host_sequences": 1}, 122_000)
