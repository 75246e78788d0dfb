# /// script
# requires-python = ">=3.12"
# dependencies = ["openai>=1.60"]
# ///
"""An agent that asks a sub-agent, and replaces its own history by a summary: one episode of several sequences.

volley env test examples/agents/sub_agent.py
"""

from openai import OpenAI

PAGES = 3


class Reader:
    splits = {"train": 400, "eval": 50}
    timeout_s = 60

    def reset(self, split, index, seed):
        number = 2 * index + (split == "eval")  # no evaluation task is a training task
        self.pages = [f"{(number * 13 + page * 29) % 90 + 10}" for page in range(PAGES)]
        self.number = number
        return f"Book {number}: which of {PAGES} pages has the largest number?"

    def run(self, base_url, api_key, model):
        client = OpenAI(base_url=base_url, api_key=api_key)

        def ask(messages):
            answer = client.chat.completions.create(model=model, messages=messages)
            return answer.choices[0].message.content or ""

        system = {"role": "system", "content": "Note the largest number."}
        history = [system]
        for page in self.pages:
            history.append({"role": "user", "content": f"Page: {page}"})
            history.append({"role": "assistant", "content": ask(history)})
        checked = ask([{"role": "user", "content": f"Largest of {' '.join(self.pages)}?"}])  # the sub-agent
        summary = ask([*history, {"role": "user", "content": "Summary?"}])
        compacted = [system, {"role": "user", "content": f"{summary} {checked} Largest?"}]  # the compaction
        return ask(compacted)

    def judge(self, output):
        right = output.strip() == max(self.pages)
        digits = sum(letter.isdigit() for letter in output) / max(1, len(output))
        return (1.0 if right else 0.1 * digits), {"success": right}

    def demonstration(self, split, index):
        self.reset(split, index, 0)
        says = [max(self.pages[: page + 1]) for page in range(PAGES)] + [max(self.pages)] * 3
        return [{"role": "assistant", "content": text} for text in says]
