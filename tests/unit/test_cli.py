"""The console command, run as a user runs it."""

import json
import math
import os
import subprocess
import sys

import pytest

from dualdecoder.cli import main
from dualdecoder.commands import statistics_entries
from dualdecoder.completions import RunStatistics
from dualdecoder.reading_bar import reading_bar

GENERATE = ["generate", "--prompt", "The capital of France is", "--method", "full_kv", "--max-new-tokens", "3"]


def test_generate_prints_text_and_figures(tmp_path, capsys) -> None:
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("What is the capital of France? Answer in one sentence.")
    arguments = ["generate", "--prompt-file", str(prompt), "--chat", "--max-new-tokens", "16", "--option", "budget=64"]
    assert main(arguments) == 0
    output = capsys.readouterr()
    assert output.out == "The capital of France is Paris.\n"
    for wanted in ("tokens/s", "hit_rate", "urgent_bytes", "prefetched_bytes", "landmarks", "host"):
        assert wanted in output.err


def test_generate_as_json(capsys) -> None:
    assert main([*GENERATE, "--json"]) == 0
    output = json.loads(capsys.readouterr().out)
    assert (output["text"], output["finish_reason"], output["prompt_tokens"]) == (" Paris.\n", "length", 5)
    assert (output["new_tokens"], len(output["token_ids"])) == (3, 3)
    memory = output["memory_bytes"]
    assert memory["device_total"] == sum(memory["device"].values()) > 0


def test_json_holds_null_where_there_is_no_number() -> None:
    entries = statistics_entries(RunStatistics(method={"hit_rate": math.nan}), "cpu")
    assert (entries["tokens_per_s"], entries["hit_rate"]) == (None, None)


@pytest.mark.parametrize("context", ["131072", "128K", "128k"])
def test_plan_prints_bytes(capsys, context: str) -> None:
    arguments = ["plan", "--model", "llama-3.1-8b", "--context", context, "--batch", "12"]
    assert main(arguments) == 0
    assert "12,884,901,888 bytes" in capsys.readouterr().out
    assert main([*arguments, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["device"]["landmarks"] == 12_884_901_888
    assert plan["device_total"] == sum(plan["device"].values())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan", "--model", "gpt-5"], "model shape 'gpt-5' is not known; allowed: llama-3-8b"),
        (["plan", "--option", "budget=7"], "budget=7 is not allowed"),
        (["plan", "--option", "budget=abc"], "budget='abc' is not allowed; allowed: int"),
        (["plan", "--option", "budget=256.5"], "budget=256.5 is not allowed"),
        (["plan", "--option", "budget"], "--option 'budget' is not allowed; allowed: NAME=VALUE"),
        (["plan", "--option", "budget=[1"], "--option 'budget=[1' is not allowed"),
        (["plan", "--option", "budget=2024-13-45"], "--option 'budget=2024-13-45' is not allowed"),
        (["plan", "--batch", "0"], "batch=0 is not allowed"),
        (["plan", "--context", "0"], "context=0 is not allowed"),
        (["plan", "--dtype", "int8"], "dtype='int8' is not allowed; allowed: float32"),
        (["generate", "--prompt", "x", "--method", "nope"], "method='nope' is not known"),
        (["generate", "--prompt-file", "absent.txt"], "absent.txt"),
        (["generate", "--prompt-file", "."], "directory"),
        (["generate", "--prompt", "x", "--model", "absent"], "model='absent' is not readable"),
        (["generate", "--prompt", "x", "--device", "foo"], "device='foo' is not allowed; allowed: cpu"),
        (["generate", "--prompt", "x", "--device", "cuda:99"], "device='cuda:99' is not allowed; allowed: cpu"),
        (["generate", "--prompt", "x", "--seed", "-1"], "seed=-1 is not allowed; allowed: an integer from 0"),
        (["generate", "--prompt", "x", "--temperature", "inf"], "temperature=inf is not allowed"),
        (["generate", "--prompt", "x", "--top-k", "0"], "top_k=0 is not allowed"),
        (["generate", "--prompt", ""], "prompts[0]=[] is not allowed; allowed: at least one token"),
        (["generate", "--prompt", "a\udcffb"], "prompts[0]: character 1 is half of one"),
    ],
)
def test_errors_are_one_line(arguments: list[str], message: str, capsys) -> None:
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan", "--batch", "1.5"], "argument --batch: '1.5' is not allowed; allowed: an integer"),
        (["plan", "--context", "128KB"], "argument --context: tokens='128KB' is not allowed"),
        (["generate", "--prompt", "x", "--max-new-tokens", "2.5"], "argument --max-new-tokens: tokens='2.5'"),
        (["generate", "--prompt", "x", "--temperature", "hot"], "argument --temperature: 'hot' is not allowed"),
        (["generate"], "--prompt"),
        (["plan", "--bach", "3"], "--bach"),
        ([], "COMMAND"),
    ],
)
def test_arguments_that_cannot_be_read_are_one_line(arguments: list[str], message: str, capsys) -> None:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    error = capsys.readouterr().err
    assert end.value.code == 2
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("data", [b"caf\xe9 \x96 notes", b"\xff\xfea\x00", b"ok \xed\xa0\x80"])
def test_a_prompt_file_that_is_not_utf_8(tmp_path, data: bytes, capsys) -> None:
    prompt = tmp_path / "notes.txt"
    prompt.write_bytes(data)
    assert main(["generate", "--prompt-file", str(prompt)]) == 2
    assert "notes.txt: byte 0x" in (error := capsys.readouterr().err)
    assert error.rstrip().endswith("is not UTF-8; allowed: UTF-8 text")


def test_a_byte_order_mark_is_no_part_of_the_prompt(tmp_path, capsys) -> None:
    prompt = tmp_path / "prompt.txt"
    prompt.write_bytes("\ufeffThe capital of France is".encode())
    assert main(["generate", "--prompt-file", str(prompt), *GENERATE[3:], "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["prompt_tokens"] == 5


@pytest.mark.parametrize("command", [[], ["generate"], ["plan"]])
@pytest.mark.parametrize("flag", ["--help", "--version"])
def test_help_and_version_need_no_torch(command: list[str], flag: str) -> None:
    arguments = [*command, flag]
    code = (
        "import sys\nfrom dualdecoder.__main__ import run\n"
        f"sys.argv[1:] = {arguments!r}\nstatus = run()\n"
        "assert not {'torch', 'numpy', 'transformers', 'rich'} & set(sys.modules)\nsys.exit(status)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")
    assert ("usage: " if flag == "--help" else "dualdecoder 0.") in result.stdout


def test_a_method_beside_the_user(tmp_path) -> None:
    """The console script finds a dotted method in the folder it is called in."""
    (tmp_path / "mine.py").write_text("from baselines.full_kv import FullKV\nclass Mine(FullKV):\n    pass\n")
    code = "import sys; from dualdecoder.cli import main; sys.exit(main())"
    arguments = [sys.executable, "-P", "-c", code, "plan", "--method", "mine:Mine", "--json"]
    result = subprocess.run(arguments, cwd=tmp_path, capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")
    assert json.loads(result.stdout)["device"]["kv"] > 0


PIPES = ["plan | head -1", "plan | true", "--help | true", "plan --json | true", "plan --batch 0 2>&1 | true"]


@pytest.mark.parametrize("pipe", [*PIPES, "generate --prompt x --method full_kv --max-new-tokens 2 2>&1 | true"])
def test_a_closed_pipe_is_not_an_error(pipe: str) -> None:
    command, _, reader = pipe.rpartition("|")
    # The reader is gone before the first word, however long the command takes to start.
    script = f"{{ sleep 0.2; {sys.executable} -m dualdecoder {command}; }} | {reader}"
    result = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
    assert result.stderr == ""


@pytest.mark.parametrize(("where", "status"), [(">&-", 0), (">/dev/full", 2)])
def test_an_output_that_cannot_be_written(where: str, status: int) -> None:
    result = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m dualdecoder plan {where}"], capture_output=True, text=True
    )
    assert result.returncode == status
    assert "Traceback" not in result.stderr
    assert "Exception" not in result.stderr


@pytest.mark.parametrize("module", ["dualdecoder.cli", "torch", "numpy", "dualdecoder.engine", "transformers"])
def test_ctrl_c_ends_quietly_while_it_imports(module: str) -> None:
    """The process sends it to itself when it looks for a module: the moment does not depend on the machine."""
    code = (
        "import os, runpy, signal, sys\n"
        "class Interrupt:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == {module!r}:\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupt())\n"
        f"sys.argv = ['dualdecoder', *{GENERATE!r}]\n"
        "runpy.run_module('dualdecoder', run_name='__main__')"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode in (130, -2)
    assert (result.stdout, result.stderr) == ("", "")


def test_ctrl_c_while_it_works(monkeypatch, capsys) -> None:
    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("dualdecoder.commands.plan", interrupted)
    assert main(["plan"]) == 130
    assert capsys.readouterr().err == ""


def test_the_bar_is_for_terminals_only() -> None:
    master, slave = os.openpty()
    with os.fdopen(slave, "w") as terminal:
        with reading_bar(terminal) as on_layer:
            on_layer(1, 2)
            on_layer(2, 2)
        terminal.flush()
        assert b"reading the prompt" in os.read(master, 65536)
    with open(os.devnull, "w") as file, reading_bar(file) as nothing:
        assert nothing is None
    with reading_bar(None) as nothing:
        assert nothing is None
