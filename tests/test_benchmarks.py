"""What benchmarks compare with, and that the command for a GPU runs to its end."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from outputs import ran

from benchmarks import attention, gpu, plain, workload
from benchmarks.workload import WORKLOADS

TINY = replace(
    WORKLOADS["nano"],
    **{"layers": 2, "width": 16, "heads": 2, "kv_heads": 1, "head_dim": 8},
    **{"mlp_width": 24, "vocab_size": 19, "prompts": 2, "group_size": 3},
    **{"prompt_tokens": 5, "max_tokens": 7, "slots": 6, "hazard": 0.2},
)


@pytest.mark.long
@jax.numpy_rank_promotion("allow")
@jax.numpy_dtype_promotion("standard")
def test_the_plain_peer_draws_and_trains_one_policy():
    params = plain.parameters(TINY, jax.random.key(0))
    prompts = jnp.array(workload.prompts(TINY)[: TINY.prompts])
    tokens, mask, logp = plain.sample(TINY, params, prompts, jax.random.key(1))
    again = jax.jit(plain.log_probs, static_argnums=0)(TINY, params, prompts, tokens)
    np.testing.assert_allclose(logp, again, atol=1e-5)
    ended = np.isin(tokens, TINY.ends)
    before = np.cumsum(ended, -1) - ended
    np.testing.assert_array_equal(mask, before == 0)
    old = jax.tree.map(np.array, params)
    reward = jnp.arange(6.0).reshape(2, 3)
    state = plain.OPTIMIZER.init(params)
    new, _ = plain.update(TINY, params, state, prompts, (tokens, mask, logp), reward)
    for was, now in zip(*map(jax.tree.leaves, (old, new)), strict=True):
        # Adam's first step is the learning rate, whatever the gradient.
        assert 0 < abs(now - was).max() < 1.5 * workload.LEARNING_RATE


@pytest.mark.long
def test_the_command_for_a_gpu_runs_to_its_end(tmp_path, capfd):
    out = tmp_path / "gpu.json"
    words = ["--shrunken", "--steps=1", "--sizes=qwen3-1.7b", "--trl=/no/python"]
    assert gpu.main([*words, f"--out={out}"]) == 0
    found = json.loads(out.read_text())
    (point,) = found["points"]
    assert point["size"] == "qwen3-1.7b"
    assert point["trained_tokens_per_s"] > 0 < point["update_share_of_flops"]
    assert "trl is not measured" in found["notes"][0]
    assert "share of the device's bandwidth" in capfd.readouterr().out


def test_attention_is_measured_by_what_the_device_has(capsys):
    attention.main(["--shrunken"])
    head, _, row = capsys.readouterr().out.strip().splitlines()
    assert [x.strip() for x in head.strip("|").split("|")[1:]] == [*attention.NAMES]
    assert row.strip("| ").startswith("2, 4, 6 ")
    assert row.count("-") == 2  # what asks for cuDNN


def test_without_a_gpu_it_says_what_is_missing():
    status, out, err = ran("-m", "benchmarks.gpu")
    assert (status, out) == (2, "")
    assert err.startswith("JAX finds no NVIDIA GPU here")
