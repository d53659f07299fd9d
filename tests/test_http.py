"""Graders that ask a server, which is slow, dies or lies: outcomes, time, secrets."""

import asyncio
import json
import os
import re
import socket
import sys
import time
from functools import partial

import numpy as np
import pytest
import real
import words
from judge_server import reply, serve
from test_folder import lines
from test_real import FEW

from curax import train
from curax.settings import packages
from curax.settings.config_paths import describe
from curax.tasks import file_task
from curax.verify import graders, http
from curax.verify.workers import pool

SECRET = "sk-0123456789abcdef"
ODD = [0.0, 0.25, 1.0, 1, True, None, "timeout: 3 s", "the compiler is gone"]
ODD_SAID = [0.0, 0.25, 1.0, 1.0, 1.0, "none", "timeout: 3 s"]
ODD_SAID += ["error: the compiler is gone"]


@pytest.fixture(autouse=True)
def own_environment(monkeypatch):
    for name in os.environ:
        if name.lower().endswith("_proxy") or name == http.TOKEN:
            monkeypatch.delenv(name)
    monkeypatch.setattr(http, "WAIT", 0.01)


def graded(grader, checks):
    with pool(grader) as some:
        return some.grade(checks)


def served(behave, checks, **options):
    """The verdicts of a server that behaves so, and what it was asked."""
    with serve(behave) as server:
        return graded(partial(graders.http, url=server.url, **options), checks), server


def numbered(count):
    return [("2 + 2", str(n), "4") for n in range(count)]


def by_number(handler, body, n):
    """Each completion is the number of its outcome."""
    del n
    outcomes = [ODD[int(check["completion"])] for check in body["checks"]]
    reply(handler, body={"outcomes": outcomes})


# ----- what is sent, and what it means


@pytest.mark.parametrize("batch", [1, 3, 100])
def test_outcomes_are_those_of_the_server_in_their_order(batch):
    with serve(by_number) as server:
        grader = partial(graders.http, url=f"{server.url}/grade", batch=batch)
        checks = numbered(len(ODD))
        assert graded(grader, [*checks, *checks[::-1]]) == ODD_SAID + ODD_SAID[::-1]
    sent = [check for body in server.bodies for check in body["checks"]]
    names = ("prompt", "completion", "answer")
    want = [dict(zip(names, check, strict=True)) for check in checks]
    assert sorted(sent, key=str) == sorted(want, key=str)  # equal ones once
    assert all(len(body["checks"]) <= batch for body in server.bodies)
    assert {*server.paths} == {"/grade"}
    assert {*server.tokens} == {None}


def test_at_most_so_many_are_asked_at_the_same_time():
    def slowly(handler, body, n):
        time.sleep(0.05)
        reply(handler, body={"outcomes": [1.0]})

    said, server = served(slowly, numbered(20), parallel=3)
    assert said == [1.0] * 20
    assert server.most == 3


def test_what_is_no_json_costs_its_own_completion():
    checks = [("", "0", "4"), ("", "1", {4}), ("", "2", float("nan"))]
    checks += [("", "\ud800", "4"), ("", "0", {"a": [1, None]})]
    half = {"outcomes": [0.5]}
    said, _ = served(lambda handler, body, n: reply(handler, body=half), checks)
    one, two, three, *others = said
    assert (one, others) == (0.5, [0.5, 0.5])
    assert two.startswith("error: TypeError: ")
    assert three.startswith("error: ValueError: ")


def test_a_grader_by_itself_is_a_function_of_one_completion():
    def two_ways(handler, body, n):
        outcome = {"right": 1.0, "none": None}.get(
            body["checks"][0]["completion"], "no"
        )
        reply(handler, body={"outcomes": [outcome]})

    with serve(two_ways) as server:
        ask = partial(graders.http, url=server.url)
        assert (ask("", "right", ""), ask("", "none", "")) == (1.0, None)
        with pytest.raises(RuntimeError, match=r"^error: no$"):
            ask("", "else", "")

        async def in_a_loop():  # as a notebook has one
            return ask("", "right", "")

        assert asyncio.run(in_a_loop()) == 1.0


# ----- a server that lies

LIES = {
    "": "error: the reply is no JSON",
    "{": "error: the reply is no JSON: {",
    "\x00\x1b[31m": "error: the reply is no JSON: \\x00\\x1b[31m",
    "[" * 10**5: f"error: the reply is no JSON: {'[' * 168}...",
    "[1.0]": 'error: the reply has no list "outcomes"',
    '{"outcomes": 1.0}': 'error: the reply has no list "outcomes"',
    '{"outcomes": []}': "error: 0 outcomes for 1 checks",
    '{"outcomes": [1.0, 1.0]}': "error: 2 outcomes for 1 checks",
    '{"outcomes": [NaN]}': "error: returned nan, which is not in [0, 1]",
    '{"outcomes": [-0.1]}': "error: returned -0.1, which is not in [0, 1]",
    f'{{"outcomes": [1{"0" * 5000}]}}': "error: returned inf, which is not in [0, 1]",
    '{"outcomes": [[1]]}': "error: returned [1.0], which is not a number",
    '{"outcomes": ["crash\\nand burn"]}': "error: crash and burn",
    '{"outcomes": ["none: of it"]}': "error: none: of it",
}


@pytest.mark.parametrize("lie", LIES, ids=lambda lie: lie[:24])
def test_an_answer_that_is_none_is_a_missing_outcome_with_its_reason(lie):
    said, server = served(lambda handler, *_: reply(handler, body=lie), numbered(1))
    assert said == [LIES[lie]]
    assert len(server.bodies) == 1


@pytest.mark.parametrize(
    ("status", "headers", "said"),
    [
        (404, {}, "error: HTTP 404: no such page"),
        (401, {}, "error: HTTP 401: no such page"),
        (302, {"Location": "/elsewhere"}, "error: HTTP 302, which is not followed"),
        (307, {"Location": "/elsewhere"}, "error: HTTP 307, which is not followed"),
        (200, {"Content-Encoding": "gzip"}, "error: DecodingError: .*"),
    ],
)
def test_a_refusal_or_a_redirect_is_neither_repeated_nor_followed(
    status, headers, said
):
    def refuse(handler, body, n):
        reply(handler, status, "no such page", **headers)

    (got,), server = served(refuse, numbered(1))
    assert re.fullmatch(said, got)
    assert server.paths == ["/"]


def test_an_answer_without_end_is_cut_off():
    def endless(handler, body, n):
        handler.send_response(200)
        handler.end_headers()
        while True:
            handler.wfile.write(b" " * 2**16)

    said, _ = served(endless, numbered(1))
    assert said == [f"error: a reply of over {http.LARGEST} bytes"]


# ----- a server that dies, or is slow


def die(handler, body, n):
    handler.send_response(200)
    handler.send_header("Content-Length", "100")
    handler.end_headers()
    handler.wfile.write(b'{"outco')
    handler.wfile.flush()
    handler.connection.shutdown(socket.SHUT_RDWR)
    handler.close_connection = True


def status(code, **headers):
    return lambda handler, body, n: reply(handler, code, "busy", **headers)


FAILURES = {
    "dies": (die, "error: RemoteProtocolError: "),
    "500": (status(500), "error: HTTP 500: busy"),
    "503": (status(503), "error: HTTP 503: busy"),
    "429": (status(429), "error: HTTP 429: busy"),
    "429, wait": (status(429, Retry_After=0.2), "error: HTTP 429: busy"),
    "429, date": (status(429, Retry_After="Wed, 21 Oct 2026 07:28:00 GMT"), "error: "),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_what_may_pass_is_asked_again_and_no_more_often_than_stated(failure):
    fail, why = FAILURES[failure]

    def at_last(handler, body, n):
        later = body["checks"][0]["completion"] == "0" and n == 3
        (by_number if later else fail)(handler, body, n)

    begun = time.monotonic()
    (first, second), server = served(at_last, numbered(2), retries=2)
    assert first == 0.0
    assert second.startswith(why)
    assert sorted(server.times.values()) == [3, 3]
    assert time.monotonic() - begun > 0.4 * (failure == "429, wait")


def test_waits_double_from_one_attempt_to_the_next(monkeypatch):
    monkeypatch.setattr(http, "WAIT", 0.04)
    asked = []

    def busy(handler, body, n):
        asked.append(time.monotonic())
        (status(500) if len(asked) < 4 else by_number)(handler, body, n)

    said, _ = served(busy, numbered(3)[2:], retries=3)
    assert said == [1.0]
    assert (np.diff(asked) >= [0.04, 0.08, 0.16]).all()


def test_a_server_that_asks_for_more_patience_than_there_is_is_not_asked_again():
    said, server = served(status(429, Retry_After=3600), numbered(1))
    assert (said, len(server.bodies)) == (["error: HTTP 429: busy"], 1)


def hang(handler, body, n):
    time.sleep(10.0)


def drip(handler, body, n):
    """A byte now and then: no read of it takes long."""
    handler.send_response(200)
    handler.send_header("Content-Length", "100")
    handler.end_headers()
    for _ in range(100):
        handler.wfile.write(b" ")
        time.sleep(0.1)


@pytest.mark.first(1)
@pytest.mark.parametrize("slow", [hang, drip])
def test_what_takes_too_long_is_a_timeout_and_the_others_are_graded(slow):
    def of_some(handler, body, n):
        slow_one = body["checks"][0]["completion"] == "1"
        (slow if slow_one else by_number)(handler, body, n)

    begun = time.monotonic()
    said, server = served(of_some, numbered(4), timeout=1.5)
    assert time.monotonic() - begun < 8.0
    assert said == [0.0, "timeout", 1.0, 1.0]
    assert [*server.times.values()] == [1, 1, 1, 1]


@pytest.mark.first(2)
@pytest.mark.parametrize("failure", ["hangs", "nobody", *FAILURES])
def test_a_server_that_never_answers_costs_bounded_time_and_requests(failure):
    fail, _ = FAILURES.get(failure, (hang, ""))
    with serve(fail) as server:
        url = server.url
        if failure == "nobody":
            with socket.create_server(("127.0.0.1", 0)) as free:
                url = f"http://127.0.0.1:{free.getsockname()[1]}"
        grader = partial(graders.http, url=url, timeout=0.3, parallel=4, retries=1)
        begun = time.monotonic()
        said = graded(grader, numbered(500))
        assert time.monotonic() - begun < 10.0  # one by one it would be a minute
    assert all(isinstance(verdict, str) for verdict in said)
    assert said.count("error: not asked, as too many requests had failed before") > 480
    assert len(server.bodies) <= http.LEAST + 4


@pytest.mark.long
def test_a_server_that_answers_most_is_asked_for_all():
    def often(handler, body, n):
        good = int(body["checks"][0]["completion"]) % 3 > 0
        (status(200) if good else status(500))(handler, body, n)

    said, _ = served(often, numbered(60), parallel=2, retries=0)
    assert sum(verdict == "error: HTTP 500: busy" for verdict in said) == 20
    assert sum(verdict == "error: the reply is no JSON: busy" for verdict in said) == 40


# ----- options, and what is installed

REFUSED = {
    "a url 'grade', which is no http:// or https:// address": {"url": "grade"},
    "a url 'ftp://x', which is no": {"url": "ftp://x"},
    "a url 'http://', which is no": {"url": "http://"},
    "a url 'http://x/a b' with blanks": {"url": "http://x/a b"},
    "a url that is no address": {"url": "http://x:99999"},
    "a url that is no address; write": {"url": "http://[x"},
    "a url with a user or a password": {"url": f"http://me:{SECRET}@x"},
    "timeout=0; raise it above 0.": {"timeout": 0},
    "batch=0; raise it": {"batch": 0},
    "parallel=-1; raise it": {"parallel": -1},
    "retries=-1; set it to 0 or more.": {"retries": -1},
    "a token_env that is no name in capitals": {"token_env": SECRET},
}


def test_an_address_that_nobody_can_ask_costs_outcomes_and_not_the_run():
    grader = partial(graders.http, url="http://10.0.0.256:9/", retries=0)
    said = graded(grader, numbered(2))
    assert said == ["error: Invalid IPv4 address: '10.0.0.256'"] * 2


@pytest.mark.parametrize("wrong", REFUSED)
def test_a_wrong_option_is_refused_in_a_sentence_when_the_task_is_built(wrong):
    grader = partial(graders.http, **{"url": "http://x"} | REFUSED[wrong])
    with pytest.raises(
        ValueError, match=re.escape(f"graders.http has {wrong}")
    ) as told:
        pool(grader)
    assert SECRET not in str(told.value)


def test_a_grader_without_its_address_or_with_another_option_is_refused():
    for grader in (graders.http, partial(graders.http, url="http://x", patience=1)):
        with pytest.raises(
            ValueError, match=r"'http' cannot be called as http\(prompt"
        ):
            pool(grader)


def test_where_httpx_is_missing_a_sentence_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "httpx", None)
    said = "graders.http cannot ask http://x: the package httpx is not installed; run "
    said += f"{packages.install('http')}."
    some = pool(partial(graders.http, url="http://x"))
    with pytest.raises(RuntimeError, match=rf"^{re.escape(said)}$"):
        some.start()


# ----- tokens


def test_the_token_is_sent_and_no_reason_has_it(monkeypatch):
    def echo(handler, body, n):
        token = handler.headers["Authorization"]
        if n == 1 and body["checks"][0]["completion"] == "0":
            reply(handler, 403, f"{'x' * 150} {token} is not {token}")
        else:
            reply(handler, body={"outcomes": [f"error: {token}"]})

    for name in (http.TOKEN, "OF_SANDBOX"):
        monkeypatch.setenv(name, f"{SECRET}\n")
        (one, two), server = served(echo, numbered(2), token_env=name)
        assert {*server.tokens} == {f"Bearer {SECRET}"}
        assert one.startswith("error: HTTP 403: xxx")
        assert "sk-" not in one
        assert two == "error: Bearer ***"
        grader = partial(graders.http, url=server.url, token_env=name)
        assert SECRET not in json.dumps(describe(grader))


@pytest.mark.parametrize(
    ("token", "said"),
    [
        ("", r"there is no environment variable OF_SANDBOX; export it\.$"),
        (
            "sk-0123 45",
            r"the token in OF_SANDBOX has blanks or is not ASCII; mend it\.$",
        ),
        ("sk-0123\u0416", "the token in OF_SANDBOX has blanks"),
    ],
)
def test_a_token_that_is_missing_or_none_is_told_before_a_run(monkeypatch, token, said):
    monkeypatch.setenv("OF_SANDBOX", token)
    grader = partial(graders.http, url="http://x", token_env="OF_SANDBOX")
    with pytest.raises(RuntimeError, match=said) as told:
        pool(grader).start()
    assert "0123" not in str(told.value)


# ----- in a task and in a run


def has_an_even_length(handler, body, n):
    """Right are completions of an even number of characters; one in four is missing."""
    lengths = [len(check["completion"]) for check in body["checks"]]
    outcomes = [None if k % 4 == 3 else float(k % 2 == 0) for k in lengths]
    reply(handler, body={"outcomes": outcomes})


def test_a_term_of_a_weighted_grader_may_ask_a_server():
    with serve(has_an_even_length) as server:
        grader = partial(
            graders.weighted,
            terms={
                "right": graders.exact,
                "even": partial(graders.http, url=server.url, batch=2),
            },
            weights={"right": 1.0, "even": 0.5},
            outcome="right",
        )
        made = file_task.task(**words.files(), max_prompt_tokens=64, grader=grader)
        made.start()
        said = [np.int32(words.tokenizer().encode("7 + 7 = 14"))]
        target = [made.prompts(np.int32([0])).target[0]]
        terms = made.terms.verify_all(target, said)
    assert terms == {"right": [0.0], "even": [1.0]}
    assert len(server.bodies) == 1


@pytest.mark.long  # by a run; that of a term shows the rest
def test_a_run_has_the_outcomes_of_its_server_and_no_file_has_the_token(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv(http.TOKEN, SECRET)
    path = f"model.path={real.checkpoint(small=True)}"
    with serve(has_an_even_length) as server:
        graded_by = ["task.grader=graders.http", f"task.grader.url={server.url}"]
        few = [*FEW, "steps=2", "warm_start=none", path, *real.named()[1:]]
        argv = ["--config", str(real.FILE), "--workdir", str(tmp_path / "run"), "--set"]
        assert train.main([*argv, *few, *graded_by]) == 0
    assert {*server.tokens} == {f"Bearer {SECRET}"}
    rows = lines(tmp_path / "run" / "metrics.jsonl")[1:]
    for row in rows:
        assert row["time/verify_s"] > 0
        assert row["verify/none"] == row["outcome/missing"]
    assert sum(row["verify/none"] for row in rows) > 0
    assert any(0 < row["outcome/mean"] < 1 for row in rows)
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["task"]["grader"]["url"] == server.url
    assert config["task"]["grader"]["token_env"] == http.TOKEN
    out, err = capsys.readouterr()
    assert SECRET not in out + err
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert len(files) > 5
    assert not any(SECRET.encode() in path.read_bytes() for path in files)
