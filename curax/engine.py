"""Engines: servers that draw the completions of a step from a copy of the policy.

Prompts go as token ids, and tokens come back with their log-probs; nothing is decoded
and encoded again. `curax.handover` has what all engines do.
"""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from curax.handover import AbsentError, Ask, Completion, Engine, EngineError, Limits
from curax.settings.config_types import Count, Natural, Positive
from curax.settings.groups import Fields
from curax.verify.http import Client, MissingError

TOKEN = "CURAX_ENGINE_TOKEN"  # environment variable of it, unless another is named
LARGEST = 2**26  # bytes of a reply
STATE = 10.0  # seconds for a question about the engine's state


class Server(Engine):
    """An engine behind HTTP, whose options are those of `vllm`."""

    def __init__(
        self,
        *,
        url: str,
        folder: str = "",
        timeout: Positive = 600.0,
        wait: Positive = 600.0,
        tries: Count = 3,
        retries: Natural = 2,
        parallel: Count = 256,
        token_env: str = TOKEN,
    ):
        """Check the options; nothing is sent.

        Raises:
            ValueError: an option is wrong, in a sentence.
        """
        super().__init__(folder=folder, wait=wait, tries=tries)
        self.url = url.rstrip("/")
        given: dict[str, Any] = {"url": self.url, "token_env": token_env}
        given |= {"default_env": TOKEN, "example": "http://127.0.0.1:8000"}
        self._rows = Client(
            self.name,
            timeout=timeout,
            retries=retries,
            parallel=parallel,
            largest=LARGEST,
            **given,
        )
        self._load = Client(self.name, timeout=timeout, retries=0, parallel=1, **given)
        self._state = Client(self.name, timeout=STATE, retries=0, parallel=1, **given)

    def start(self, config: Fields) -> None:
        """As `Engine.start`; the token is taken from the environment."""
        super().start(config)
        for client in (self._rows, self._load, self._state):
            client.start()

    def quoted(self, text: str) -> str:
        """As `Engine.quoted`, without the token."""
        return self._rows.quoted(text)

    def completions(
        self, bodies: Sequence[Any], place: str, read: Callable[[Any], Completion]
    ) -> list[Completion | str]:
        """What a reader makes of each reply, or the reason why there is none."""
        found: list[Completion | str] = []
        for reply in self._rows.replies(bodies, place):
            if isinstance(reply, MissingError):
                found.append(self._rows.quoted(str(reply)))
                continue
            try:
                found.append(read(reply))
            except (
                *(TypeError, KeyError, IndexError, ValueError, AttributeError),
                OverflowError,  # numbers of any size
            ):
                found.append(f"the reply of {place} holds no completion")
        return found

    def get(self, place: str) -> Any:
        """The reply to a question about the engine's state.

        Raises:
            AbsentError: there is none.
            EngineError: it is refused.
        """
        (reply,) = self._state.replies([None], place, method="GET")
        return self._given(self._state, place, reply)

    def post(self, place: str, body: Any) -> Any:
        """The reply to an order; text where it is no JSON.

        Raises:
            AbsentError: there is none.
            EngineError: it is refused.
        """
        (reply,) = self._load.replies([body], place, text=True)
        return self._given(self._load, place, reply)

    def _given(self, client: Client, place: str, reply: Any) -> Any:
        """A reply; one that is missing is raised."""
        if not isinstance(reply, MissingError):
            return reply
        reason = client.quoted(f"{place}: {reply}")
        if status(reply) in range(400, 500) and status(reply) not in (408, 429):
            raise EngineError(f"{self.name} at {self.url} refuses {reason}")
        raise AbsentError(reason)


def status(reply: Any) -> int | None:
    """The HTTP status that a missing reply is told by; None: there was none."""
    found = re.match(r"error: HTTP (\d{3})", str(reply))
    return int(found[1]) if found else None


def real(number: Any) -> float:
    """A number of a reply; ValueError where it is none."""
    if isinstance(number, bool) or not isinstance(number, int | float):
        raise ValueError(number)
    return float(number)


def whole(number: Any) -> int:
    """A whole number of a reply; ValueError where it is none."""
    if real(number) != int(number):
        raise ValueError(number)
    return int(number)


def sets(given: Any) -> list[list[int]]:
    """Kept sets of a reply; none where there are none."""
    return [[whole(token) for token in ids] for ids in given or ()]


class vllm(Server):  # noqa: N801 - a config names it, as any function
    """Completions by a server of vLLM, started as `docs/engines.md` says.

    It gets adapters where the model has `lora_rank`, else all parameters. Where the
    route for tokens is closed, that of OpenAI is asked.

    Args:
        url: address, without a path; it is stored with the config.
        folder: in which parameters are handed over, seen by the server under the same
            name; "": one of temporary files, on the same host.
        timeout: seconds per request and attempt.
        wait: seconds for a server that does not answer to come back.
        tries: times that a completion is asked for, with the same seed.
        retries: further attempts per request, where the server could not be reached.
        parallel: requests, and connections, at the same time.
        token_env: environment variable with a token, sent as `Authorization: Bearer`;
            one that is named must be there.

    Raises:
        ValueError: an option is wrong, in a sentence.
    """

    name = "engine.vllm"
    adapters = True
    _generates: bool | None = None  # whether there is a route for tokens

    def version(self, wanted: str, *, adapter: bool) -> str | None:
        """As `Engine.version`; adapters are models of their own, named by version."""
        if adapter:
            names = [one["id"] for one in self.get("/v1/models")["data"]]
            return wanted if wanted in names else None
        return self.get("/weight_info")["weight_version"]

    def load(self, folder: Path, version: str, *, adapter: bool) -> None:
        """As `Engine.load`; prefixes that were cached before are forgotten."""
        if adapter:
            old = [one["id"] for one in self.get("/v1/models")["data"]]
            for name in old:
                if name.startswith(f"curax-{self._token}-"):
                    self.post("/v1/unload_lora_adapter", {"lora_name": name})
            given = {"lora_name": version, "lora_path": str(folder)}
            self.post("/v1/load_lora_adapter", given)
            return
        given = {"weights_path": str(folder)}
        order = {"method": "reload_weights", "kwargs": given}
        self.post("/collective_rpc", order)
        self.post("/reset_prefix_cache", {})
        self.post("/update_weight_version", {"new_version": version})

    def complete(
        self, asks: Sequence[Ask], how: Limits, version: str
    ) -> list[Completion | str]:
        """As `Engine.complete`, by the route for tokens, else by that of OpenAI."""
        model = version
        if not self._adapter:
            try:
                model = self.get("/v1/models")["data"][0]["id"]
            except (AbsentError, TypeError, KeyError, IndexError) as error:
                return [f"/v1/models: {error}"] * len(asks)
        generates = self._has_generate()
        beside = {"model": model, "cache_salt": version}
        if not generates:
            bodies = [
                {"prompt": ask.tokens, "return_token_ids": True}
                | sampling(ask, how)
                | beside
                for ask in asks
            ]
            return self.completions(bodies, "/v1/completions", self._of_openai)
        bodies = [
            {"token_ids": ask.tokens, "sampling_params": sampling(ask, how)} | beside
            for ask in asks
        ]
        return self.completions(bodies, "/inference/v1/generate", self._of_generate)

    def _has_generate(self) -> bool:
        """Whether the route for tokens is there and open; asked until that is told."""
        if self._generates is None:
            (reply,) = self._state.replies([{}], "/inference/v1/generate")
            told, missing = status(reply), isinstance(reply, MissingError)
            if missing and told not in range(400, 429):
                return True
            self._generates = told not in (403, 404, 405)
        return self._generates

    def _of_generate(self, reply: Any) -> Completion:
        (choice,) = reply["choices"]
        spans = [] if self._adapter else choice.get("weight_versions") or []
        return Completion(
            tokens=[whole(token) for token in choice["token_ids"]],
            logp=[real(one["logprob"]) for one in choice["logprobs"]["content"]],
            finished=choice["finish_reason"] == "stop",
            versions=frozenset(span["version"] for span in spans),
            kept=sets(choice.get("sampling_mask")),
        )

    def _of_openai(self, reply: Any) -> Completion:
        (choice,) = reply["choices"]
        return Completion(
            tokens=[whole(token) for token in choice["token_ids"]],
            logp=[real(one) for one in choice["logprobs"]["token_logprobs"]],
            finished=choice["finish_reason"] == "stop",
        )


def sampling(ask: Ask, how: Limits) -> dict[str, Any]:
    """Options of vLLM that leave nothing to its defaults."""
    return {
        "seed": ask.seed,
        "n": 1,
        "logprobs": 0,
        "max_tokens": how.max_tokens,
        "temperature": how.temperature,
        "ignore_eos": True,  # the task's ends are the only ones
        "stop_token_ids": list(how.end),
        **shape(how),
    }


def shape(how: Limits) -> dict[str, Any]:
    """Options that shape a distribution, by the names of both."""
    return {
        "top_p": how.top_p,
        "top_k": how.top_k or -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
    }


class sglang(Server):  # noqa: N801
    """Completions by a server of SGLang; all parameters, adapters merged.

    Arguments as `vllm`. Seeds count where the server draws deterministically. A server
    of sglang-jax has no route for parameters and cannot be trained with.

    Args:
        url: address, without a path; it is stored with the config.
        folder: in which parameters are handed over, seen by the server under the same
            name; "": one of temporary files, on the same host.
        timeout: seconds per request and attempt.
        wait: seconds for a server that does not answer to come back.
        tries: times that a completion is asked for, with the same seed.
        retries: further attempts per request, where the server could not be reached.
        parallel: requests, and connections, at the same time.
        token_env: environment variable with a token, as of `vllm`.

    Raises:
        ValueError: an option is wrong, in a sentence.
    """

    name = "engine.sglang"

    def version(self, wanted: str, *, adapter: bool) -> str | None:
        """As `Engine.version`."""
        return self.get("/model_info").get("weight_version")

    def load(self, folder: Path, version: str, *, adapter: bool) -> None:
        """As `Engine.load`; prefixes that were cached before are forgotten."""
        order = {"model_path": str(folder), "weight_version": version}
        reply = self.post("/update_weights_from_disk", order | {"flush_cache": True})
        if not (isinstance(reply, dict) and reply.get("success")):
            why = self._load.quoted(f"error: {reply}")
            raise EngineError(f"{self.name} did not load {folder} ({why})")

    def complete(
        self, asks: Sequence[Ask], how: Limits, version: str
    ) -> list[Completion | str]:
        """As `Engine.complete`."""
        options = {
            "max_new_tokens": how.max_tokens,
            "temperature": how.temperature,
            "stop_token_ids": list(how.end),
            **shape(how),
        }
        beside = {"return_logprob": True}
        if how.most_kept:
            beside["return_sampling_mask"] = True
        bodies = [
            {
                "input_ids": ask.tokens,
                "sampling_params": options | {"sampling_seed": ask.seed},
                **beside,
            }
            for ask in asks
        ]
        return self.completions(bodies, "/generate", self._of_generate)

    def _of_generate(self, reply: Any) -> Completion:
        about = reply["meta_info"]
        pairs = about["output_token_logprobs"]
        told = about.get("weight_version")
        kept = about.get("output_token_sampling_mask")
        within = about["output_token_sampling_logprobs"] if kept else None
        return Completion(
            tokens=[whole(pair[1]) for pair in pairs],
            logp=[real(one) for one in within or [pair[0] for pair in pairs]],
            kept=sets(kept),
            finished=about["finish_reason"]["type"] == "stop",
            versions=frozenset([told] if told else []),
        )
