import base64
import contextlib
import errno
import html.parser
import json
import os
import re
import shutil
import socket
import struct
import subprocess
import threading
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
from judge_server import running
from outputs import printed, ran, refusal
from test_folder import lines

from curax.commands import demo, report
from curax.config import ConfigError
from curax.runs import live, page, pictures, reading, side_by_side

NASTY = "</script><script>alert(1)</script><!-- <b>bold</b> & \u2028 \ud800 'q' \"q\""
VOID = {"meta", "img", "source", "input", "col", "link", "br"}


class Page(html.parser.HTMLParser):
    """The elements of a page, checked for balance, and the text between them."""

    def __init__(self, text):
        super().__init__()
        self.open, self.elements, self.words = [], [], []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("script", "style"):
            self.words.append(data)

    def all(self, tag):
        return [attrs for name, attrs in self.elements if name == tag]

    @property
    def text(self):
        return " ".join("".join(self.words).split())


@pytest.fixture
def few_pictures(monkeypatch):
    """For tests of the words on the page: one picture, drawn in no time, is enough."""
    monkeypatch.setattr(pictures, "PICTURES", pictures.PICTURES[:1])


few = pytest.mark.usefixtures("few_pictures")


def write(folder, *, seeds=1, steps=20, done=20, texts=("1 + 1", NASTY), **config):
    """A run folder as a run leaves it; gives back its metric rows."""
    draw = np.random.default_rng(seeds)
    folder.mkdir(exist_ok=True)

    def value(low, high):
        return draw.uniform(low, high, () if seeds == 1 else seeds).tolist()

    rows = []
    for step in range(done + 1):
        cost = 0.0 if seeds == 1 else [0.0] * seeds
        row = {"step": step, "update/count": cost, "rollout/tokens": cost}
        if step % 10 == 0:
            row["eval/pass_rate"] = value(step / 40, step / 30 + 0.1)
            row["eval/greedy_pass_rate"] = value(step / 40, step / 30 + 0.1)
            row["time/evaluate_s"] = 0.5 if step else 5.0  # the first compiles
        if step:
            row["update/count"] = step if seeds == 1 else [step] * seeds
            row["rollout/tokens"] = value(700 * step, 701 * step)
            row["rollout/length_tokens"] = value(5, 9)
            row["group/failed_fraction"] = value(0.1, 0.2)
            row["group/solved_fraction"] = value(0.2, 0.3)
            row["group/dead_fraction"] = value(0.3, 0.5)
            row["loss/mean"] = None if step == 3 else value(-1, 1)
            row["time/rollout_s"] = 1.25 if step > 1 else 10.0
            row["time/update_s"] = 2.5 if step > 1 else 20.0
        rows.append(row)

    def evaluation(step):
        rates = draw.integers(0, 5, (seeds, 30)) / 4
        rates = rates.tolist() if seeds > 1 else rates[0].tolist()
        return {"pass_rates": rates, "samples": 4, "step": step}

    sides = {"before": evaluation(0)} | (
        {"after": evaluation(done)} if done == steps else {}
    )
    for side, row in zip(sides.values(), (rows[0], rows[-1]), strict=False):
        row["eval/pass_rate"] = np.mean(side["pass_rates"], axis=-1).tolist()
    like = {"prompt_id": 7, "tokens": [1, 2, 3], "reward": 0.5, "advantage": -0.25}
    rollouts = [
        {"step": step, "seed": seed, "prompt": f"<i>{step}</i> = ?", **like}
        | {"slot": slot, "text": text, "outcome": slot % 2 or None}
        for step in range(0, done + 1, 5)
        for seed in range(seeds)
        for slot, text in enumerate(texts)
    ]
    settings = {
        "steps": steps,
        "seeds": seeds,
        "loss": {"function": "curax.loss.clipped_ratio", "low": 0.2, "dual": None},
        "gate": {
            "function": "curax.gate.every",
            "gates": [{"function": "a.b", "c": 1}],
        },
        "sampling": {"group_size": 8, "sizes": [1, 2]},
        **config,
    }
    (folder / "config.json").write_text(json.dumps(settings))
    (folder / "evaluation.json").write_text(json.dumps(sides))
    demo.write_lines(folder / "metrics.jsonl", rows)
    demo.write_lines(folder / "rollouts.jsonl", rollouts)
    return rows


def opened(folder, **options):
    path = page.write(folder, **options)
    assert path == folder / "report.html"
    text = path.read_text(encoding="utf-8")
    (data,) = re.findall(
        r'<script type="application/json" id="data">(.*?)</script>', text
    )
    return Page(text), json.loads(data), text


def verdict(text):
    lead = re.search(r'<p class="lead">(.*?)</p>\n<p>(.*?)</p>', text)
    assert lead
    return re.sub("</?b>", "", lead[1]), lead[2].strip()


def tiles(text):
    found = re.findall(r"<div><span>(.*?)</span><b>(.*?)</b><small>(.*?)</small>", text)
    return {name: (value, note) for name, value, note in found}


@few
def test_the_numbers_on_the_page_are_those_of_the_rows(tmp_path):
    rows = write(tmp_path)
    told = json.loads((tmp_path / "evaluation.json").read_text())
    gain = np.subtract(told["after"]["pass_rates"], told["before"]["pass_rates"]) * 100
    t = scipy.stats.t.ppf(0.975, 29) / np.sqrt(30)
    half, rates = t * gain.std(ddof=1), np.array(told["after"]["pass_rates"])
    _, _, text = opened(tmp_path)
    first, last = rows[0], rows[-1]
    assert verdict(text) == (
        "No change that the interval shows: held-out pass rate went from "
        f"{first['eval/pass_rate']:.1%} to {last['eval/pass_rate']:.1%} in 20 steps, "
        f"{gain.mean():+.1f} points [{gain.mean() - half:+.1f}, "
        f"{gain.mean() + half:+.1f}].",
        f"It took {last['rollout/tokens'] / 1000:.3g} k generated tokens, 20 optimizer "
        "updates and 1 min 47 s. "  # 10 + 20 + 5 + 19 (1.25 + 2.5) + 2 * 0.5
        "In brackets: the 95% t-interval of the change over the 30 held-out prompts, "
        "each asked before and after; other seeds may differ.",
    )
    low, high = (rates.mean() + sign * t * rates.std(ddof=1) for sign in (-1, 1))
    mean = {
        end: np.mean([row[f"group/{end}_fraction"] for row in rows[1:]])
        for end in ("dead", "failed", "solved")
    }
    assert tiles(text) == {
        "Held-out pass rate": (
            f"{last['eval/pass_rate']:.1%}",
            f"from {first['eval/pass_rate']:.1%}; 95% {low:.1%} to {high:.1%} over 30 "
            "held-out prompts",
        ),
        "Greedy pass rate": (
            f"{last['eval/greedy_pass_rate']:.1%}",
            f"from {first['eval/greedy_pass_rate']:.1%}",
        ),
        "Generated tokens": (
            f"{last['rollout/tokens'] / 1000:.3g} k",
            f"{last['rollout/tokens']:,.0f}",
        ),
        "Optimizer updates": ("20", "in 20 of 20 steps"),
        "Groups that taught nothing": (
            f"{mean['dead']:.0%}",
            f"{mean['failed']:.0%} failed, {mean['solved']:.0%} solved",
        ),
        "Completion length": (
            f"{last['rollout/length_tokens']:.1f}",
            f"tokens, from {rows[1]['rollout/length_tokens']:.1f}",
        ),
        "Time in all stages": (
            "1 min 47 s",
            "35 s in first steps, which compile; of the rest 66% update",
        ),
    }
    losses = [row["loss/mean"] for row in rows[1:] if row["loss/mean"] is not None]
    shown = (losses[0], losses[-1], np.mean(losses))
    cells = "".join(f"<td>{x:,.5g}</td>" for x in shown)
    assert f"<tr><th>loss/mean</th>{cells}</tr>" in text


@pytest.mark.first(1)
@few
@pytest.mark.parametrize("seeds", [1, 3])
def test_what_was_measured_stands_beside_what_was_predicted(tmp_path, seeds):
    write(tmp_path, seeds=seeds, steps=50, done=50)
    assert "Measured and predicted" not in opened(tmp_path)[2]
    sides = {
        side: {"group/solved_fraction": value, "group/draws": 8.0}
        for side, value in (("before", 0.125), ("after", 0.375))
    }
    (tmp_path / "expected.json").write_text(json.dumps(sides))
    source = opened(tmp_path)[2]
    rows = lines(tmp_path / "metrics.jsonl")
    solved = [np.mean(row["group/solved_fraction"]) for row in rows if row["step"]]
    first, last = np.mean(solved[:5]), np.mean(solved[-5:])
    cells = [f"{first:.3g}", "0.125", f"{last:.3g}", "0.375"]
    want = "<tr><th>group/solved_fraction</th>"
    assert want + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>" in source
    # This run does not say how many it drew.
    assert (
        "<tr><th>group/draws</th><td></td><td>8</td><td></td><td>8</td></tr>" in source
    )


@few
@pytest.mark.parametrize(
    ("seeds", "note"),
    [
        (1, "16 had no gradient, 2 were not finite"),
        (3, "16 had no gradient, 2 were not finite per seed"),
    ],
)
def test_updates_that_were_skipped_are_told_with_the_reason(tmp_path, seeds, note):
    rows = write(tmp_path, seeds=seeds)
    for row in rows[1:]:
        odd = float(row["step"] in (4, 5))
        both = {"update/skipped": odd + (row["step"] > 4), "update/nonfinite": odd}
        row |= both if seeds == 1 else {k: [v] * seeds for k, v in both.items()}
    demo.write_lines(tmp_path / "metrics.jsonl", rows)
    assert tiles(opened(tmp_path)[2])["Updates skipped"] == ("18", note)


@few
def test_with_seeds_the_rates_are_means_and_carry_their_interval(tmp_path):
    rows = write(tmp_path, seeds=3)
    page, data, text = opened(tmp_path)
    start, rates = (np.array(rows[i]["eval/pass_rate"]) for i in (0, -1))
    t = scipy.stats.t.ppf(0.975, 2) / np.sqrt(3)
    half, gain = t * rates.std(ddof=1), 100 * (rates - start)
    low, high = np.clip([rates.mean() - half, rates.mean() + half], 0, 1)
    change = gain.mean() + t * gain.std(ddof=1) * np.array([-1, 1])
    assert change[0] < 0 < change[1]
    lead, rest = verdict(text)
    assert lead == (
        f"No change that the interval shows: held-out pass rate went from "
        f"{start.mean():.1%} to {rates.mean():.1%} in 20 steps, {gain.mean():+.1f} "
        f"points [{change[0]:+.1f}, {change[1]:+.1f}]."
    )
    assert rest.endswith(
        f"The last rate is the mean of 3 seeds; the 95% t-interval is {low:.1%} to "
        f"{high:.1%}. In brackets: the 95% t-interval of the change over the 3 seeds."
    )
    tokens = np.mean(rows[-1]["rollout/tokens"]) / 1000
    assert f"It took {tokens:.3g} k generated tokens per seed" in rest
    assert "seeds 3" in page.text
    assert {row[1] for row in data["rows"]} == {0, 1, 2}


@pytest.mark.first(1)
@pytest.mark.parametrize("seeds", [1, 3])
def test_the_page_stands_alone_with_every_picture_inside(tmp_path, seeds):
    write(tmp_path, seeds=seeds)
    page, _, text = opened(tmp_path)
    images = page.all("img")
    embedded = {
        base64.b64decode(i["src"].removeprefix("data:image/png;base64,"))
        for i in images
    }
    assert embedded == {path.read_bytes() for path in tmp_path.glob("*.png")}
    assert {path.stem for path in tmp_path.glob("*.png")} == {
        *("pass_rate", "pass_rate_tokens", "histogram", "groups", "length_entropy"),
        *("learning", "time"),
    }
    assert all(
        s["srcset"].startswith("data:image/png;base64,") for s in page.all("source")
    )
    assert len(page.all("source")) == len(images)
    assert all(image["alt"] for image in images)
    for _, attributes in page.elements:
        assert not {"href", "onclick", "onload"} & attributes.keys()
        assert attributes.get("src", "data:").startswith("data:")
    assert "http" not in text.replace("http-equiv", "")
    assert len(text) < 2_000_000


@few
def test_what_a_model_writes_never_becomes_markup(tmp_path):
    write(tmp_path, task={"function": "<b>task", "x": NASTY})
    page, data, text = opened(tmp_path, title="<b>a</b> & {{config}}")
    assert len(page.all("script")) == 2
    assert not page.all("i")
    assert "alert" not in "".join(re.findall(r"<[^>]*>", text))
    assert [row[5] for row in data["rows"]] == ["1 + 1", NASTY] * 5
    assert data["prompts"] == [f"<i>{step}</i> = ?" for step in range(0, 21, 5)]
    assert page.text.startswith("<b>a</b> & {{config}}")
    assert "task <b>task" in page.text
    assert "<b>alert" not in text
    assert "<b>bold" not in text
    scripts = text[text.rindex("<script>") :]
    assert "innerHTML" not in scripts
    assert "insertAdjacentHTML" not in scripts


@few
def test_the_page_browses_completions_with_what_became_of_them(tmp_path):
    write(tmp_path)
    _, data, _ = opened(tmp_path)
    assert data["steps"] == [0, 5, 10, 15, 20]
    assert data["finished"] is True
    assert data["rows"][0] == [0, 0, 0, 7, 0, "1 + 1", 3, None, 0.5, -0.25, 0, None]
    assert data["rows"][-1] == [4, 0, 4, 7, 1, NASTY, 3, 1, 0.5, -0.25, 0, None]
    assert data["strips"] == [[]]  # no reference answers, and no hints
    assert data["logged"] == len(data["rows"]) == 10


def written_with(folder, *more):
    """A run whose completions have more fields, these by turns."""
    write(folder)
    path = folder / "rollouts.jsonl"
    rows = [row | more[i % len(more)] for i, row in enumerate(lines(path))]
    demo.write_lines(path, rows)
    return opened(folder)


@few
def test_a_reference_is_kept_token_by_token_with_what_each_weighs(tmp_path):
    first = {"reference": ["the", " sum", " 5"], "weights": [0.2, 0.12345678, None]}
    long = {"reference": ["w"] * 500, "weights": [0.0] * 500, "hint_level": 2}
    _, data, text = written_with(tmp_path, first, long)
    strip, cut = data["strips"]
    assert strip == [["the", 0.2], [" sum", 0.1235], [" 5", 0.0]]
    assert cut == [["w", 0.0]] * 400
    assert [row[10:] for row in data["rows"]] == [[0, None], [1, 2]] * 5
    assert "if (row.strip.length) heat(asked, row.strip)" in text
    assert 'name("hint level", row.level)' in text


@few
def test_a_reference_never_becomes_markup(tmp_path):
    words = {"reference": [NASTY, "<i>5</i>"], "weights": [0.5, 0.5]}
    page, data, text = written_with(tmp_path, words)
    assert data["strips"] == [[[NASTY, 0.5], ["<i>5</i>", 0.5]]]
    assert len(page.all("script")) == 2
    assert not page.all("i")
    assert "<b>bold" not in text


@few
@pytest.mark.parametrize("fields", [{"reference": ["a"]}, {"weights": [1.0]}])
def test_half_of_a_reference_is_none(tmp_path, fields):
    assert written_with(tmp_path, fields)[1]["strips"] == [[]]


@few
def test_hints_and_reflection_are_named_by_what_they_say_and_weigh(tmp_path):
    source = {"function": "curax.hint.reference_prefix", "shares": None}
    weights = {"function": "curax.reflect.denoised", "floor": 3.0}
    write(tmp_path, hint={"source": source, "levels": 3}, reflection=None)
    page, _, _ = opened(tmp_path)
    assert "hint reference_prefix" in page.text
    assert "<span>reflection</span>" not in (tmp_path / "report.html").read_text()
    write(tmp_path, hint=None, reflection={"weights": weights})
    assert "reflection denoised" in opened(tmp_path)[0].text


@few
def test_every_setting_is_listed_under_its_dotted_name(tmp_path):
    write(tmp_path)
    _, _, text = opened(tmp_path)
    table = text[text.index('<table class="settings">') :]
    assert dict(re.findall(r"<tr><th>(.*?)</th><td>(.*?)</td></tr>", table)) == {
        "steps": "20",
        "seeds": "1",
        "loss": "curax.loss.clipped_ratio",
        "loss.low": "0.2",
        "loss.dual": "null",
        "gate": "curax.gate.every",
        "gate.gates.0": "a.b",
        "gate.gates.0.c": "1",
        "sampling.group_size": "8",
        "sampling.sizes.0": "1",
        "sampling.sizes.1": "2",
    }


@pytest.mark.long
def test_an_unfinished_run_says_so_and_shows_what_there_is(tmp_path):
    rows = write(tmp_path, steps=50, done=13)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 14, "loss/')
    _, data, text = opened(tmp_path)
    lead, rest = verdict(text)
    assert lead.endswith(f"to {rows[10]['eval/pass_rate']:.1%} in 10 steps.")
    assert rest.startswith("The run is unfinished, at step 13 of 50. So far it took ")
    assert data["finished"] is False
    assert (tmp_path / "histogram.png").exists()


@pytest.mark.long
def test_a_run_before_its_first_step_has_a_page(tmp_path):
    rows = write(tmp_path, done=0)
    (tmp_path / "rollouts.jsonl").unlink()
    _, data, text = opened(tmp_path)
    assert (
        verdict(text)[0]
        == f"Held-out pass rate is {rows[0]['eval/pass_rate']:.1%} at step 0."
    )
    assert data["rows"] == []
    assert not (tmp_path / "groups.png").exists()


def test_a_run_with_metrics_alone_has_a_page(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "memory/bytes": 5}\n')
    page, _, text = opened(tmp_path)
    assert verdict(text) == ("No pass rate has been measured yet.", "")
    assert "memory/bytes" in page.text
    assert not page.all("img")


@few
def test_without_evaluation_the_verdict_tells_of_training(tmp_path):
    rows = ({"step": t, "outcome/mean": t / 8} for t in (1, 2, 3))
    demo.write_lines(tmp_path / "metrics.jsonl", rows)
    assert verdict(opened(tmp_path)[2])[0] == (
        "Mean outcome of the completions drawn in training went from 12.5% to 37.5% "
        "in 2 steps."
    )


@few
def test_a_rate_that_does_not_move_stays(tmp_path):
    rows = ({"step": t, "eval/pass_rate": 0.5} for t in (0, 9))
    demo.write_lines(tmp_path / "metrics.jsonl", rows)
    assert (
        verdict(opened(tmp_path)[2])[0]
        == "Held-out pass rate stayed at 50.0% in 9 steps."
    )


EIGHTHS = np.arange(9) / 8  # of a prompt, in 8 samples
# Pass rates of the same prompts before and after, and what the page says of them.
CHANGES = {
    "rose by": (EIGHTHS[:8], EIGHTHS[1:]),
    "fell by": (EIGHTHS[1:], EIGHTHS[:8]),
    "No change that the interval shows: ": (EIGHTHS, EIGHTHS[::-1]),
    "stayed at": (EIGHTHS, EIGHTHS),
    "went from": ([0.0], [1.0]),
}


@pytest.mark.first(2)
@few
@pytest.mark.parametrize("words", CHANGES)
def test_words_follow_the_interval_over_the_prompts(tmp_path, words):
    before, after = (np.array(side) for side in CHANGES[words])
    if words in ("rose by", "fell by"):
        after[0] = before[0]  # not all change alike
    sides = {"before": before, "after": after}
    write_evaluated(tmp_path, sides)
    lead, rest = verdict(opened(tmp_path)[2])
    assert words in lead
    assert not any(other in lead for other in ("rose", "fell") if other not in words)
    gain = 100 * (after - before)
    if gain.any() and len(gain) > 1:
        low, high = scipy.stats.t.interval(
            0.95, len(gain) - 1, gain.mean(), gain.std(ddof=1) / np.sqrt(len(gain))
        )
        assert f"[{low:+.1f}, {high:+.1f}]" in lead
        assert ("No change" in lead) == (low <= 0 <= high)
        assert rest.endswith("each asked before and after; other seeds may differ.")
    if words == "stayed at":
        assert rest == "None of the 9 held-out prompts moved."
    if words == "went from":
        assert rest == "One seed does not tell how sure that is."


def write_evaluated(folder, sides):
    rows = [
        {"step": 9 * i, "eval/pass_rate": rates.mean()}
        for i, rates in enumerate(sides.values())
    ]
    demo.write_lines(folder / "metrics.jsonl", rows)
    told = {name: {"pass_rates": rates.tolist()} for name, rates in sides.items()}
    (folder / "evaluation.json").write_text(json.dumps(told))


@few
def test_pass_rates_of_another_evaluation_give_no_interval(tmp_path):
    sides = {"before": EIGHTHS, "after": EIGHTHS[::-1] / 2}
    write_evaluated(tmp_path, sides)
    later = {"before": {"pass_rates": [0.5, 0.0]}, "after": {"pass_rates": [1.0, 1.0]}}
    (tmp_path / "evaluation.json").write_text(json.dumps(later))
    assert verdict(opened(tmp_path)[2]) == (
        "Held-out pass rate went from 50.0% to 25.0% in 9 steps.",
        "One seed does not tell how sure that is.",
    )


@few
def test_one_is_no_plural(tmp_path):
    row = {"step": 1, "eval/pass_rate": 1.0, "update/count": 1, "rollout/tokens": 1}
    rows = [{"step": 0, "eval/pass_rate": 0.0}, row]
    demo.write_lines(tmp_path / "metrics.jsonl", rows)
    (tmp_path / "config.json").write_text('{"steps": 1}')
    (tmp_path / "expected.json").write_text('{"before": {"x": 1.0}}')
    source = opened(tmp_path)[2]
    assert verdict(source) == (
        "Held-out pass rate went from 0.0% to 100.0% in 1 step.",
        "It took 1 generated token and 1 optimizer update. One seed does not tell how "
        "sure that is.",
    )
    assert tiles(source)["Optimizer updates"] == ("1", "in 1 of 1 step")
    assert "Means over the first and the last step, beside" in source


def test_a_run_without_rl_steps_is_told_as_supervised_training(tmp_path):
    write(tmp_path, steps=0, done=0, warm_start={"rows": 64})
    (tmp_path / "rollouts.jsonl").write_text("")
    losses = [{"step": t, "warm/loss_nats": 4.0 / t} for t in (1, 2, 3, 4)]
    demo.write_lines(tmp_path / "warm_start.jsonl", losses)
    told = json.loads((tmp_path / "evaluation.json").read_text())
    (tmp_path / "evaluation.json").write_text(json.dumps({"before": told["before"]}))
    rates = np.array(told["before"]["pass_rates"])
    metrics = json.loads((tmp_path / "metrics.jsonl").read_text())
    metrics["eval/pass_rate"] = rates.mean()
    (tmp_path / "metrics.jsonl").write_text(json.dumps(metrics) + "\n")
    half = scipy.stats.t.ppf(0.975, 29) * rates.std(ddof=1) / np.sqrt(30)
    sure = f"{rates.mean() - half:.1%} to {rates.mean() + half:.1%}"
    page, data, text = opened(tmp_path)
    assert verdict(text) == (
        f"Held-out pass rate is {rates.mean():.1%} after 4 supervised steps.",
        "This is supervised training: the loss of a batch went from 4.000 nats per "
        "token at step 1 to 1.000 at step 4. No reinforcement learning followed "
        f"(steps=0). The 95% t-interval is {sure} over 30 held-out prompts.",
    )
    assert tiles(text) == {
        "Held-out pass rate": (
            f"{rates.mean():.1%}",
            f"after supervised training; 95% {sure} over 30 held-out prompts",
        ),
        "Greedy pass rate": (
            f"{metrics['eval/greedy_pass_rate']:.1%}",
            "after supervised training",
        ),
        "Supervised steps": ("4", "of 64 traces each"),
        "Loss of a batch": ("1.000", "nats per token, from 4.000"),
    }
    pictures_ = {path.stem for path in tmp_path.glob("*.png")}
    assert pictures_ == {"warm_start", "histogram"}
    assert "<tr><th>warm/loss_nats</th>" in text
    for word in ("Completions", "rollout/tokens", "group", "clipped_ratio</li>"):
        assert word not in text[text.index("<body>") : text.index("<summary>Config")]
    assert "group" not in page.text[page.text.index("Written by") :]
    assert data["rows"] == []


def rollouts(steps, each, text="x"):
    return [
        {"step": t, "slot": i, "text": text} for t in range(steps) for i in range(each)
    ]


@pytest.mark.parametrize(
    ("steps", "each", "kept_steps", "kept"),
    [(3, 10, 3, 30), (100, 50, 40, 2000), (5000, 1, 2000, 2000), (4, 900, 2, 1800)],
)
def test_of_many_completions_the_page_holds_evenly_spaced_steps(
    tmp_path, steps, each, kept_steps, kept
):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n')
    demo.write_lines(tmp_path / "rollouts.jsonl", rollouts(steps, each))
    _, data, _ = opened(tmp_path)
    assert len(data["rows"]) == kept
    assert (data["logged"], data["logged_steps"]) == (steps * each, steps)
    assert len(data["steps"]) == kept_steps
    assert data["steps"][0] == 0
    assert data["steps"][-1] == steps - 1
    gaps = np.diff(data["steps"])
    assert gaps.max() - gaps.min() <= 1


def test_steps_too_large_for_the_page_are_cut(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n')
    demo.write_lines(tmp_path / "rollouts.jsonl", rollouts(2, 1500))
    _, data, _ = opened(tmp_path)
    assert [row[4] for row in data["rows"]] == [*range(1000), *range(1000)]


@few
def test_a_long_completion_keeps_its_beginning_and_its_end(tmp_path):
    long = "a" * 3000 + "b" * 3000 + "answer"
    write(tmp_path, texts=[long])
    _, data, _ = opened(tmp_path)
    assert data["rows"][0][5] == (
        "a" * 2000 + "\n[3,006 characters left out]\n" + "b" * 994 + "answer"
    )


@pytest.mark.long
@few
def test_a_page_is_the_same_when_written_again(tmp_path):
    write(tmp_path, seeds=3)
    first = page.write(tmp_path).read_bytes()
    assert page.write(tmp_path).read_bytes() == first


def test_a_broken_run_is_one_sentence_and_status_2(tmp_path):
    write(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n{"step": 1,\n')
    assert refusal(report.main, tmp_path) == (
        f"curax.report: {tmp_path}/metrics.jsonl:2: not a JSON object; repair or "
        "delete this line.\n"
    )
    assert refusal(report.main, tmp_path / "none") == (
        f"curax.report: {tmp_path}/none: no such folder; give the folder of a run.\n"
    )
    assert not (tmp_path / "report.html").exists()


@pytest.mark.long
def test_the_command_line_needs_neither_jax_nor_pyplot(tmp_path):
    write(tmp_path, steps=2, done=2)
    program = (
        "import sys; from curax.commands import report; "
        "assert 'matplotlib' not in sys.modules; "
        f"assert report.main([{str(tmp_path)!r}, '--title', 'A run']) == 0; "
        "assert not {'jax', 'matplotlib.pyplot'} & sys.modules.keys()"
    )
    want = (0, f"{tmp_path}/report.html\n", "")
    assert ran("-W", "error", "-c", program) == want
    assert "<h1>A run</h1>" in (tmp_path / "report.html").read_text(encoding="utf-8")
    status, _, err = ran("-m", "curax", "report", tmp_path / "none")
    said = f"curax.report: {tmp_path}/none: no such folder; give the folder of a run.\n"
    assert (status, err) == (2, said)


# Served, and side by side


@pytest.fixture
def serve():
    """Give `(site) -> get`, where `get(path, host=None)` is status and body."""
    opened = contextlib.ExitStack()

    def start(site):
        url = opened.enter_context(running(live.server(site, "127.0.0.1", 0)))
        port = url.rpartition(":")[2]

        def get(path, name="127.0.0.1"):
            request = urllib.request.Request(f"{url}{path}")
            request.add_header("Host", f"{name}:{port}")
            try:
                with urllib.request.urlopen(request, timeout=60) as answer:
                    return answer.status, answer.read().decode()
            except urllib.error.HTTPError as error:
                return error.code, ""

        return get

    with opened:
        yield start


@few
def test_a_served_page_follows_the_files_and_writes_nothing(tmp_path, serve):
    folder = tmp_path / "run"
    folder.mkdir()
    get = serve(live.Site({"run": folder}))
    status, text = get("/")
    assert status == 200
    assert "no metrics.jsonl in it" in Page(text).text
    first = get("/version")[1]
    assert f'let version = "{first}";' in text

    write(folder, done=10)
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    second = get("/version")[1]
    assert second != first
    status, text = get("/")
    assert f'let version = "{second}";' in text
    assert "connect-src 'self'" in text
    read = Page(text)
    assert "The run is unfinished, at step 10 of 20." in read.text
    assert get("/")[1] == text
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before
    # In a file it asks nobody, and is the same but for that.
    page.write(folder)
    alone = (folder / "report.html").read_text()
    assert "connect-src 'none'" in alone
    assert "fetch(" not in alone
    live_marks = sum("data-live" in attrs for _, attrs in read.elements)
    assert live_marks == sum("data-live" in attrs for _, attrs in Page(alone).elements)
    assert live_marks == 5

    for path in ("/0/", "/report.html", "/../x", "/version/"):
        assert get(path)[0] == 404
    assert get("/", name="evil.example")[0] == 403
    assert get("/version", name="localhost")[0] == 200


@pytest.mark.long
@few
def test_runs_stand_side_by_side_and_each_has_its_page(tmp_path, serve):
    rows = write(tmp_path / "one", seeds=3)
    write(tmp_path / "two", seeds=1, gate="curax.gate.zero_variance")
    (tmp_path / "new").mkdir()
    runs = live.names_of([tmp_path / name for name in ("one", "two", "new")])
    get = serve(live.Site(runs))
    status, text = get("/")
    assert status == 200
    read = Page(text)
    assert [link["href"] for link in read.all("a")] == ["0/", "1/"]
    assert len(read.all("figure")) == len(side_by_side.AXES)
    assert "new: " in read.text
    gates = "<td>curax.gate.every</td><td>curax.gate.zero_variance</td>"
    assert f"<tr><th>gate</th>{gates}</tr>" in text
    assert "<tr><th>seeds</th><td>3</td><td>1</td></tr>" in text
    assert "<tr><th>loss" not in text  # the same in both
    rates = rows[-1]["eval/pass_rate"]
    half = scipy.stats.t.ppf(0.975, 2) * scipy.stats.sem(rates)
    assert f"<td>{np.mean(rates):.1%} ± {half:.1%}</td><td>20 of 20</td>" in text
    assert get("/0/")[1] != get("/1/")[1]
    assert "<title>one</title>" in get("/0/")[1]
    assert get("/2/")[0] == 200  # waits
    assert get("/3/")[0] == 404


@pytest.mark.long
@few
def test_a_name_of_any_bytes_has_its_pages(tmp_path, serve):
    runs = [tmp_path / name for name in ("a$x_{$b", "b\udcff", "_c\n")]
    for run in runs:
        write(run, steps=4, done=4)
    get = serve(live.Site(live.names_of(runs)))
    for path in ("/", "/0/", "/1/", "/2/", "/version", "/1/version"):
        assert get(path)[0] == 200
    out = tmp_path / "c\udcff.html"
    assert report.main([*map(str, runs), "--out", str(out)]) == 0
    assert len(Page(out.read_text()).all("figure")) == len(side_by_side.AXES)


def test_no_number_of_a_page_is_too_long(tmp_path, serve, capfd):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    get = serve(live.Site(live.names_of([tmp_path / "one", tmp_path / "two"])))
    assert get("/1/version")[0] == 200
    for number in ("9" * 5000, "0" * 5000, "01", "%D9%A1"):
        assert get(f"/{number}/")[0] == 404
    assert capfd.readouterr().err == ""


def test_a_silent_reader_is_left_and_one_that_leaves_is_no_fault(
    tmp_path, monkeypatch, capfd
):
    monkeypatch.setattr(live, "PATIENCE", 0.05)
    with live.server(live.Site({"run": tmp_path}), "127.0.0.1", 0) as made:
        made.daemon_threads = False  # so that its end waits for them
        threading.Thread(target=made.serve_forever).start()
        for said in (b"", b"GET / HT", b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n"):
            with socket.create_connection(made.server_address, timeout=30) as reader:
                reader.sendall(said)
                assert reader.recv(1) == b""
        with socket.create_connection(made.server_address) as reader:
            reader.sendall(b"GET / HT")
            at_once = struct.pack("ii", 1, 0)  # a reset
            reader.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, at_once)
        made.shutdown()
    assert capfd.readouterr().err == ""


@pytest.mark.skipif(not socket.has_ipv6, reason="this machine has no IPv6")
def test_a_page_is_served_at_an_address_of_ipv6(tmp_path):
    with live.server(live.Site({"run": tmp_path}), "::1", 0) as made:
        threading.Thread(target=made.serve_forever, daemon=True).start()
        port = made.server_address[1]
        with urllib.request.urlopen(f"http://[::1]:{port}/version") as answer:
            assert answer.status == 200
        made.shutdown()


def test_an_interrupt_while_a_page_is_drawn_is_130(tmp_path, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(reading, "read", interrupted)
    assert report.main([str(tmp_path)]) == 130


BROWSE = """
const {readFileSync} = require("fs");
const elements = {};
const element = () => ({
  append() {}, after() {}, replaceChildren() {}, setAttribute() {},
  querySelectorAll: () => [], options: [], value: "", style: {setProperty() {}},
  dataset: {},
});
const document = {
  getElementById: (id) => elements[id] ??= element(), createElement: element,
};
const given = (...steps) => JSON.stringify({
  steps, prompts: ["p"], strips: [[]], finished: false, logged: steps.length,
  logged_steps: steps.length,
  rows: steps.map((_, i) => [i, 0, 0, 0, 0, "t", 1, 0, 0, 0, 0, null]),
});
elements.data = {textContent: given()};
eval(readFileSync(process.argv[1], "utf8") + `
  browse(JSON.parse(given(1, 2, 3)));
  browse(JSON.parse(given(1, 2, 3, 4)));
`);
console.log(elements.at.textContent);
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_a_page_that_was_opened_before_any_completion_follows_the_last_step():
    script = Path(live.__file__).parent / "html" / "browse.js"
    command = ["node", "-e", BROWSE, str(script)]
    assert subprocess.check_output(command, text=True) == "4 of 4\n"


def test_what_was_spent_is_counted_up_to_each_step(tmp_path):
    rows = write(tmp_path / "run", steps=4, done=4)
    spent = side_by_side.spent(reading.read(tmp_path / "run").rows)
    assert list(spent["seconds"].values()) == [5.0, 35.0, 38.75, 42.5, 46.25]
    tokens = [row["rollout/tokens"] for row in rows]
    assert list(spent["generated tokens"].values()) == pytest.approx(tokens)
    assert list(spent["optimizer updates"]) == [0, 1, 2, 3, 4]
    total = reading.times(reading.read(tmp_path / "run").rows)
    assert total
    assert list(spent["seconds"].values())[-1] == total.total


def test_hints_are_drawn_where_a_row_lacks_a_level():
    rows = [
        {"step": k, "hint/asked_1": 4, "hint/asked_2": 3, "hint/opened_1": 1}
        | {"hint/opened_2": None if k == 2 else k}
        for k in (1, 2, 3)
    ]
    hints = next(one for one in pictures.PICTURES if one.name == "hints")
    steps, total = (
        hints.sheet(reading.Run(config={}, rows=rows)).panels[0].marks[-1].at[:2]
    )
    assert steps.tolist() == [1, 3]
    assert total.tolist() == [[2], [4]]


@few
def test_a_page_for_which_there_is_no_room_is_told_with_its_name(tmp_path, monkeypatch):
    write(tmp_path)

    def full(path, data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # of a write: no name

    monkeypatch.setattr(page, "write_whole", full)
    status, out, err = printed(report.main, tmp_path)
    assert (status, out) == (1, "")
    why = "cannot be written (No space left on device); mend that, or add --watch"
    assert re.fullmatch(
        rf"curax\.report: {tmp_path}/\w+\.(png|html) {re.escape(why)}, .*\n", err
    )


def test_the_page_of_several_runs_is_written_and_wrong_names_are_refused(
    tmp_path, capsys
):
    for name in ("one", "two"):
        write(tmp_path / name, steps=4, done=4)
    one, two, out = (str(tmp_path / name) for name in ("one", "two", "both.html"))
    assert report.main([one, two, "--out", out, "--title", "A <b>"]) == 0
    assert capsys.readouterr().out.strip() == out
    text = (tmp_path / "both.html").read_text()
    assert "<title>A &lt;b&gt;</title>" in text
    assert "None: all runs have one config." in text
    assert "fetch(" not in text
    for argv, words in (
        ([one, one], "a run is named twice"),
        ([one, "--out", out], "leave --out away"),
        ([one, str(tmp_path / "no")], "no such folder"),
        ([str(tmp_path / "no"), "--watch"], "no such folder"),
        ([one, "--watch", "--out", out], "--watch writes nothing"),
        ([one, "--watch", "--port", "99999"], "name another port"),
        ([one, "--watch", "--host", ""], "every address of this machine"),
        ([one, two, "--out", str(tmp_path / "a" / "b")], "name another file"),
        ([one, two, "--out", "."], "Is a directory"),
        ([one, two, "--out", "/"], "Is a directory"),
    ):
        assert words in refusal(report.main, *argv)
    with pytest.raises(ConfigError, match="no such folder"):
        live.names_of([tmp_path / "none"])
