# /// script
# requires-python = ">=3.12"
# dependencies = ["openai>=1.60"]
# ///
"""An agent of the plain OpenAI SDK with one tool: it looks up two prices, and answers with their sum.

volley env test examples/agents/openai_sdk.py
"""

import json

from openai import OpenAI

GOODS = ["apple", "bread", "candle", "egg", "fish", "glove", "hammer", "ink", "jar", "kite"]
TOOL = {
    "name": "price",
    "description": "Price of a good",
    "parameters": {"type": "object", "properties": {"good": {"type": "string"}}, "required": ["good"]},
}
MAX_CALLS = 4  # of the model


class Shop:
    splits = {"train": 400, "eval": 50}
    timeout_s = 60

    def reset(self, split, index, seed):
        number = 2 * index + (split == "eval")  # no evaluation task is a training task
        self.goods = [GOODS[number % 10], GOODS[number // 10 % 10]]
        self.prices = {good: 1 + (number * 7 + i * i) % 50 for i, good in enumerate(GOODS)}
        return f"Day {number}: what do {self.goods[0]} and {self.goods[1]} cost together?"

    def run(self, base_url, api_key, model):
        client = OpenAI(base_url=base_url, api_key=api_key)
        question = f"What do {self.goods[0]} and {self.goods[1]} cost together? Answer with the number."
        messages = [{"role": "user", "content": question}]
        for _ in range(MAX_CALLS):
            answer = client.chat.completions.create(
                model=model, messages=messages, tools=[{"type": "function", "function": TOOL}]
            )
            message = answer.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            for call in message.tool_calls or ():
                messages.append({"role": "tool", "tool_call_id": call.id, "content": self.price(call.function)})
            if not message.tool_calls:
                return message.content or ""
        return "no answer"

    def price(self, function):
        try:
            return str(self.prices[json.loads(function.arguments)["good"]])
        except (ValueError, KeyError, TypeError):
            return f"the tool is price, with a good out of: {', '.join(GOODS)}"

    def judge(self, output):
        right = output.strip() == str(sum(self.prices[good] for good in self.goods))
        digits = sum(letter.isdigit() for letter in output) / max(1, len(output))
        return (1.0 if right else 0.1 * digits), {"success": right}

    def demonstration(self, split, index):
        self.reset(split, index, 0)
        calls = [{"function": {"name": "price", "arguments": {"good": good}}} for good in self.goods]
        answer = str(sum(self.prices[good] for good in self.goods))
        return [{"role": "assistant", "content": "", "tool_calls": calls}, {"role": "assistant", "content": answer}]
