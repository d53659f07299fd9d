"""An engine on loopback that speaks as vLLM or SGLang do, and fails as it is told to.

It draws by the folder that it was told to load, one completion per request, with the
sampler of curax. A fault is a function of a completion's reply, or a status.
"""

import contextlib
import json
import socket
import threading
from collections import Counter
from functools import lru_cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import judge_server
import numpy as np

from curax import rollout
from curax.arrays import supports
from curax.models import pretrained
from curax.types import Contexts, DrawRows

WIDTH = 16  # tokens of a context at most


@lru_cache
def sampler(sizes):
    """The sampler of all folders with this config.json, which is compiled once."""
    vocabulary = json.loads(sizes)["vocab_size"]
    folder = next(one for one, text in seen.items() if text == sizes)
    model = load(folder, vocabulary)

    @partial(jax.jit, static_argnums=(4, 5, 6))
    def drawn(params, tokens, mask, seed, steps, end, how):
        one = jnp.zeros(1, jnp.int32)
        return rollout.sample(
            model,
            params,
            Contexts(tokens=tokens, mask=mask),
            DrawRows(prompt=one, member=one, context=one, exists=jnp.ones(1, bool)),
            jax.random.key(seed),
            rollout.Settings(max_tokens=steps, end=end, pad=0, **dict(how)),
        )

    return drawn


seen = {}  # config.json by folder


def load(folder, vocabulary):
    return pretrained.model(path=folder, vocab_size=vocabulary, dtype=jnp.float32)


class Engine:
    """What is loaded, what was asked, and how the next replies fail.

    Attributes:
        version: of what is loaded.
        fault: changes a reply, `(reply, number of the request) -> reply`; an integer in
            its place is a status.
        generates: whether the route for tokens is open.
        dead: nobody answers.
        asked: requests for completions.
        loads: folders, in order.
        adapters: loaded, by name.
    """

    def __init__(self):
        self.version = "default"
        self.fault = self.params = self.sizes = None
        self.generates, self.dead = True, False
        self.asked, self.loads, self.adapters = [], [], {}
        self.lock, self.routes = threading.Lock(), Counter()

    def load(self, folder):
        """Take the parameters of a folder."""
        self.loads.append(folder)
        self.sizes = seen[folder] = (Path(folder) / "config.json").read_text()
        vocabulary = json.loads(self.sizes)["vocab_size"]
        self.params = load(folder, vocabulary).load(None)

    def restart(self):
        """Come back with nothing of what was loaded."""
        self.version, self.params, self.dead = "default", None, False

    def one(self, tokens, seed, steps, end, **how):
        """Tokens, log-probs and kept sets of a completion; whether it has ended."""
        padded = np.zeros((1, WIDTH), np.int32)
        mask = np.zeros((1, WIDTH), bool)
        padded[0, WIDTH - len(tokens) :] = tokens
        mask[0, WIDTH - len(tokens) :] = True
        with self.lock:
            rows = sampler(self.sizes)(
                self.params,
                *jax.device_put((padded, mask, np.uint32(seed))),
                steps,
                tuple(end),
                tuple(how.items()),
            )
        rows = jax.device_get(rows)
        there = rows.mask[0]
        given = rows.tokens[0][there].tolist(), rows.logp_behaviour[0][there].tolist()
        kept, size = [], json.loads(self.sizes)["vocab_size"]
        if how["support"]:
            own = supports.among(jnp.asarray(rows.support[0][there]), 0, size)
            kept = [np.flatnonzero(one).tolist() for one in own]
        return *given, kept, bool(rows.finished[0])

    def answer(self, handler, body, number):
        """Answer a request, as `judge_server.serve` asks for."""
        del number
        path = handler.path
        self.routes[path] += 1
        if self.dead:
            handler.close_connection = True
            handler.connection.shutdown(socket.SHUT_RDWR)
            return
        if path in ("/inference/v1/generate", "/v1/completions", "/generate"):
            self.completion(handler, path, body)
        elif path == "/collective_rpc":
            self.load(body["kwargs"]["weights_path"])
            judge_server.reply(handler, body={"results": [None]})
        elif path == "/update_weights_from_disk":
            self.load(body["model_path"])
            self.version = body["weight_version"]
            judge_server.reply(handler, body={"success": True, "message": ""})
        elif path == "/update_weight_version":
            self.version = body["new_version"]
            judge_server.reply(handler, body={"success": True})
        elif path in ("/weight_info", "/model_info"):
            judge_server.reply(handler, body={"weight_version": self.version})
        elif path == "/v1/models":
            names = ["policy", *self.adapters]
            judge_server.reply(handler, body={"data": [{"id": n} for n in names]})
        elif path == "/v1/load_lora_adapter":
            self.adapters[body["lora_name"]] = body["lora_path"]
            judge_server.reply(handler, body="Success: it is loaded")
        elif path == "/v1/unload_lora_adapter":
            del self.adapters[body["lora_name"]]
            judge_server.reply(handler, body="Success: it is gone")
        else:
            judge_server.reply(handler, 200 if path == "/reset_prefix_cache" else 404)

    def completion(self, handler, path, body):
        """Draw a completion, and spoil it as told."""
        if not body or (path == "/inference/v1/generate" and not self.generates):
            judge_server.reply(handler, 400 if self.generates else 403, "{}")
            return
        how = body.get("sampling_params", body)
        asked = body.get("token_ids") or body.get("prompt") or body["input_ids"]
        with self.lock:
            self.asked.append(body)
            number = len(self.asked)
        seed = how.get("seed", how.get("sampling_seed"))
        steps = how.get("max_tokens", how.get("max_new_tokens"))
        cut = {"top_k": max(how["top_k"], 0), "top_p": how["top_p"]}
        tokens, logp, kept, done = self.one(
            asked,
            seed,
            steps,
            how["stop_token_ids"],
            temperature=how["temperature"],
            support=cut != {"top_k": 0, "top_p": 1.0},
            **cut,
        )
        given = {
            "tokens": tokens,
            "logp": logp,
            "kept": kept,
            "end": "stop" if done else "length",
            "version": self.version,
        }
        if self.fault is not None:
            given = self.fault(given, number)
        if isinstance(given, int | str):
            status, text = (given, "") if isinstance(given, int) else (200, given)
            judge_server.reply(handler, status, text)
            return
        judge_server.reply(handler, body=FORMS[path](given))

    @contextlib.contextmanager
    def served(self):
        """Its address."""
        with judge_server.serve(self.answer) as server:
            yield server.url


def of_generate(given):
    choice = {
        "token_ids": given["tokens"],
        "logprobs": {"content": [{"logprob": one} for one in given["logp"]]},
        "finish_reason": given["end"],
        "weight_versions": [
            {"version": given["version"], "start": 0, "end": len(given["tokens"])}
        ],
        "sampling_mask": given["kept"] or None,
    }
    return {"choices": [choice]}


def of_openai(given):
    choice = {
        "token_ids": given["tokens"],
        "logprobs": {"token_logprobs": given["logp"]},
        "finish_reason": given["end"],
    }
    return {"choices": [choice]}


def of_sglang(given):
    # Where it keeps few, these are log-probs of all; those within have their own name.
    less = 1.0 if given["kept"] else 0.0
    pairs = zip(given["logp"], given["tokens"], strict=True)
    about = {
        "output_token_logprobs": [[logp - less, token, None] for logp, token in pairs],
        "finish_reason": {"type": given["end"]},
        "weight_version": given["version"],
    }
    if given["kept"]:
        about["output_token_sampling_mask"] = given["kept"]
        about["output_token_sampling_logprobs"] = given["logp"]
    return {"meta_info": about}


FORMS = {
    "/inference/v1/generate": of_generate,
    "/v1/completions": of_openai,
    "/generate": of_sglang,
}
