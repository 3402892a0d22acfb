"""What a reader sees of a figure: titles, labels, panels that hold something, colours and numbers that stand apart."""

from itertools import combinations, pairwise
from pathlib import Path

import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from experiments.harness.environment import ROOT
from experiments.reporting.cells import ORDERS, spread
from experiments.reporting.collect import Collection, collect
from experiments.reporting.drawing import HATCHES, MARKERS, PALETTE, numbered
from experiments.reporting.figures import DRAWINGS, draw_figure
from experiments.reporting.paper import OUTPUTS, output_figure

MACHINES = [folder.name for folder in sorted((ROOT / "results").iterdir()) if folder.name not in ("local", "expected")]


@pytest.fixture(scope="module", params=MACHINES)
def figures(request) -> dict[str, Figure]:
    """Every figure of the committed records of one machine, by name."""
    return all_figures(collect(ROOT / "results" / request.param))


def all_figures(collection: Collection) -> dict[str, Figure]:
    drawn = {name: draw_figure(name, found) for name in DRAWINGS if (found := collection.sections(name))}
    papers = {output.name: output_figure(output.name, collection) for output in OUTPUTS}
    return drawn | {name: figure for name, figure in papers.items() if figure is not None}


def words(axis: Axes) -> tuple[str, str, str]:
    return axis.get_title(loc="left"), axis.get_xlabel(), axis.get_ylabel()


def test_every_panel_says_what_it_shows_and_shows_something(figures: dict[str, Figure]) -> None:
    assert len(figures) >= 5
    for name, figure in figures.items():
        assert figure.axes, name
        for axis in figure.axes:
            assert all(words(axis)), (name, words(axis))
            assert not {*words(axis)} & {*ORDERS["method"]}, (name, words(axis))
            assert axis.has_data(), (name, words(axis))
        titles = [words(axis)[0] for axis in figure.axes]
        assert "point_budget" not in "".join(titles)
        assert figure.get_size_inches()[0] == 10


def test_no_two_panels_of_a_row_have_the_same_title(figures: dict[str, Figure]) -> None:
    for name, drawing in DRAWINGS.items():
        if name in figures and len(drawing.panels) > 1:
            titles = [words(axis)[0] for axis in figures[name].axes]
            assert all(one.splitlines()[-1] != other.splitlines()[-1] for one, other in pairwise(titles))


def test_numbers_at_bars_do_not_overlap(figures: dict[str, Figure]) -> None:
    for name in ("residency", "ruler", "table1", "micro"):
        if name not in figures:
            continue
        figures[name].draw_without_rendering()
        for axis in figures[name].axes:
            boxes = [text.get_window_extent() for text in axis.texts if text.get_text() and not text.get_bbox_patch()]
            inside = axis.get_window_extent()
            assert all(box.y1 <= inside.y1 + 1 for box in boxes), (name, words(axis))
            # A pixel of the line above a letter is no overlap.
            shrunk = [box.padded(-1) for box in boxes]
            assert not any(one.overlaps(other) for one, other in combinations(shrunk, 2)), (name, words(axis))


def test_fidelity_has_three_named_panels_and_two_where_no_attention_mass_was_seen(put, rows, tmp_path: Path) -> None:
    put("fidelity", "seen")
    unseen = [{**row, "context": 2048, "attention_mass": None} for row in rows["fidelity"]]
    put("fidelity", "unseen", config={"context": 2048}, rows=unseen)
    figure = draw_figure("fidelity", collect(tmp_path).sections("fidelity"))
    assert [words(axis) for axis in figure.axes] == [
        ("tiny, context 1K\nDivergence", "budget, tokens", "KL mean, nats (from 1e-06 on)"),
        ("Agreement", "budget, tokens", "top-1 agreement, %"),
        ("Attention mass", "budget, tokens", "attention mass, %"),
        ("tiny, context 2K\nDivergence", "budget, tokens", "KL mean, nats (from 1e-06 on)"),
        ("Agreement", "budget, tokens", "top-1 agreement, %"),
    ]


def lightness_and_hue(color: str) -> tuple[float, float, float]:
    """CIE L*a*b* of a colour, in which equal distances look equally different."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(color)]
    weights = ((0.4124, 0.3576, 0.1805), (0.2126, 0.7152, 0.0722), (0.0193, 0.1192, 0.9505))
    xyz = [sum(w * c for w, c in zip(line, linear, strict=True)) for line in weights]
    x, y, z = (
        (v / white) ** (1 / 3) if v / white > 0.008856 else 7.787 * v / white + 16 / 116
        for v, white in zip(xyz, (0.95047, 1.0, 1.08883), strict=True)
    )
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def test_no_two_methods_look_alike_and_each_has_one_colour_everywhere(figures: dict[str, Figure]) -> None:
    assert len(PALETTE) == len(HATCHES) == len(MARKERS) > len(ORDERS["method"])
    assert len(set(HATCHES)) == len(HATCHES) and len(set(MARKERS)) == len(MARKERS)
    for one, other in combinations(PALETTE, 2):
        pairs = zip(lightness_and_hue(one), lightness_and_hue(other), strict=True)
        assert sum((a - b) ** 2 for a, b in pairs) > 20**2, (one, other)
    known = {name: look.color for name, look in numbered(ORDERS["method"], ORDERS["method"]).items()}
    assert len({*known.values()}) == len(known)
    for figure in figures.values():
        for axis in figure.axes:
            for bars in axis.containers:
                method = getattr(bars, "get_label", str)()
                if method in known and hasattr(bars, "patches"):
                    assert to_rgb(bars.patches[0].get_facecolor()) == to_rgb(known[method]), method
            for line in axis.get_lines():
                if line.get_label() in known:
                    assert to_rgb(line.get_color()) == to_rgb(known[line.get_label()]), line.get_label()


def test_budgets_of_a_method_have_its_colour_and_differ(put, rows, tmp_path: Path) -> None:
    full, sparse = rows["ruler"]
    put("ruler", rows=[full, {**sparse, "budget": 128}, {**sparse, "budget": 512}])
    (axis,) = draw_figure("ruler", collect(tmp_path).sections("ruler")).axes
    looks = {
        bars.get_label(): (bars.patches[0].get_facecolor(), bars.patches[0].get_hatch())
        for bars in axis.containers
        if hasattr(bars, "patches")
    }
    small, large, dense = (looks[name] for name in ("dualdecoder (128)", "dualdecoder (512)", "full_kv"))
    assert small[0] == large[0] != dense[0] and small[1] != large[1]


def test_texts_of_a_record_are_shown_as_they_are(put, rows, tmp_path: Path) -> None:
    hostile = "$\\frac{\n_x" + "long " * 100
    put("ruler", rows=[{**row, "model": hostile, "task": hostile, "method": "_hidden"} for row in rows["ruler"]])
    figure = draw_figure("ruler", collect(tmp_path).sections("ruler"))
    figure.draw_without_rendering()
    (axis,) = figure.axes
    assert axis.get_title(loc="left").startswith(r"\$\frac{ _xlong")
    assert [label.get_text().strip("\u200b") for label in axis.get_legend().get_texts()] == ["_hidden"]
    assert max(len(label.get_text()) for label in axis.get_xticklabels()) < 70


def test_spread_takes_the_ends() -> None:
    assert spread([1, 2, 3], 3) == [1, 2, 3]
    assert spread(list(range(100)), 4) == [0, 33, 66, 99]
    assert spread(list(range(7)), 1) == [0]
