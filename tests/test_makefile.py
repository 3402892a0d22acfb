"""The help of the Makefile cannot lie: it lists every target, and every target it lists does something."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "Makefile").read_text(encoding="utf-8")
PHONY = re.search(r"^\.PHONY: (.+)$", TEXT, re.MULTILINE)[1].split()


def make(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["make", "--no-print-directory", *arguments], cwd=ROOT, capture_output=True, text=True)


def test_help_is_the_default_and_lists_every_target() -> None:
    output = make().stdout
    assert output == make("help").stdout
    assert [line.split()[0] for line in output.splitlines()] == PHONY
    assert all(len(line.split()) > 2 for line in output.splitlines())


def test_every_rule_without_a_file_is_phony() -> None:
    assert re.findall(r"^([a-z]+):(?!=)", TEXT, re.MULTILINE) == PHONY


@pytest.mark.parametrize("target", PHONY)
def test_every_target_has_a_rule_that_does_something(target: str) -> None:
    # -B: as on a fresh checkout, where the environment has to be installed first.
    result = make("-n", "-B", target)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() and "Nothing to be done" not in result.stdout


def test_no_registry_address_and_no_machine_path() -> None:
    texts = [path.read_text() for path in (ROOT / "Makefile", *ROOT.glob("requirements*.lock"))]
    assert not any(re.search(r"https?://|index-url|find-links|/home/|/root/", text) for text in texts)


def test_a_python_that_is_too_old_or_missing_is_a_clear_error(tmp_path: Path) -> None:
    for name in ("sh", "echo", "cat"):
        (tmp_path / name).symlink_to(f"/bin/{name}")
    (tmp_path / "python3").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "python3").chmod(0o755)
    stamp = tmp_path / "venv" / ".installed"
    command = ["make", "setup", f"VENV={stamp.parent}", f"PATH={tmp_path}"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 2
    assert "Python 3.11, 3.12 or 3.13 is needed" in result.stderr
    assert not stamp.exists()
