"""A test that hangs ends with its name and stacks; one that is slow, on a machine that is busy, does not."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from watchdog import IDLE, Watch, computed_s

LIMIT_S = 2.0
BODIES = {
    "waits": "import threading; threading.Event().wait()",
    "spins": "while True: pass",
    "waits for a child that waits": "import subprocess; subprocess.run(['sleep', '1000'])",
    "passes": "pass",
    "is stopped": "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)",
}


def start(folder: Path, body: str) -> subprocess.Popen[str]:
    """Pytest on one test with that body, which has LIMIT_S seconds."""
    (folder / "test_it.py").write_text(f"def test_it():\n    {body}\n")
    plugins = ["-p", "pytest_timeout", "-p", "watchdog", "-p", "no:cacheprovider"]
    options = [*plugins, f"--timeout={LIMIT_S}", "--rootdir", str(folder)]
    command = [sys.executable, "-m", "pytest", *options, str(folder / "test_it.py")]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


@pytest.mark.parametrize(
    ("body", "code"), [("waits", 1), ("spins", 1), ("waits for a child that waits", 1), ("passes", 0)]
)
def test_what_hangs_is_ended(tmp_path: Path, body: str, code: int) -> None:
    with start(tmp_path, BODIES[body]) as process:
        output, _ = process.communicate()
    assert process.returncode == code, output
    assert ("Failed: Timeout" in output) == bool(code)


def test_time_in_which_the_machine_gives_a_test_nothing_is_not_its_own(tmp_path: Path) -> None:
    with start(tmp_path, BODIES["is stopped"]) as process:
        assert os.WIFSTOPPED(os.waitpid(process.pid, os.WUNTRACED)[1])
        time.sleep(2 * LIMIT_S)
        process.send_signal(signal.SIGCONT)
        output, _ = process.communicate()
    assert process.returncode == 0, output


def counted(limit_s: float, computed: list[float]) -> tuple[float, int]:
    """The seconds left over and the alarms, if in each tick that share of a core was computed."""
    cpu_s, alarms = [0.0], []
    watch = Watch(limit_s, lambda: alarms.append(1), lambda: cpu_s[0])
    for share in computed:
        cpu_s[0] = watch.before_s + share * watch.tick_s
        watch.tick()
    return watch.spent_s, len(alarms)


@given(st.lists(st.floats(0, 0.99 * IDLE) | st.floats(1.01 * IDLE, 16), max_size=60), st.floats(0.1, 1000))
def test_a_tick_counts_what_was_computed_or_all_of_it_if_nothing_was(shares: list[float], limit_s: float) -> None:
    tick_s = min(5.0, limit_s / 10)
    own_s = tick_s * sum(1 if share < IDLE else min(share, 1) for share in shares)
    left_s, alarms = counted(limit_s, shares)
    assert left_s <= limit_s
    if own_s < 0.99 * limit_s:
        assert alarms == 0 and left_s == pytest.approx(own_s, rel=1e-2, abs=1e-2)


def test_a_busy_machine_gives_a_test_as_much_more_time_as_it_is_slower() -> None:
    idle_machine, busy_machine = counted(100, [1.0] * 21), counted(100, [0.125] * 159)
    assert idle_machine[1] == 1 and busy_machine[1] == 0
    assert counted(100, [0.0] * 21)[1] == 1
    assert counted(100, [0.0] * 42)[1] == 2


def test_what_children_compute_counts_while_they_live_and_after() -> None:
    spin = "import time\nwhile time.process_time() < 0.5: pass\nprint('done', flush=True)\ninput()"
    before_s = computed_s()
    with subprocess.Popen(
        [sys.executable, "-c", spin], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        child.stdout.readline()
        assert computed_s() - before_s >= 0.45
        child.communicate("\n")
    assert computed_s() - before_s >= 0.45
