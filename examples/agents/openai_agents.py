# /// script
# requires-python = ">=3.12"
# dependencies = ["openai-agents>=0.1"]
# ///
"""An agent of OpenAI's Agents SDK: it hands the question to a second agent, which has the tool.

volley env test examples/agents/openai_agents.py
"""

from agents import (
    Agent,
    MaxTurnsExceeded,
    ModelBehaviorError,
    OpenAIChatCompletionsModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

set_tracing_disabled(True)  # traces would go to api.openai.com


class Birthdays:
    splits = {"train": 400, "eval": 50}
    timeout_s = 60

    def reset(self, split, index, seed):
        self.number = 2 * index + (split == "eval")  # no evaluation task is a training task
        self.month, self.day = 1 + self.number % 12, 1 + self.number // 12 % 28
        return f"On which day and month was person {self.number} born?"

    async def run(self, base_url, api_key, model):
        chat = OpenAIChatCompletionsModel(model, AsyncOpenAI(base_url=base_url, api_key=api_key))

        @function_tool
        def birthday(person: int) -> str:
            """Birthday of a person"""
            return f"{self.day}.{self.month}."

        registrar = Agent(name="Registrar", instructions="Look it up.", tools=[birthday], model=chat)
        clerk = Agent(name="Clerk", instructions="Ask the registrar.", handoffs=[registrar], model=chat)
        try:
            result = await Runner.run(clerk, f"When was person {self.number} born?", max_turns=4)
        except (MaxTurnsExceeded, ModelBehaviorError) as error:  # the model's fault: judged like any answer
            return f"no answer: {error}"
        return str(result.final_output)

    def judge(self, output):
        right = f"{self.day}.{self.month}." in output
        return float(right), {"success": right}

    def demonstration(self, split, index):
        self.reset(split, index, 0)
        hand_off = {"function": {"name": "transfer_to_registrar", "arguments": {}}}
        look_up = {"function": {"name": "birthday", "arguments": {"person": self.number}}}
        return [
            {"role": "assistant", "content": "", "tool_calls": [hand_off]},
            {"role": "assistant", "content": "", "tool_calls": [look_up]},
            {"role": "assistant", "content": f"{self.day}.{self.month}."},
        ]
