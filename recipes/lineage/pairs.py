"""Preference pairs for FrozenLake: in each state of a safe way, its next moves (chosen) and those of a player who
ignores the holes (rejected).

python recipes/lineage/pairs.py PAIRS.jsonl
"""

import json
import sys
from pathlib import Path

from services.env.environments.games.frozen_lake import FrozenLakeConfig, blind_action, frozen_lake
from shared import config
from volley.layout import PROJECT

MOVES = 2


def main() -> None:
    run = config.load([PROJECT / "configs" / "quickstart.yaml"]).config
    lake = frozen_lake(FrozenLakeConfig.model_validate(run.data.env_config))
    lines = []
    for index in range(lake.num_tasks("train")):
        game = lake.reset("train", index, 0).game
        while way := game.plan():
            board, chosen, (row, column) = game.render(), way[:MOVES], game.position
            rejected = []
            for _ in chosen:
                rejected.append(blind_action(lake.config.size, (row, column)))
                row, column = row + (rejected[-1] == "Down"), column + (rejected[-1] == "Right")
            if tuple(rejected) != tuple(chosen):
                pair = {"prompt": board, "chosen": " ".join(chosen), "rejected": " ".join(rejected)}
                lines.append(json.dumps(pair) + "\n")
            for action in chosen:
                game.act(action)
    Path(sys.argv[1]).write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
