"""Page-locked memory: what is locked is unlocked, whatever goes wrong; the lock itself needs a GPU."""

import gc
import threading

import pytest
import torch

from dualdecoder import pinned
from dualdecoder.errors import CapacityError, ConfigError
from dualdecoder.pinned import PAGE, NoRegistrar, PinnedMemory


class Recorder:
    """Stands in for CUDA: remembers what is locked, and fails at the ``fail_at``-th call."""

    def __init__(self, fail_at: int | None = None) -> None:
        self.locked: dict[int, int] = {}
        self.calls = 0
        self.fail_at = fail_at
        self.mutex = threading.Lock()

    def register(self, address: int, nbytes: int) -> None:
        with self.mutex:
            self.calls += 1
            if self.calls == self.fail_at:
                raise CapacityError("host memory: refused")
            assert address not in self.locked
            self.locked[address] = nbytes

    def unregister(self, address: int) -> None:
        del self.locked[address]


def test_the_whole_block_is_locked_in_pieces() -> None:
    recorder = Recorder()
    memory = PinnedMemory(5 * PAGE + 1, piece=2 * PAGE - 7, registrar=recorder)
    start = memory.tensor((1,), torch.uint8).data_ptr()
    assert recorder.locked == {start + i * PAGE: 2 * PAGE for i in (0, 2, 4)}
    memory.close()
    memory.close()
    assert recorder.locked == {}


def test_the_most_that_was_locked_at_once_is_known(monkeypatch) -> None:
    monkeypatch.setattr(pinned, "_METER", pinned._Meter())
    with PinnedMemory(2 * PAGE, registrar=Recorder()), PinnedMemory(3 * PAGE, piece=PAGE, registrar=Recorder()):
        assert pinned.peak_pinned_bytes() == 5 * PAGE
    with PinnedMemory(4 * PAGE, registrar=Recorder()):
        assert pinned.peak_pinned_bytes() == 5 * PAGE


def test_tensors_are_page_aligned_zeroed_and_apart() -> None:
    with PinnedMemory(4 * PAGE, registrar=NoRegistrar()) as memory:
        first = memory.tensor((3, 5), torch.float32)
        second = memory.tensor((2, PAGE // 4), torch.bfloat16)
        third = memory.tensor((PAGE + 1,), torch.int8)
        assert [t.data_ptr() % PAGE for t in (first, second, third)] == [0, 0, 0]
        assert not any(t.any() for t in (first, second, third))
        for value, tensor in enumerate((first, second, third)):
            tensor.fill_(value)
        assert all((tensor == value).all() for value, tensor in enumerate((first, second, third)))
        assert second.shape == (2, PAGE // 4) and second.is_contiguous()
        assert memory.nbytes == sum(pinned.whole_pages(t.nbytes) for t in (first, second, third))
        with pytest.raises(CapacityError, match="host memory: 1 bytes needed, 0 of 16,384 left"):
            memory.tensor((1,), torch.int8)


@pytest.mark.parametrize("fail_at", [1, 3, 8])
def test_a_failure_unlocks_what_was_locked(fail_at: int) -> None:
    recorder = Recorder(fail_at)
    with pytest.raises(CapacityError, match="refused"):
        PinnedMemory(8 * PAGE, piece=PAGE, registrar=recorder)
    assert recorder.calls >= fail_at
    assert recorder.locked == {}


def test_the_context_manager_unlocks_on_error() -> None:
    recorder = Recorder()
    with pytest.raises(RuntimeError, match="inside"), PinnedMemory(PAGE, registrar=recorder) as memory:
        raise RuntimeError("inside")
    assert recorder.locked == {}
    with pytest.raises(ConfigError, match="host memory='closed'"):
        memory.tensor((1,), torch.int8)


def test_memory_stays_locked_as_long_as_a_tensor_lives() -> None:
    recorder = Recorder()
    memory = PinnedMemory(PAGE, registrar=recorder)
    tensor = memory.tensor((4,), torch.int64)
    del memory
    gc.collect()
    assert recorder.locked == {tensor.data_ptr(): PAGE}
    del tensor
    gc.collect()
    assert recorder.locked == {}


def test_tensors_outlive_close() -> None:
    with PinnedMemory(PAGE, registrar=NoRegistrar()) as memory:
        tensor = memory.tensor((4,), torch.int64)
    assert tensor.fill_(7).tolist() == [7] * 4


def test_too_little_memory_is_an_error_before_anything_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(pinned.HOST_BYTES_VARIABLE, str(2 * PAGE))
    recorder = Recorder()
    with pytest.raises(CapacityError, match="host memory: 12,288 bytes needed, 8,192 available"):
        PinnedMemory(2 * PAGE + 1, registrar=recorder)
    assert recorder.calls == 0
    PinnedMemory(2 * PAGE, registrar=recorder).close()


def test_available_memory_comes_from_the_system_or_the_override(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(pinned.HOST_BYTES_VARIABLE, raising=False)
    assert pinned.available_host_bytes() > 0
    with pytest.raises(CapacityError, match=r"host memory: .* needed"):
        PinnedMemory(1 << 50, registrar=NoRegistrar())
    monkeypatch.setenv(pinned.HOST_BYTES_VARIABLE, "12GiB")
    with pytest.raises(ConfigError, match="DUALDECODER_HOST_BYTES='12GiB' is not allowed"):
        pinned.available_host_bytes()


def test_a_refusal_by_the_system_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(pinned.HOST_BYTES_VARIABLE, str(1 << 62))
    with pytest.raises(CapacityError, match="host memory: the system refused"):
        PinnedMemory(1 << 60, registrar=NoRegistrar())


def test_a_long_lock_shows_its_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinned, "PROGRESS_FROM", 2 * PAGE)
    recorder = Recorder()
    with PinnedMemory(3 * PAGE, piece=PAGE, registrar=recorder):
        assert len(recorder.locked) == 3


@pytest.mark.parametrize("arguments", [{"nbytes": 0}, {"nbytes": -1}, {"nbytes": 1, "piece": 0}])
def test_sizes_must_be_positive(arguments: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="positive number"):
        PinnedMemory(**arguments, registrar=NoRegistrar())


@pytest.mark.gpu
def test_cuda_sees_the_memory_as_pinned() -> None:
    with PinnedMemory(64 << 20, piece=16 << 20) as memory:
        host = memory.tensor((16 << 20,), torch.int32)
        assert host.is_pinned()
        host.copy_(torch.arange(16 << 20))
        copies = [piece.to("cuda", non_blocking=True) for piece in host.split(4 << 20)]
        assert torch.equal(torch.cat(copies).cpu(), host)
        torch.cuda.synchronize()
    assert not host.is_pinned()
