"""A taskset of verifiers for the tests: guess a number, with hints or by a tool."""

import json

import httpx
import verifiers.v1 as vf

__all__ = ["Guessing", "InProcess"]
TOOL = {"type": "function", "function": {"name": "compare", "parameters": {"type": "object"}}}


class Number(vf.TaskData):
    number: int


class Guess(vf.Task[Number, vf.State, vf.TaskConfig]):
    @vf.reward(weight=0.5)
    async def right(self, trace: vf.Trace) -> float:
        return float(str(self.data.number) in trace.last_reply)


class GuessingConfig(vf.TasksetConfig):
    pass


class Guessing(vf.Taskset[Guess, GuessingConfig]):
    def load(self):
        for number in 7, 13:
            yield Guess(Number(prompt=f"Guess {number}.", number=number, system_prompt="Be brief."))


class InProcessConfig(vf.HarnessConfig):
    tools: bool = False
    forget: bool = False


class InProcess(vf.Harness[InProcessConfig]):
    """Asks until the answer is a number without a call, in the process of the library."""

    NEEDS_CONTAINER = EXECUTES_CODE = False
    APPENDS_SYSTEM_PROMPT = True

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, **_):
        messages = [
            {"role": "system", "content": data.system_prompt},
            {"role": "user", "content": [{"type": "text", "text": data.prompt}]},
        ]
        headers = {"Authorization": f"Bearer {secret}"}
        async with httpx.AsyncClient(timeout=60, headers=headers) as client:
            for _ in range(5):
                body = {"model": ctx.model, "messages": messages}
                body |= {"tools": [TOOL]} if self.config.tools else {}
                reply = await client.post(f"{endpoint}/chat/completions", json=body)
                if reply.is_error:
                    return vf.ProgramResult(exit_code=1, stdout="", stderr=reply.text)
                message = reply.json()["choices"][0]["message"]
                messages = [*messages[: 1 if self.config.forget else None], message]
                for call in message.get("tool_calls") or []:
                    given = json.loads(call["function"]["arguments"])["value"]
                    said = "too small" if given < data.number else "not too small"
                    messages += [{"role": "tool", "tool_call_id": call["id"], "content": said}]
                if not message.get("tool_calls"):
                    if message["content"].isdigit():
                        break
                    messages += [{"role": "user", "content": "Say a number."}]
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")
