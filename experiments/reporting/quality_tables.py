"""The tables of quality: RULER, fidelity, lm-eval. Frames of records to frames of texts."""

import pandas as pd

from experiments.reporting.cells import arranged, fixed, in_order, length_text, percent, with_budget

RULER_UNIT = ", score % (95 % interval: Wilson; ~ bootstrap, for partial credit)"
NO_DATA = "no data"
# `differs` stands in the caption.
_IN_RECORDS_ONLY = ["scores", "ci95", "answers", "expected", "tokens", "differs"]


def ruler_numbers(rows: pd.DataFrame) -> pd.DataFrame:
    """Scores with the ends of their intervals; single answers stay in the records."""
    ends = rows["ci95"].map(lambda ends: ends if isinstance(ends, list) else [None, None])
    kinds = rows["interval"] if "interval" in rows else pd.Series("wilson", rows.index)
    rows = rows.drop(columns=_IN_RECORDS_ONLY, errors="ignore").assign(
        ci95_low=[low for low, _ in ends], ci95_high=[high for _, high in ends], interval=kinds
    )
    numeric = ["score", "ci95_low", "ci95_high"]
    return arranged(
        rows.astype(dict.fromkeys(numeric, float)), ["model", "length", "point_budget", "task", "method", "budget"]
    )


def ruler_texts(table: pd.DataFrame) -> pd.DataFrame:
    """One line per task, one column per method (and budget), and the mean over the tasks that all methods have."""
    keys = ["task", "samples"]
    # Somebody's method may have the name of a column.
    table = table.assign(method=[f"method {name}" if name in keys else name for name in table["method"]])
    columns = list(dict.fromkeys(with_budget(in_order(table, ["method", "budget"]))["method"]))
    named = with_budget(table).assign(
        samples=fixed(table["samples"], 0), cell=[_score_text(line) for line in table.to_dict("records")]
    )
    wide = named.pivot_table(index=keys, columns="method", values="cell", aggfunc=" / ".join, sort=False)
    lines = wide[columns].fillna("-").rename_axis(columns=None).reset_index()
    return pd.concat([lines, _average(named, columns)], ignore_index=True)


def _score_text(line: dict[str, float | str]) -> str:
    if pd.isna(line["score"]):
        return NO_DATA
    mark = "~" if line["interval"] == "bootstrap" else ""
    return f"{line['score']:.1f} ({mark}{line['ci95_low']:.1f}-{line['ci95_high']:.1f})"


def _average(named: pd.DataFrame, columns: list[str]) -> pd.DataFrame:
    """The line of means; none with a single task, of which it would say nothing new."""
    scores = named.pivot_table(index="task", columns="method", values="score", aggfunc="mean")
    complete = scores.reindex(columns=columns).dropna()
    if len(complete) < 2:
        return pd.DataFrame()
    means = {name: f"{complete[name].mean():.1f}" for name in columns}
    return pd.DataFrame([{"task": f"mean of {len(complete)} tasks", "samples": "", **means}])


def fidelity_numbers(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows by model, context, method and budget."""
    optional = {"budget": float, "attention_mass": float, "attended_tokens": float}
    return arranged(rows.astype(optional), ["model", "context", "method", "budget"])


def fidelity_texts(table: pd.DataFrame) -> pd.DataFrame:
    """One line a method and budget."""
    return pd.DataFrame(
        {
            "context": [length_text(value) for value in table["context"]],
            "method": table["method"],
            "budget": fixed(table["budget"], 0),
            "attended tokens": fixed(table["attended_tokens"], 0),
            "tokens": fixed(table["texts"] * (table["steps"] - 1), 0),
            "KL mean, nats": [f"{value:.4f}" for value in table["kl_mean"].clip(lower=0)],
            "KL 99th percentile": [f"{value:.4f}" for value in table["kl_p99"].clip(lower=0)],
            "top-1 agreement %": percent(table["top1_agreement"]),
            "attention mass %": percent(table["attention_mass"]),
        }
    )


def harness_numbers(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows of lm-eval by task, metric and method."""
    optional = {"budget": float, "stderr": float}
    return arranged(rows.astype(optional), ["model", "task", "metric", "method", "budget"])


def harness_texts(table: pd.DataFrame) -> pd.DataFrame:
    """One line a task, metric and method."""
    return pd.DataFrame(
        {
            "task": table["task"],
            "metric": table["metric"],
            "method": with_budget(table)["method"],
            "samples": fixed(table["samples"], 0),
            "value": fixed(table["value"], 3),
            "standard error": fixed(table["stderr"], 3),
        }
    )
