"""What a run should have measured: pass rates without their noise, metrics by name."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from contracts import close
from test_law import PLAIN

from curax import stop
from curax.config import Pilot, Sampling, Stop
from curax.theory import expect


@pytest.mark.parametrize("shape", [(2.0, 3.0), (0.5, 0.5), (8.0, 2.0)])
def test_pass_rates_lie_closer_than_the_shares_that_measured_them(shape):
    random = np.random.default_rng(1)
    true = random.beta(*shape, 4000)
    measured = random.binomial(8, true) / 8
    guessed = expect.spread(measured, 8)
    close(guessed.mean(), true.mean(), rtol=0.05)
    close(guessed.var(), true.var(), rtol=0.15)
    assert measured.var() > 1.05 * guessed.var()


def test_what_was_not_measured_counts_for_nothing():
    rates = np.array([0.25, np.nan, 0.75, np.nan])
    np.testing.assert_array_equal(
        expect.spread(rates, 4), expect.spread(rates[[0, 2]], 4)
    )


def test_metrics_are_those_of_binomial_groups():
    config = replace(PLAIN, sampling=Sampling(prompts=4, group_size=4))
    rates = np.full(64, 0.5)
    got = expect.expected(config, rates, 10**6)
    assert set(got) == set(expect.METRICS)
    close(got["group/draws"], 4)
    # Measured by very many, all are 0.5 but for the least spread that is believed.
    close(got["group/signal_fraction"], 1 - 2 * 0.5**4, rtol=1e-2)
    close(got["group/pass_rate"], 0.5, rtol=1e-2)
    close(got["credit/right_sum"], 0.75 * 0.25, rtol=1e-2)
    close(got["credit/wrong_sum"], -0.75 * 0.25, rtol=1e-2)
    # Of one sample each no spread follows: half of all at 0 and 1 look like these.
    assert expect.expected(config, np.arange(64) % 2.0, 1) == {}


def test_draws_follow_the_rule_and_leave_out_pilots():
    sizes = Sampling(prompts=4, group_size=8)
    rule = Stop(rule=partial(stop.positives, right=1), round_size=2)
    stopped = replace(PLAIN, sampling=sizes, stop=rule)
    rates = np.full(64, 0.5)
    # 2 draws, and 2 more as long as all are wrong.
    want = 2 * sum(0.25**t for t in range(4))
    close(expect.expected(stopped, rates, 10**6)["group/draws"], want, rtol=1e-2)
    piloted = replace(PLAIN, sampling=sizes, pilot=Pilot(draws=2))
    close(expect.expected(piloted, rates, 10**6)["group/draws"], 6)
