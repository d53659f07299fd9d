"""A taskset of verifiers of several turns: what its trace reports is noted in a file.

A reply is right where it has the digit that is asked for; a further try is worth less.
"""

import json
import os

import httpx
import verifiers.v1 as vf

__all__ = ["GuessingEnv", "GuessingHarness", "GuessingTaskset"]
TRIES = 3


class GuessData(vf.TaskData):
    """What is asked for."""

    digit: int


class GuessTask(vf.Task[GuessData]):
    """A digit to be said."""

    @vf.reward(weight=1.0)
    async def solved(self, task: GuessData, trace: vf.Trace) -> float:
        """Half of it for each further try."""
        (branch,) = trace.branches
        said = {"tokens": branch.token_ids, "drawn": branch.sampled_mask}
        with open(os.environ.get("GUESSES", os.devnull), "a") as file:
            file.write(json.dumps(said | {"task": task.idx, "id": trace.id}) + "\n")
        tries = trace.info.get("tries")
        return 0.0 if tries is None else 0.5 ** (tries - 1)


class GuessingTaskset(vf.Taskset[GuessTask, vf.TasksetConfig]):
    """Ten digits, each asked for in a sentence."""

    def load(self):
        """Tasks in order."""
        for digit in range(10):
            asked = f"Ann has {digit} books. How many books does Ann have now?"
            yield GuessTask(GuessData(prompt=asked, digit=digit), self.config.task)


class GuessingHarness(vf.Harness[vf.HarnessConfig]):
    """One call of the policy for a turn, from the process of verifiers itself."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        """Post the conversation."""
        _, prompt = self.resolve_prompt(data)
        if isinstance(prompt, str):
            messages = [{"role": "user", "content": prompt}]
        else:
            messages = [{"role": m.role, "content": m.content} for m in prompt]
        # On this machine, so no certificates, which take a thirtieth of a second.
        options = {"timeout": None, "trust_env": False, "verify": False}
        async with httpx.AsyncClient(**options) as http:
            reply = await http.post(
                f"{endpoint}/chat/completions",
                headers={"Authorization": f"Bearer {secret}"},
                json={"model": ctx.model, "messages": messages},
            )
        status = 0 if reply.status_code == 200 else 1
        return vf.ProgramResult(exit_code=status, stdout="", stderr=reply.text)


class GuessingEnvConfig(vf.EnvConfig):
    """One agent, in this process."""

    agent: vf.AgentConfig = vf.AgentConfig(runtime=vf.SubprocessConfig())


class GuessingEnv(vf.Env[GuessingEnvConfig]):
    """Whoever is wrong is told so, and may try again."""

    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        """One episode."""
        async with agents.agent.interaction(task) as talk:
            said = await talk.turn()
            for tries in range(1, TRIES + 1):
                if said.terminated or str(task.data.digit) in (said.last_reply or ""):
                    if not said.terminated:
                        talk.trace.info["tries"] = tries
                    break
                if tries < TRIES:
                    said = await talk.turn("No. How many books?")
