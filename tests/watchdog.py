"""When a test hangs: the clock behind pytest-timeout's limit.

On a busy machine a test that takes seconds may take minutes, and nothing is wrong. So its limit is not on the clock of
the wall: what counts are the seconds in which the test and its children computed, and those in which none of them did,
for a machine that is only slow lets them compute a little. Everything else is pytest-timeout's.
"""

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import psutil
import pytest
import pytest_timeout

TICK_S = 5.0
# The share of a core below which nobody computed: those who wait look now and then whether they still have to.
IDLE = 0.02


def computed_s() -> float:
    """CPU seconds of this process and its descendants, also of those that have ended and been waited for."""
    total_s = time.process_time() + sum(os.times()[2:4])
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            total_s += sum(process.cpu_times()[:4])
    return total_s


class Watch:
    """Calls ``hangs`` once ``limit_s`` seconds have counted, and again after as many more: cleaning up may hang too."""

    def __init__(self, limit_s: float, hangs: Callable[[], None], clock: Callable[[], float] = computed_s) -> None:
        self.limit_s, self.hangs, self.clock = limit_s, hangs, clock
        self.tick_s = min(TICK_S, limit_s / 10)
        self.spent_s, self.before_s = 0.0, clock()

    def tick(self) -> None:
        """To be called every ``tick_s`` seconds; how long it really has been since the last time does not matter."""
        begin_s = time.process_time()
        now_s = self.clock()
        computed = now_s - self.before_s
        self.spent_s += min(computed, self.tick_s) if computed >= IDLE * self.tick_s else self.tick_s
        self.before_s = now_s + time.process_time() - begin_s  # looking is no work of the test
        if self.spent_s > self.limit_s:
            self.spent_s = 0.0
            self.hangs()


@pytest.hookimpl
def pytest_timeout_set_timer(item: pytest.Item, settings: pytest_timeout.Settings) -> bool | None:
    """Instead of pytest-timeout's own timer, unless its method "thread" is asked for."""
    if settings.method != "signal" or threading.current_thread() is not threading.main_thread():
        return None
    watch = Watch(settings.timeout, lambda: pytest_timeout.timeout_sigalrm(item, settings))

    def cancel() -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)

    item.cancel_timeout = cancel
    signal.signal(signal.SIGALRM, lambda *_: watch.tick())
    signal.setitimer(signal.ITIMER_REAL, watch.tick_s, watch.tick_s)
    return True
