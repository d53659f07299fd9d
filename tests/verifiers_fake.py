"""Stands for the other side of `tasks.verifiers`: its lines, and requests by urllib.

Its config holds the prompts of its tasks, and by number what episodes of a task do.
"""

import json
import os
import sys
import threading
import time
import urllib.error
import urllib.request

lock = threading.Lock()
setup = json.loads(sys.stdin.readline())
config = setup["config"]
URL = setup["url"].removesuffix("/v1")


def say(**message):
    with lock:
        print(json.dumps(message), flush=True)


def note(**what):
    if "log" in config:
        with lock, open(config["log"], "a") as file:
            file.write(json.dumps(what) + "\n")


def called(path, trace, body=None):
    head = {"Authorization": f"Bearer {os.environ['CURAX_EPISODES_KEY']}"}
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(URL + path, data, head | {"X-Session-ID": trace})
    with urllib.request.urlopen(request) as reply:
        return json.load(reply)


def drawn(trace, row):
    (choice,) = called("/inference/v1/generate", trace, {"token_ids": row})["choices"]
    tokens = choice["token_ids"]
    said = choice["logprobs"]["content"]
    assert [one["token"] for one in said] == [f"token_id:{t}" for t in tokens]
    assert choice["finish_reason"] == "stop"
    return tokens


def played(name, task, seed, attempt=0):
    act = config.get("acts", {}).get(str(task), "")
    trace = f"trace-{name}-{attempt}"
    say(trace=trace, of=name)
    row = [*config["prompts"][task]]
    if act == "silent":
        return say(end=name, rewards={}, timeout=False, error="ValueError: no")
    if act == "another" and seed:
        row[0] += 1
    (model,) = called("/v1/models", trace)["data"]
    assert model["max_model_len"] > 1000
    for turn in range(config.get("turns", 3)):
        if turn:
            row += [1, 2][: turn % 3]
        said = drawn(trace, row)
        if act == "hang":
            time.sleep(60)
        if act == "crash":
            sys.stderr.write("out of luck\n")
            sys.stderr.flush()
            os._exit(3)
        if act == "fails":
            return say(end=name, rewards={}, timeout=False, error="KeyError: 'x'")
        if act == "late":
            return say(end=name, rewards={}, timeout=True, error="TimeoutError: x")
        if act == "again":
            return played(name, task, seed, attempt + 1)
        row += said[:-1] if act == "rewrites" else said
    rewards = {"none": None, "inf": float("inf")}
    note(row=row, seed=seed, task=task)
    found = {trace: rewards.get(act, 0.5), "another": 0.25}
    return say(end=name, rewards=found, timeout=False, error=None)


def safely(*what):
    try:
        played(*what)
    except urllib.error.HTTPError as error:
        note(refused=error.code)


if setup["taskset"] == "broken":
    say(fault="ModuleNotFoundError: taskset 'broken' not found")
elif setup["taskset"] == "absent":
    say(fault="ModuleNotFoundError: No module named 'verifiers'")
elif setup["taskset"] == "dies":
    sys.exit("Segmentation fault")
else:
    print("not for the protocol", flush=True)
    say(tasks=len(config["prompts"][: setup["size"]]))
for line in sys.stdin:
    message = json.loads(line)
    if "stop" in message:
        note(stop=message["stop"])
        continue
    what = message["start"], message["task"], message["seed"]
    threading.Thread(target=safely, args=what, daemon=True).start()
