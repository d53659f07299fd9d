import matplotlib
import numpy as np
import pytest

from curax.runs import drawing, pictures
from curax.runs.reading import Run

BY_NAME = {picture.name: picture for picture in pictures.PICTURES}
for_every_picture = pytest.mark.parametrize("name", BY_NAME)
METRICS = (
    *("eval/pass_rate", "eval/greedy_pass_rate", "outcome/mean", "rollout/tokens"),
    *("group/dead_fraction", "group/solved_fraction", "group/failed_fraction"),
    *("rollout/length_tokens", "policy/entropy_nats", "kl/behaviour_nats"),
    *("kl/ref_nats", "ratio/clipped_fraction", "gradient/norm", "loss/mean"),
    *("time/rollout_s", "time/update_s", "distance/k3_token_nats"),
    *(f"hint/{name}_{k}" for name in ("asked", "opened") for k in (1, 2, 3, 4)),
    *("hint/pass_rate", "hint/plain_pass_rate", "hint/transfer_pass_rate"),
    *("reflect/certainty_nats", "reflect/thought_tokens", "reflect/answer_tokens"),
    *("turns/count", "turns/observed_tokens", "environment/asked"),
    *("format/effective_number", "forecast/dead_fraction"),
    *(f"confidence/{name}_nats" for name in ("mean", "lowest", "tail")),
)


def a_run(seeds, steps):
    draw = np.random.default_rng(0)

    def value(name):
        shape = () if seeds == 1 or name.startswith("time/") else (seeds,)
        return draw.uniform(0.1, 0.4, shape).tolist()

    rows = [{"step": t} | {name: value(name) for name in METRICS} for t in range(steps)]
    warm = [{"step": t, "warm/loss_nats": 1.0} for t in range(steps)]
    before, after = draw.integers(0, 5, (2, seeds, 20)) / 4
    return Run({}, rows, warm, before=before, after=after, samples=4)


def panels(name, run, style=drawing.LIGHT):
    figure = BY_NAME[name].draw(run, style)
    assert figure is not None
    return figure.axes


@for_every_picture
@pytest.mark.parametrize(
    ("seeds", "steps", "style"),
    [
        (1, 1, drawing.DARK),
        pytest.param(3, 40, drawing.LIGHT, marks=pytest.mark.long),
    ],
)
def test_every_picture_is_a_png_of_its_size_in_both_styles(name, seeds, steps, style):
    png = drawing.png(BY_NAME[name], a_run(seeds, steps), style)
    assert png is not None
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    assert int.from_bytes(png[16:20]) == 768
    assert int.from_bytes(png[20:24]) == 432


@pytest.mark.first(3)
@for_every_picture
def test_equal_numbers_give_equal_bytes_and_leave_the_settings_alone(name):
    before = dict(matplotlib.rcParams)
    draw = [drawing.png(BY_NAME[name], a_run(1, 2), drawing.LIGHT) for _ in range(2)]
    assert draw[0] == draw[1]
    assert dict(matplotlib.rcParams) == before


@for_every_picture
def test_without_its_numbers_a_picture_is_left_out(name):
    nothing = Run({}, [{"step": 0}, {"step": 1, "outcome/mean": None}])
    assert drawing.png(BY_NAME[name], nothing, drawing.LIGHT) is None


def test_curves_are_the_mean_over_seeds_with_its_interval():
    rows = [
        {"step": 0, "loss/mean": [1.0, 2.0, 3.0]},
        {"step": 4, "loss/mean": [2.0, 2.0, 2.0]},
    ]
    (axes,) = panels("learning", Run({}, rows))
    np.testing.assert_array_equal(axes.lines[0].get_xydata(), [[0, 2], [4, 2]])
    (band,) = axes.collections
    assert band.get_label() == "_mean, 95% t-interval, 3 seeds"
    heights = band.get_paths()[0].vertices[:, 1]
    half = 4.302652729696144 / np.sqrt(3)  # t of 2 degrees of freedom, s = 1
    np.testing.assert_allclose([heights.min(), heights.max()], [2 - half, 2 + half])


def test_pass_rates_over_tokens_stand_where_the_tokens_of_their_step_are():
    rows = [
        {"step": 0, "rollout/tokens": [0, 0], "eval/pass_rate": [0.1, 0.1]},
        {"step": 1, "rollout/tokens": [80, 100]},
        {"step": 2, "rollout/tokens": [180, 220], "eval/pass_rate": [0.2, 0.4]},
        {"step": 3, "eval/pass_rate": [0.9, 0.9]},  # its tokens are not known
    ]
    (axes,) = panels("pass_rate_tokens", Run({}, rows))
    np.testing.assert_allclose(axes.lines[0].get_xydata(), [[0, 0.1], [200, 0.3]])


def test_groups_stack_the_solved_on_the_failed():
    rows = [
        {"step": t, "group/failed_fraction": 0.5, "group/solved_fraction": 0.25}
        for t in (1, 2)
    ]
    (axes,) = panels("groups", Run({}, rows))
    tops = [area.get_paths()[0].vertices[:, 1].max() for area in axes.collections]
    assert tops == [0.5, 0.75]


@pytest.mark.parametrize(("samples", "bars"), [(4, 5), (16, 17), (64, 10)])
def test_the_histogram_holds_every_prompt_of_every_seed(samples, bars):
    rates = np.array([[0, 0, 0.25, 1], [0, 0.5, 1, np.nan]])
    run = Run({}, [{"step": 0}], before=rates, after=rates, samples=samples)
    for axes in panels("histogram", run):
        heights = [bar.get_height() for bar in axes.patches]
        assert len(heights) == bars
        assert sum(heights) == pytest.approx(1)
        assert heights[0] == pytest.approx(3 / 7)
        assert heights[-1] == pytest.approx(2 / 7)


def seconds(*rows):
    """Rows of steps 1, 2, ... with these seconds of rollout and update."""
    return [
        {"step": t, "time/rollout_s": rollout, "time/update_s": update}
        for t, (rollout, update) in enumerate(rows, 1)
    ]


def test_time_is_that_behind_the_first_steps_which_also_compile():
    rows = seconds((40.0, 20.0), (40.0, 20.0), (2.0, 1.0), (4.0, 1.0))
    left, bars = panels("time", Run({}, rows))
    assert [bar.get_width() for bar in bars.patches] == [6, 2]
    assert [line.get_xdata().tolist() for line in left.lines] == [[3, 4], [3, 4]]
    assert [text.get_text() for text in bars.texts] == [
        "rollout: 6 s, 75%",
        "update: 2 s, 25%",
        "first steps, compiling: 2 min 0 s",
    ]


def test_time_of_first_steps_alone_says_that_they_compile():
    _, bars = panels("time", Run({}, seconds((3.0, 1.0), (3.0, 1.0))))
    assert [bar.get_width() for bar in bars.patches] == [6, 2]
    assert [text.get_text() for text in bars.texts] == [
        "rollout: 6 s, 75%",
        "update: 2 s, 25%",
        "all in first steps, compiling",
    ]


def test_parts_of_a_step_that_are_timed_once_are_no_curves():
    rows = seconds((0.25, 0.125)) + [{"step": t} for t in (2, 3)]
    rows = [row | {"time/step_s": 30.0 / row["step"]} for row in rows]
    left, bars = panels("time", Run({}, rows))
    assert [line.get_xdata().tolist() for line in left.lines] == [[2, 3]]
    assert [text.get_text() for text in bars.texts] == [
        "step: 25 s, 100%",
        "first steps, compiling: 30 s",
        "rollout, timed once: 0.25 s",
        "update, timed once: 0.12 s",
    ]
    figure = left.figure
    figure.draw_without_rendering()
    for text in bars.texts:
        assert text.get_window_extent().x1 <= figure.bbox.x1


def test_dead_groups_stand_beside_their_forecast_or_not_at_all():
    row = {"step": 1, "format/effective_number": 8.0, "group/dead_fraction": 0.5}
    (forms,) = panels("signal", Run({}, [row]))
    assert [line.get_label() for line in forms.lines] == ["held-out completions"]
    _, groups = panels("signal", Run({}, [row | {"forecast/dead_fraction": 0.25}]))
    assert [line.get_label() for line in groups.lines] == ["dead", "forecast"]


def test_hints_are_asked_by_level_and_opened_in_all():
    row = {"hint/asked_1": 8, "hint/asked_2": 5, "hint/opened_1": 3, "hint/opened_2": 1}
    rows = [{"step": 0}, {"step": 1} | row | {"hint/plain_pass_rate": 0.25}]
    groups, rates = panels("hints", Run({}, rows))
    got = {line.get_label(): line.get_xydata().tolist() for line in groups.lines}
    assert got == {
        "asked, level 1": [[1, 8]],
        "asked, level 2": [[1, 5]],
        "opened, any level": [[1, 4]],
    }
    assert [line.get_label() for line in rates.lines] == ["without"]
    assert groups.get_ylim() == (0, 8.4)
    seeds = [{"step": 1, "hint/asked_1": [4, 8], "hint/opened_1": [1, 3]}]
    (groups,) = panels("hints", Run({}, seeds))
    assert [line.get_ydata().tolist() for line in groups.lines] == [[6], [2]]


def test_the_frontier_goes_through_the_corners_of_the_evaluations():
    name = "distance/k3_token_nats"
    gone = {0: (0.0, 0.1), 10: (0.2, 0.3), 20: (0.3, 0.2), 30: (0.4, 0.7)}
    rows = [
        {"step": step, name: [kl - 0.1, kl + 0.1], "eval/pass_rate": [rate, rate]}
        for step, (kl, rate) in gone.items()
    ]
    # Neither a rate without its distance is a point, nor a distance without its rate.
    rows += [{"step": 31, "eval/pass_rate": [1.0, 1.0]}, {"step": 32, name: [0.0, 0.0]}]
    (axes,) = panels("frontier", Run({}, rows))
    points, line = axes.lines
    np.testing.assert_allclose(points.get_xydata(), list(gone.values()), atol=1e-12)
    np.testing.assert_allclose(line.get_xydata(), [gone[0], gone[30]], atol=1e-12)
    assert [note.get_text() for note in axes.texts] == ["step 0", "step 30"]
    low, high = axes.get_xlim()
    assert low < 0
    assert high > 0.4


@pytest.mark.first(5)
@for_every_picture
def test_every_axis_is_named_and_no_legend_leaves_its_panel(name):
    axes = panels(name, a_run(3, 5))
    figure = axes[0].figure
    figure.draw_without_rendering()
    for i, panel in enumerate(axes):
        assert (panel.get_xlabel() and panel.get_ylabel()) or not panel.axison
        if legend := panel.get_legend():
            box = legend.get_window_extent()
            beyond = axes[i + 1] if i + 1 < len(axes) else None
            end = beyond.get_window_extent().x0 if beyond else figure.bbox.x1
            assert box.x1 <= end, name


def test_what_has_its_axis_on_the_right_stands_in_the_same_place():
    one, other = (drawing.mark("plot", [0, 1], y) for y in ([2, 3], [40, 50]))
    panel = drawing.Panel("x", "y", [one], right=drawing.Panel("", "z", [other]))
    figure = drawing.figure(drawing.Sheet([panel]), drawing.LIGHT)
    assert figure
    left, right = figure.axes
    assert [axes.lines[0].get_ydata().tolist() for axes in (left, right)] == [
        [2, 3],
        [40, 50],
    ]
    assert (left.get_ylabel(), right.get_ylabel()) == ("y", "z")
    assert left.get_position().bounds == right.get_position().bounds


@pytest.mark.filterwarnings("error")
def test_a_name_is_shown_as_it_is_written_and_is_no_formula():
    names = {
        "a$x_{$b": r"a\$x_{\$b",
        r"\$\frac{$": r"\\$\frac{\$",
        "_hidden": " _hidden",
        "\u4e2d\udcff\t": r"\u4e2d\udcff\t",
    }
    figure, ((left, right),) = drawing.grid(drawing.LIGHT, 1, [1, 1], (6, 3))
    for name in names:
        left.plot([0], [0], label=drawing.in_legend(name))
    left.set_yticks(range(len(names)), list(names))
    left.set_title("$_{$")
    right.set_xscale("log")
    right.plot([1, 1000], [0, 1])
    drawing.label(left, drawing.LIGHT, "\udcff", "")
    drawing.as_png(figure, "$\\frac{$", drawing.LIGHT)
    legend = left.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.texts] == list(names.values())
    shown = [text.get_text().lstrip(" ") for text in left.get_yticklabels()]
    assert shown == [text.lstrip(" ") for text in names.values()]
    assert left.get_title() == r"\$_{\$"
    assert r"$\mathdefault{10^{2}}$" in [t.get_text() for t in right.get_xticklabels()]
