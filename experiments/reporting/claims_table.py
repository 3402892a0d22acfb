"""CLAIMS.md: what the paper claims, what was measured, and on what."""

from itertools import groupby
from typing import Any

from experiments.reporting.claims import NOT_RUN, Finding, Verdict
from experiments.reporting.escape import for_markdown

_HEAD = """# Claims

Made by `make verify` from [`conf/claims.yaml`](conf/claims.yaml) and the records below `results/`, never by hand.
A claim is *reproduced* if every check of it holds, *partly* if some hold, some have no record yet or the setting is not
the paper's, and *not reproduced* if none that was run holds. Planned bytes are judged apart from measurements. A speed
counts only if the method is known to have attended to at least 99 % of what it should have ("equal work").

| claim | verdict | on |
| --- | --- | --- |
"""


def claims_markdown(verdicts: list[Verdict]) -> str:
    """The whole file: a list of the verdicts, then each claim with its numbers."""
    lines = [f"| {verdict.claim['id']} | {_words(verdict)} | {_where(verdict)} |" for verdict in verdicts]
    sections = [_section(list(group)) for _, group in groupby(verdicts, key=lambda verdict: verdict.claim["id"])]
    return _HEAD + "\n".join(lines) + "\n\n" + "\n".join(sections)


def _section(verdicts: list[Verdict]) -> str:
    claim = verdicts[0].claim
    text = [
        f"## {claim['id']}: {claim['claim']}",
        "",
        f"{claim['where_in_paper']}. Experiment, about {claim['minutes']:g} min: `{claim['command']}`",
        "",
        "| on | check | paper | allowed | here | holds |",
        "| --- | --- | ---: | --- | ---: | --- |",
    ]
    text += [_line(verdict, finding) for verdict in verdicts for finding in verdict.findings]
    text += [f"\nNot measured: {part}." for part in claim.get("unmeasured", [])]
    return "\n".join(text) + "\n"


def _line(verdict: Verdict, finding: Finding) -> str:
    check = finding.check
    name = f"{check['name']} ({check['instead']})" if "instead" in check else check["name"]
    holds = ("yes" if finding.holds else "no") if finding.number else _missing(finding)
    cells = [_where(verdict), name, _text(check.get("paper")), _allowed(check), _here(finding), holds]
    return "| " + " | ".join(cells) + " |"


def _words(verdict: Verdict) -> str:
    if verdict.words != NOT_RUN:
        return verdict.words
    unequal = any(finding.left_out for finding in verdict.findings)
    return f"{NOT_RUN}: {'no record whose work is known to be equal' if unequal else verdict.claim['not_run']}"


def _missing(finding: Finding) -> str:
    return "no record of equal work" if finding.left_out else "no record"


def _where(verdict: Verdict) -> str:
    return {None: "-", "any": "planned bytes"}.get(verdict.hardware, for_markdown(verdict.hardware))


def _here(finding: Finding) -> str:
    if finding.number is None:
        return "-"
    spread = f" ± {100 * finding.number.spread:.1f} %" if finding.number.spread is not None else ""
    return _text(finding.number.value) + spread


def _allowed(check: dict[str, Any]) -> str:
    if "within" in check:
        return f"± {100 * check['within']:g} %"
    return f"at least {check['at_least']:g}" if "at_least" in check else f"at most {check['at_most']:g}"


def _text(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
