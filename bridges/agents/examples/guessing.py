"""An environment of verifiers 0.4: guess a number within four turns. Each turn is told whether to go higher."""

import verifiers.v1 as vf


class Data(vf.TaskData):
    answer: int


class Guess(vf.Task[Data]):
    @vf.reward(weight=1.0)
    async def found(self, trace: vf.Trace) -> float:
        return float(trace.last_reply.strip() == str(self.data.answer))

    @vf.reward(weight=0.5)
    async def quick(self, trace: vf.Trace) -> float:
        return 1.0 / max(1, trace.num_turns)


class Guesses(vf.Taskset[Guess]):
    def load(self):
        for n in range(20):
            yield Guess(Data(prompt=f"Guess {n}", system_prompt="Play.", answer=n % 7), self.config.task)


class GamesConfig(vf.EnvConfig):
    agent: vf.AgentConfig = vf.AgentConfig(harness={"id": "null"}, runtime={"type": "subprocess"})


class Games(vf.Env[GamesConfig]):
    async def run(self, task, agents):
        async with agents.agent.interaction(task) as talk:
            segment = await talk.turn()
            for _ in range(3):
                if segment.terminated or segment.last_reply == str(task.data.answer):
                    break
                said = segment.last_reply
                hint = "higher" if said.isdecimal() and int(said) < task.data.answer else "lower"
                segment = await talk.turn(hint)


__all__ = ["Games", "Guesses"]
