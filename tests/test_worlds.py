"""Environments that pose their own problems: of Gymnasium, of OpenEnv, of one's own."""

import contextlib
import json
import math
import pickle
import threading
import time
from functools import partial

import gymnasium as api
import numpy as np
import pytest
import words
from words import asked, tokenizer

from curax.tasks import gymnasium, openenv, worlds
from curax.types import Environment, Observation, Turn

TOKENIZER = str(words.folder() / "tokenizer")
LAKE = {
    "name": "FrozenLake-v1",
    "options": {"is_slippery": False},
    "actions": ("left", "down", "right", "up"),
}


def task(environment, **options):
    usual = {"size": 5, "num_held_out": 3, "tokenizer": TOKENIZER, "workers": 1}
    return worlds.task(environment=environment, **usual | {"deadline": 60.0} | options)


def said(made, turn, target=0, state=None):
    """What the environment of a task says to a turn, as text."""
    spoken = tokenizer()
    own = [*spoken.encode(turn), spoken.end[-1]]
    (one,) = made.environment.answer([Turn(state, 5, np.int32(target), own)])
    return one, one if isinstance(one, str) else spoken.decode(one.tokens, control=True)


# ----- of one's own


def find(*, speaks=True):
    """Which of ten is it?"""

    def observe(state, turn):
        right = turn.strip() == str(state % 10)
        return state, Observation(tokens="No.", done=right, reward=float(right))

    opening = (lambda state: f"Find {state}.") if speaks else None
    return Environment(
        reset=lambda _, seed: int(seed), observe=observe, opening=opening
    )


def test_prompts_are_what_an_environment_says_first_of_each_seed():
    made = task(find, seed=7)
    assert (made.num_prompts, made.num_held_out, made.verify) == (5, 3, None)
    train, held_out = made.prompts(np.arange(5)), made.held_out(np.arange(3))
    assert [*train.target, *held_out.target] == [*range(7, 15)]
    for n, shown in zip(range(7, 15), asked(train) + asked(held_out), strict=True):
        assert shown == (
            f"<|im_start|>user\nFind {n}.<|im_end|>\n<|im_start|>assistant\n"
        )
    assert said(made, "7", target=7)[0].done
    assert "No." in said(made, "8", target=7)[1]


def begins(*, words):
    """It says these first."""
    return Environment(
        reset=lambda *_: None, observe=lambda *_: None, opening=lambda _: words
    )


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"environment": partial(find, speaks=False)}, "says nothing first for seed 0"),
        ({"environment": partial(begins, words=None)}, "opening gives None"),
        ({"environment": partial(begins, words=[1, 2])}, "opening gives .1, 2"),
        (
            {"environment": partial(begins, words="a" * (2**18 + 1))},
            "gives 262145 characters, above 262144",
        ),
        (
            {"environment": partial(begins, words=""), "chat": False},
            "says nothing first for seed 0, and a prompt must have a token",
        ),
        ({"environment": find, "seed": 2**31 - 7}, "to at most 2147483640"),
        ({"environment": find, "max_prompt_tokens": 2}, "set task.max_prompt_tokens="),
        ({"environment": lambda: None}, "define it with def at the top level"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(options, words):
    with pytest.raises(ValueError, match=words):
        task(**options)


# ----- of Gymnasium


def test_a_lake_is_crossed_by_words():
    made = task(partial(gymnasium.environment, **LAKE, rules="Go to G."))
    (shown, *_) = asked(made.prompts(np.arange(1)))
    assert "Go to G.\n[S]FFF\nFHFH\nFFFH\nHFFG" in shown
    state = None
    for place, turn in enumerate(("Right? No, down", "down", "right", "right", "down")):
        one, words = said(made, turn, state=state)
        assert (one.done, one.reward) == (False, 0.0)
        assert one.found == {"illegal": 0.0, "turns": place + 1.0}
        assert "[" in words
        state = one.state
    one, words = said(made, "anywhere", state=state)
    assert "Write one of: left, down, right, up." in words
    assert one.found == {"illegal": 1.0, "turns": 6.0}
    one, _ = said(made, "right", state=one.state)
    assert (one.done, one.reward, one.found["turns"]) == (True, 1.0, 7.0)


def test_an_episode_begins_by_its_seed_and_goes_on_by_its_key():
    made = gymnasium.environment(
        name="Blackjack-v1", actions=("stick", "hit"), lowest=-1
    )
    begun = [made.reset(key, seed) for key, seed in ((1, 4), (2, 4), (1, 4), (1, 5))]
    first, other, same, _ = begun
    assert made.opening(first) == made.opening(other) == made.opening(same)
    games = [
        [made.observe(made.reset(key, 4), "hit")[1].tokens for key in keys]
        for keys in (range(30), [3] * 5)
    ]
    assert len({*games[0]}) > 3
    assert len({*games[1]}) == 1


def test_outcomes_are_sums_of_rewards_between_the_bounds():
    made = gymnasium.environment(
        name="Blackjack-v1", actions=("stick", "hit"), lowest=-1.0, turns=6
    )
    totals = set()
    for seed in range(40):
        state, total, done = made.reset(seed, seed), 0.0, False
        while not done:
            state, seen = made.observe(pickle.loads(pickle.dumps(state)), "stick")
            total, done = total + seen.reward, seen.done
        assert total == pytest.approx((state.total + 1) / 2)
        totals.add(total)
    assert totals == {0.0, 0.5, 1.0}


def test_turns_are_bounded():
    made = gymnasium.environment(**LAKE, turns=3)
    state = made.reset(0, 0)
    ends = []
    for _ in range(3):
        state, seen = made.observe(state, "up")
        ends.append(seen.done)
    assert ends == [False, False, True]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lowest": 1.0}, "lowest=1.0 must be below highest=1.0"),
        ({"actions": ("left",)}, "are 1 words, and FrozenLake-v1 has 4 actions"),
        (
            {"actions": ("left", "up", "right", "Up")},
            "must differ by more than capital",
        ),
        (
            {"actions": ("left", "down", "right", " ")},
            "must differ by more than capital",
        ),
        ({"name": "Pendulum-v1", "options": {}, "actions": ()}, "a turn names one"),
    ],
)
def test_an_environment_that_does_not_fit_is_refused_in_a_sentence(options, words):
    with pytest.raises(ValueError, match=words):
        gymnasium.environment(**LAKE | options)


class Anew(api.Env, api.utils.EzPickle):
    """Says how many steps there were, and forgets them when it is pickled."""

    action_space, observation_space = api.spaces.Discrete(2), api.spaces.Discrete(9)
    steps = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return 0, {}

    def step(self, action):
        self.steps += 1
        return self.steps, 0.0, False, False, {}


class Kept(Anew):
    __getstate__ = object.__getstate__

    def __setstate__(self, state):
        self.__dict__.update(state)


def test_an_environment_that_forgets_its_episode_in_pickle_is_refused():
    registered = {"Anew-v0": Anew, "Kept-v0": Kept}
    for name, kind in registered.items():
        api.register(id=name, entry_point=kind, disable_env_checker=True)
    try:
        with pytest.raises(ValueError, match="by EzPickle, which keeps nothing"):
            gymnasium.environment(name="Anew-v0")
        made = gymnasium.environment(name="Kept-v0")
        state = made.reset(0, 0)
        for count in (1, 2, 3):
            state, seen = made.observe(pickle.loads(pickle.dumps(state)), "0")
            assert seen.tokens == str(count)
    finally:
        for name in registered:
            del api.registry[name]


# ----- of OpenEnv


ENDED = []  # seeds of connections that the other side has closed
MEETING = threading.Barrier(8)


def served(connection):
    """Count up to the seed: what a server of OpenEnv does with its frames."""
    seed = count = 0
    for frame in connection:
        message = json.loads(frame)
        kind, data = message["type"], message.get("data", {})
        if kind == "reset":
            seed, count = data["seed"], 0
            seen, reward, done = {"prompt": f"Count to {seed}."}, None, False
        else:
            act = data["message"].strip()
            if act == "hang":
                time.sleep(3)
            elif act == "meet":
                MEETING.wait(timeout=20)
            elif act == "leave":
                return
            elif act in ANSWERS:
                connection.send(ANSWERS[act])
                continue
            count += 1
            right = act == str(count)
            seen = {"prompt": f"{count} of {seed}."}
            reward = 1 / seed if right else None
            done = count == seed
        data = {"observation": seen, "reward": reward, "done": done}
        connection.send(json.dumps({"type": "observation", "data": data}))
    ENDED.append(seed)


ANSWERS = {
    "error": json.dumps(
        {
            "type": "error",
            "data": {"message": "no such move", "code": "EXECUTION_ERROR"},
        }
    ),
    "junk": "{",
    "list": "[]",
    "deep": "[" * 100_000,
    "huge": f"""{{"type": "observation", "data": {{"observation": {{"prompt": ""}},
        "reward": 1{"0" * 400}, "done": false}}}}""",
    "endless": """{"type": "observation", "data": {"observation": {"prompt": ""},
        "reward": 1e999, "done": false}}""",
    "other": json.dumps(
        {
            "type": "observation",
            "data": {"observation": {"board": "x"}, "reward": 0, "done": False},
        }
    ),
}


@contextlib.contextmanager
def serving():
    from websockets.sync.server import serve

    with serve(served, "127.0.0.1", 0) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{running.socket.getsockname()[1]}"
        running.shutdown()


@pytest.fixture(scope="module")
def server():
    with serving() as url:
        yield url


def ended(seed):
    """Whether the other side closes the connection of an episode, soon."""
    for _ in range(100):
        if seed in ENDED:
            return True
        time.sleep(0.02)
    return False


def by_openenv(url, timeout=1.0, **options):
    make = partial(openenv.environment, url=url, timeout=timeout, **options)
    return task(make, seed=1)


def test_an_episode_of_a_server_is_a_connection(server):
    made = by_openenv(server)
    assert ["Count to 1." in shown for shown in asked(made.prompts(np.arange(5)))] == [
        True,
        *[False] * 4,
    ]
    one, words = said(made, "1", target=2)
    other, _ = said(made, "7", target=2)
    assert "1 of 2." in words
    assert (one.done, one.reward, other.reward) == (False, 0.5, 0.0)
    one, _ = said(made, "2", target=2, state=one.state)
    other, _ = said(made, "2", target=2, state=other.state)
    assert (one.done, one.reward, other.done, other.reward) == (True, 0.5, True, 0.5)
    assert one.found == {}


@pytest.mark.first(3)
@pytest.mark.parametrize(
    ("turn", "reason"),
    [
        ("hang", "timeout"),
        ("leave", "crash: "),
        ("error", "error: no such move"),
        ("junk", "error: the server sent no observation"),
        ("list", "error: the server sent no observation"),
        ("deep", "error: the server sent no observation"),
        ("huge", "error: the server sent no observation"),
        ("endless", "error: the server sent no observation"),
        ("other", "error: the observation has no field 'prompt', but board"),
    ],
)
def test_a_server_that_fails_costs_that_episode(server, turn, reason):
    made = by_openenv(server)
    one, _ = said(made, "1", target=3)
    other, _ = said(made, "1", target=3)
    failed, _ = said(made, turn, target=3, state=one.state)
    assert isinstance(failed, str)
    assert failed.startswith(reason)
    one, _ = said(made, "2", target=3, state=other.state)
    assert one.reward == pytest.approx(1 / 3)


def test_an_episode_that_failed_is_closed(server):
    made = by_openenv(server)
    one, _ = said(made, "1", target=50)
    assert said(made, "error", target=50, state=one.state)[0].startswith("error: ")
    assert ended(50)


def test_a_target_that_is_no_seed_costs_its_episode(server):
    made = by_openenv(server)
    for target in ("1/2", None, math.inf):
        turn = Turn(None, 7, target, tokenizer().encode("1"))
        (failed,) = made.environment.answer([turn])
        assert failed.startswith("error: an episode begins by a seed")


def test_a_server_that_has_gone_costs_the_episodes_that_begin():
    with serving() as url:
        made = by_openenv(url)
    assert said(made, "1", target=2)[0].startswith("crash: ")


def test_episodes_that_were_cut_off_are_closed(server):
    made = by_openenv(server)
    first, _ = said(made, "1", target=8)
    other, _ = said(made, "1", target=9)
    made.environment.closed([first.state])
    assert ended(8)
    assert said(made, "2", target=9, state=other.state)[0].reward == pytest.approx(
        1 / 9
    )


def test_many_episodes_are_asked_at_the_same_time(server):
    """Eight of them are answered when all have been asked, not one before."""
    spoken = tokenizer()
    turns = [Turn(None, n, np.int32(4), spoken.encode("1")) for n in range(40)]
    meet = [t._replace(tokens=spoken.encode("meet")) for t in turns[:8]]
    found = by_openenv(server, timeout=30.0).environment.answer([*turns, *meet])
    assert [one.reward for one in found] == [0.25] * 40 + [0.0] * 8
    hung = [t._replace(tokens=spoken.encode("hang")) for t in turns[:8]]
    found = by_openenv(server).environment.answer([turns[0], *hung])
    assert found[0].reward == 0.25
    assert found[1:] == ["timeout"] * 8


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"url": "127.0.0.1:80"}, "is no address"),
        ({"url": "http://127.0.0.1:9"}, "says nothing first for seed 1 .crash: "),
        ({"lowest": 2.0}, "lowest=2.0 must be below"),
    ],
)
def test_a_server_that_is_not_there_is_refused_in_a_sentence(server, options, words):
    with pytest.raises(ValueError, match=words), contextlib.suppress(RuntimeError):
        by_openenv(**{"url": server} | options)
