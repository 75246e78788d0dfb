# /// script
# requires-python = ">=3.12"
# dependencies = ["openai>=1.60"]
# ///
"""Adds two numbers. Change it, then: volley env test FILE"""

from openai import OpenAI


class Adder:
    splits = {"train": 1000, "eval": 100}  # number of tasks
    timeout_s = 60

    def reset(self, split, index, seed):  # begins a task; returns its text
        number = 2 * index + (split == "eval")  # no evaluation task is a training task
        self.question = f"{number // 47} + {number % 47} = "
        self.answer = str(number // 47 + number % 47)
        return self.question

    def run(self, base_url, api_key, model):  # the agent, in a process of its own
        client = OpenAI(base_url=base_url, api_key=api_key)
        answer = client.chat.completions.create(model=model, messages=[{"role": "user", "content": self.question}])
        return answer.choices[0].message.content

    def judge(self, output):  # after the program has ended: the reward
        return float(output.strip() == self.answer)

    def demonstration(self, split, index):  # optional: answers of a good model, for `volley env test`
        self.reset(split, index, 0)
        return [{"role": "assistant", "content": self.answer}]
