"""What a user of the commands meets: help at once, one line for a mistake, a quiet end, and nothing overwritten."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from dualdecoder.errors import ConfigError
from experiments import report, verify
from experiments.__main__ import experiments
from experiments.harness.command import help_of
from experiments.harness.environment import ROOT
from experiments.harness.records import load_records
from experiments.harness.tokens import with_token_counts

HEAVY = {"torch", "pandas", "hydra", "matplotlib"}
COMMANDS = ("report", "verify", "reproduce", "notebooks")


def run(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, *arguments], cwd=cwd, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("name", ["throughput", "lm_eval", "report"])
def test_help_comes_before_anything_heavy_is_imported(name: str) -> None:
    result = run("-X", "importtime", "-m", f"experiments.{name}", "--help")
    assert result.returncode == 0 and f"experiments.{name}" in result.stdout
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in result.stderr.splitlines()}
    assert "ast" in imported and not imported & HEAVY


def test_every_command_has_help() -> None:
    for name in (*experiments(), *COMMANDS):
        assert f"experiments.{name}" in help_of(name), name
    for name in experiments():
        assert ("results_dir: results/local" in help_of(name) and "context:" in help_of(name)) or name in (
            "ruler",
            "lm_eval",
        )
    assert "methods: [full_kv" in help_of("ruler") and "hydra:" not in help_of("ruler")


def test_the_package_itself() -> None:
    assert re.fullmatch(r"dualdecoder \d+\.\d+\.\d+\n", run("-m", "experiments", "--version").stdout)
    assert {line.split()[0] for line in run("-m", "experiments", "--help").stdout.splitlines()} == set(experiments())
    wrong = run("-m", "experiments", "througput")
    assert wrong.returncode == 2 and wrong.stdout == ""
    assert (
        wrong.stderr.startswith("error: experiment 'througput' is not known; allowed: ")
        and wrong.stderr.count("\n") == 1
    )


def test_a_mistyped_folder_is_one_line_and_is_not_made(tmp_path: Path, capsys) -> None:
    folder = tmp_path / "mistyped"
    for main in (report.main, verify.main):
        assert main([f"results_dir={folder}"]) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: results_dir=") and error.count("\n") == 1 and not folder.exists()
    assert report.main([f"results_dir={tmp_path}", f"readme={tmp_path}/none.md"]) == 2
    assert "none.md" in capsys.readouterr().err and not (tmp_path / "tables").exists()


def test_own_results_are_judged_and_claims_are_not_overwritten(put, rows, tmp_path: Path, capsys) -> None:
    put("residency", rows=rows["residency"])
    before = (ROOT / "CLAIMS.md").read_bytes()
    own = f"results_dir={tmp_path}"
    assert verify.main([own]) == 0
    output = capsys.readouterr().out
    assert len(re.findall(r"^C\d+ ", output, re.MULTILINE)) >= 11
    for output_file in ("CLAIMS.md", str(ROOT / "CLAIMS.md"), "results/../CLAIMS.md"):
        assert verify.main([own, f"output={output_file}"]) == 2
    assert verify.main([own, "update=true"]) == 2
    assert verify.main([f"results={tmp_path}"]) == 0
    assert (ROOT / "CLAIMS.md").read_bytes() == before and not (tmp_path / "CLAIMS.md").exists()
    assert verify.main([own, f"output={tmp_path}/mine.md"]) == 0
    assert (tmp_path / "mine.md").read_text().startswith("# Claims")


def test_numbers_of_tokens_may_be_written_short() -> None:
    cfg = OmegaConf.create(
        {"context": "128K", "budget": "2K", "budgets": ["1K", 64], "metadata": {"length": "4K"}, "same": "${budget}"}
        | {"length": "${context}", "batch": 2}
    )
    changed = with_token_counts(cfg)
    assert (changed.context, changed.budget, changed.length, changed.same) == (131072, 2048, 131072, 2048)
    assert changed.budgets == [1024, 64] and changed.metadata.length == 4096 and cfg.context == "128K"
    with pytest.raises(ConfigError, match="budget='2X' is not allowed"):
        with_token_counts(OmegaConf.create({"budget": "2X"}))


def test_an_experiment_takes_2k(tmp_path: Path) -> None:
    folders = (f"results_dir={tmp_path}", f"hydra.sweep.dir={tmp_path}/hydra", "fresh_process=false")
    settings = ("model=tiny", "method=full_kv", "batch=2,3", "context=2K")
    result = run("-m", "experiments.residency", "-m", *settings, *folders)
    assert result.returncode == 0, result.stderr
    records, _ = load_records(tmp_path)
    assert [record.config["context"] for record in records] == [2048, 2048]


ENDS = """
import sys
sys.argv, sys.orig_argv = ["-m"], [sys.executable, "-m", "experiments.report"]
import experiments
sys.argv = ["report"]
{}
"""


@pytest.mark.parametrize("code", ["raise KeyboardInterrupt", "import os, signal; os.kill(os.getpid(), signal.SIGINT)"])
def test_an_interrupt_ends_without_a_traceback(code: str) -> None:
    heard = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)}
    source = ENDS.format("import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n" + code)
    result = subprocess.run([sys.executable, "-c", source], cwd=ROOT, capture_output=True, text=True, **heard)
    assert result.returncode in (130, -signal.SIGINT) and result.stderr == ""


def test_a_closed_pipe_ends_without_a_traceback() -> None:
    source = ENDS.format("for n in range(10**7): print(n)")
    with subprocess.Popen([sys.executable, "-c", source], cwd=ROOT, stdout=-1, stderr=-1, text=True) as child:
        child.stdout.readline()
        child.stdout.close()
        assert child.stderr.read() == ""
    assert child.returncode == 141
