"""A server that speaks OpenEnv's frames, as a process of its own that tests can kill: python -m … PORT [MODE].

The environment: say the number that was shown. It is drawn from the seed. MODE `stubborn` ignores seeds, `full` takes
no session, `slow` says that it has a step and never answers it, `odd` answers with other things than frames, `cut`
ends every observation with half of a surrogate pair.
"""

import asyncio
import itertools
import json
import random
import sys

import orjson
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed

_ONE = itertools.count()


class Guess:
    def __init__(self, mode: str) -> None:
        self.mode, self.number, self.steps = mode, 0, 0

    def reset(self, seed=None, **_):
        self.number = random.Random(next(_ONE) if self.mode == "stubborn" else seed).randrange(10**9)
        return {"observation": {"text": f"Say {self.number}.", "size": [1, 2]}, "reward": None, "done": False}

    def step(self, action):
        self.steps += 1
        if set(action) != {"message"} or not isinstance(action["message"], str):
            return {"type": "error", "data": {"message": "message: field required", "code": "VALIDATION_ERROR"}}
        if action["message"] == "crash":
            return {"type": "error", "data": {"message": "it broke", "code": "EXECUTION_ERROR"}}
        right = action["message"] == str(self.number)
        data = {"observation": {"text": "yes" if right else "no"}, "reward": float(right), "done": right}
        return {"type": "observation", "data": {**data, "metadata": {"steps": self.steps}}}


async def session(connection: ServerConnection, mode: str) -> None:
    guess = Guess(mode)
    if mode == "full":
        full = {"type": "error", "data": {"message": "0 of 0 sessions are free", "code": "CAPACITY_REACHED"}}
        await connection.send(orjson.dumps(full).decode())
        return
    try:
        while True:
            frame = orjson.loads(await connection.recv())
            if frame["type"] == "close":
                return
            if mode == "slow" and frame["type"] == "step":
                say("step")
                await asyncio.sleep(600)
            if mode == "odd":
                answer = [1, 2, 3]
            elif frame["type"] == "reset":
                answer = {"type": "observation", "data": guess.reset(**frame["data"])}
            else:
                answer = guess.step(frame["data"])
            text = json.dumps(answer)
            await connection.send(text.replace('."', r' \ud83d."') if mode == "cut" else text)
    except ConnectionClosed:
        return


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


async def main(port: int, mode: str) -> None:
    async with serve(lambda connection: session(connection, mode), "127.0.0.1", port) as server:
        say("ready")
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else ""))
