"""What the README says is there is there, and its tables are those of the committed records."""

import re
import subprocess
from pathlib import Path

import pytest
import yaml

from dualdecoder.method import REGISTRY
from experiments.reporting.readme import with_tables

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PACKAGES = ("dualdecoder", "baselines", "experiments")


def tree() -> set[str]:
    block = README.partition("How it fits together")[2].split("```")[1]
    lines = [line.split(maxsplit=1) for line in block.strip().splitlines()]
    assert all(len(line) == 2 for line in lines), "every file has a comment"
    return {line[0] for line in lines}


def test_the_tree_lists_every_source_file_and_no_other() -> None:
    files = {path.relative_to(ROOT).as_posix() for package in PACKAGES for path in (ROOT / package).rglob("*.py")}
    assert {name for name in tree() if name.endswith(".py")} == files


def test_folders_in_the_tree_exist_and_all_conf_groups_are_named() -> None:
    for name in tree():
        assert list(ROOT.glob(name)), name
    groups = {f"{path.parent.relative_to(ROOT).as_posix()}/*.yaml" for path in (ROOT / "conf").rglob("*.yaml")}
    assert groups == {name for name in tree() if name.startswith("conf/")}


def test_every_folder_and_document_at_the_top_is_named() -> None:
    shown = {name.partition("/")[0] for name in tree()}
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout.splitlines()
    folders = {name.partition("/")[0] for name in tracked if "/" in name and not name.startswith(".")}
    assert folders <= shown


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_commands_and_links_exist(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    for module in re.findall(r"-m (experiments\.\w+)", text):
        assert (ROOT / (module.replace(".", "/") + ".py")).is_file(), module
    for target in re.findall(r"(?:`|^|\n)make (\w+)", text):
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE), target
    for link in re.findall(r"\]\((?!http|#)([^)]+)\)", text):
        assert (ROOT / link).exists(), link
    for launcher in re.findall(r"hydra/launcher=(\w+)", text):
        assert launcher in {path.stem for path in (ROOT / "conf/hydra/launcher").glob("*.yaml")}, launcher


def test_tables_are_those_of_the_committed_records() -> None:
    """If this fails: make report ARGS="results_dir=results/cpu readme=README.md"."""
    shown = re.findall(r"<!-- table: (\w+)/(\w+)(?:, .+?)? -->", README)
    for folder, name in shown:
        assert (ROOT / "results" / folder / "tables" / f"{name}.md").is_file()
    promised = {
        "residency",
        "prediction",
        "ruler",
        "fidelity",
        "throughput",
        "method_time",
        "step_time",
        "attention_time",
    }
    assert {name for _, name in shown} == promised
    assert with_tables(README, ROOT / "results") == README


def test_every_method_has_a_config() -> None:
    files = {path.stem: yaml.safe_load(path.read_text()) for path in (ROOT / "conf/method").glob("*.yaml")}
    assert {stem for stem, content in files.items() if "label" not in content} == set(REGISTRY)
    assert all(content.get("label", content["name"]) == stem for stem, content in files.items())


def test_only_marked_blocks_are_replaced(tmp_path: Path) -> None:
    (tmp_path / "pc" / "tables").mkdir(parents=True)
    (tmp_path / "pc" / "tables" / "speed.md").write_text("# speed\n\n## all\n\n| a |\n")
    text = "before\n<!-- table: pc/speed -->\nold\n<!-- end of table -->\nafter\n"
    assert with_tables(text, tmp_path) == text.replace("old", "#### all\n\n| a |")
    (tmp_path / "pc" / "tables" / "speed.md").write_text(
        "# speed\n\ncaption\n\n## small: x\n\n| a |\n\n## big: y\n\n| b |\n"
    )
    part = text.replace("speed -->", "speed, big -->")
    assert with_tables(part, tmp_path) == part.replace("old", "caption\n\n#### big: y\n\n| b |")
    missing = text.replace("pc/", "other/")
    assert with_tables(missing, tmp_path) == missing
