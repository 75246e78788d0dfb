"""An environment of Atropos, for a try without data: the score of an answer is its number of odd tokens."""

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataGroup


class ParityEnv(BaseEnv):
    name = "parity"

    @classmethod
    def config_init(cls):
        return BaseEnvConfig(tokenizer_name="set by the worker"), [APIServerConfig(model_name="set", base_url="x")]

    async def setup(self):
        self.asked = 0

    async def get_next_item(self):
        self.asked += 1
        return {"question": f"Question {self.asked}"}

    async def collect_trajectories(self, item):
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            messages = [{"role": "user", "content": item["question"]}]
            await managed.chat_completion(messages=messages, n=self.config.group_size, max_tokens=6, temperature=1.0)
            nodes = managed.get_state()["nodes"]
        scored = ScoredDataGroup(tokens=[], masks=[], scores=[], inference_logprobs=[])
        for node in reversed(nodes):
            odd = sum(token % 2 for token in node.masked_tokens if token != -100)
            scored["tokens"].append(node.tokens)
            scored["masks"].append(node.masked_tokens)
            scored["inference_logprobs"].append(node.logprobs)
            scored["scores"].append(float(odd))
        return scored, []

    async def evaluate(self, *args, **kwargs):
        pass
