"""The console command, run as a user runs it."""

import subprocess
import sys

import pytest

from dualdecoder.cli import main


def test_generate_prints_text_and_figures(tmp_path, capsys) -> None:
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("What is the capital of France? Answer in one sentence.")
    arguments = ["generate", "--prompt-file", str(prompt), "--chat", "--max-new-tokens", "16", "--option", "budget=64"]
    assert main(arguments) == 0
    output = capsys.readouterr().out
    assert output.startswith("The capital of France is Paris.")
    for wanted in ("tokens/s", "hit_rate", "urgent_bytes", "prefetched_bytes", "landmarks", "host"):
        assert wanted in output


def test_plan_prints_bytes(capsys) -> None:
    assert main(["plan", "--model", "llama-3.1-8b", "--context", "131072", "--batch", "12"]) == 0
    assert "12,884,901,888 bytes" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan", "--model", "gpt-5"], "model shape 'gpt-5' is not known; allowed: llama-3-8b"),
        (["plan", "--option", "budget=7"], "budget=7 is not allowed"),
        (["plan", "--option", "budget"], "--option 'budget' is not allowed; allowed: NAME=VALUE"),
        (["plan", "--option", "budget=[1"], "--option 'budget=[1' is not allowed"),
        (["plan", "--batch", "0"], "batch=0 is not allowed"),
        (["generate", "--prompt", "x", "--method", "nope"], "method='nope' is not known"),
        (["generate", "--prompt-file", "absent.txt"], "absent.txt"),
        (["generate", "--prompt", "x", "--model", "absent"], "model='absent' is not readable"),
    ],
)
def test_errors_are_one_line(arguments: list[str], message: str, capsys) -> None:
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
    assert error.count("\n") == 1


def test_a_closed_pipe_is_not_an_error() -> None:
    command = f"{sys.executable} -m dualdecoder plan | head -1"
    result = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True)
    assert "weights" in result.stdout
    assert "Traceback" not in result.stderr
