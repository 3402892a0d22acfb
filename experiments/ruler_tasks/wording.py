"""RULER's sentences, read from the installed lm-eval package when they are first needed.

Scores can be compared with published ones only if prompts agree to the letter, and other projects' sentences do not
belong into this repository. lm-eval ships a port of NVIDIA's task definitions; its files are parsed, not imported
(importing one of them waits for a download). Where the port departs from NVIDIA's `scripts/data/synthetic/constants.py`
the text is put right here: the misspelt word in the prefix of variable tracking, and the space that starts every answer
prefix.
"""

import ast
import importlib.util
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from dualdecoder.errors import ConfigError

LM_EVAL = "0.4.13"
_MISSPELT, _SPELT = "assgined", "assigned"


@dataclass(frozen=True)
class Wording:
    """Templates with fields in braces; see the modules that fill them."""

    niah: str
    niah_prefix: str
    needle: str
    noise: str
    vt: str
    vt_prefix: str
    cwe: str
    cwe_prefix: str
    fwe: str
    fwe_prefix: str
    qa: str
    qa_prefix: str
    document: str


@cache
def wording() -> Wording:
    """All templates. Raises ConfigError if the installed lm-eval has no RULER tasks of the known form."""
    try:
        return _read(_folder())
    except (OSError, SyntaxError, KeyError, StopIteration) as error:
        raise ConfigError(
            f"lm_eval: its RULER files cannot be read as those of version {LM_EVAL} ({error!r}); run `make setup`"
        ) from error


def _folder() -> Path:
    spec = importlib.util.find_spec("lm_eval")
    if spec is None or spec.origin is None:
        raise ConfigError(f"lm_eval: is not installed; allowed: version {LM_EVAL}, run `make setup`")
    return Path(spec.origin).parent / "tasks" / "ruler"


def _read(folder: Path) -> Wording:
    files = ("niah_utils", "prepare_niah", "vt_utils", "cwe_utils", "fwe_utils", "qa_utils")
    trees = {name: ast.parse((folder / f"{name}.py").read_text(encoding="utf-8")) for name in files}
    constants = {name: _constants(tree) for name, tree in trees.items()}
    families = {
        "vt": constants["vt_utils"]["CONFIG"]["variable_tracking"],
        **{name: constants[f"{name}_utils"]["CONFIG"] for name in ("cwe", "fwe", "qa")},
    }
    return Wording(
        niah=constants["niah_utils"]["TEMPLATE"],
        niah_prefix=_with_space(_niah_prefix(trees["prepare_niah"])),
        needle=constants["prepare_niah"]["NEEDLE"],
        noise=_noise(trees["prepare_niah"]),
        document=constants["qa_utils"]["DOCUMENT_PROMPT"],
        **{name: family["template"] for name, family in families.items()},
        **{f"{name}_prefix": _with_space(family["answer_prefix"]) for name, family in families.items()},
    )


def _with_space(prefix: str) -> str:
    """NVIDIA's answer prefixes start with one space; the end is kept, as that of `vt` is a space too."""
    return " " + prefix.lstrip().replace(_MISSPELT, _SPELT)


def _constants(tree: ast.Module) -> dict[str, Any]:
    """Values of the module's top-level assignments of plain literals."""
    found = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            try:
                found[node.targets[0].id] = ast.literal_eval(node.value)
            except ValueError:
                continue
    return found


def _noise(tree: ast.Module) -> str:
    """The one literal that the haystack function assigns to its variable `haystack`."""
    function = next(
        node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == "get_haystack"
    )
    return next(
        node.value.value
        for node in ast.walk(function)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and _names(node) == ["haystack"]
    )


def _names(node: ast.Assign) -> list[str]:
    return [target.id for target in node.targets if isinstance(target, ast.Name)]


def _niah_prefix(tree: ast.Module) -> str:
    """The plural answer prefix: the f-string whose fields are exactly the type and the query, as a template."""
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            fields = [ast.unparse(part.value) for part in node.values if isinstance(part, ast.FormattedValue)]
            if fields == ["type_needle_v", "query"]:
                return "".join(_as_template(part) for part in node.values)
    raise KeyError("answer prefix of niah")


def _as_template(part: ast.expr) -> str:
    return part.value if isinstance(part, ast.Constant) else f"{{{ast.unparse(part.value)}}}"
