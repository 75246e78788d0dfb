"""Games with `protocol: grl` answer as GRL's own agents did (tests/fixtures/grl/make.py), turn by turn."""

import json
import sys
from pathlib import Path

import pytest

from services.env.environments.games.grl import read_words, write_words
from volley.layout import PROJECT
from volley_environments.games.blocksworld import BlocksTask, BlocksworldConfig, BlocksworldGame, blocksworld
from volley_environments.games.sokoban import SokobanConfig, SokobanGame, sokoban
from volley_environments.games.sokoban_level import Level, Position, Room
from volley_environments.games.tetris import TetrisConfig, TetrisGame, TetrisLevel, TetrisPiece, tetris

sys.path.insert(0, str(Path(__file__).parents[3] / "bridges" / "grl"))

from volley_grl.agents import read_agent

PLAYED = json.loads((PROJECT / "tests" / "fixtures" / "grl" / "played.json").read_text(encoding="utf-8"))
SHAPES = {  # GRL's cells (x, y) and ours, with the column of GRL's anchor
    ((0, 0),): (".", 0),
    ((0, 0), (0, -1)): ("I", 0),
    ((0, 0), (-1, 0)): ("-", 1),
    ((0, 0), (-1, 0), (0, -1), (-1, -1)): ("O", 1),
}


def settings(episode):
    limits = episode["limits"]
    return {
        "protocol": "grl",
        "think": episode["think"],
        "system_prompt": "S",
        "prompt": "P",
        "max_turns": limits["max_turns"],
        "max_actions_per_turn": limits["max_actions_per_turn"],
        "max_actions": limits["max_actions_all_turns"],
    }


def sokoban_of(episode):
    rows, config = episode["level"], SokobanConfig(**settings(episode))
    cells = {(r, c): rows[r][c] for r in range(len(rows)) for c in range(len(rows[0]))}

    def at(symbols):
        return frozenset(cell for cell, symbol in cells.items() if symbol in symbols)

    room = Room(len(rows), len(rows[0]), at("_OX√PS"), at("O√S"))
    (player,) = at("PS")
    level = Level(room, Position(player, at("X√")), 0)
    return sokoban(config), SokobanGame(level, level.start, config)


def tetris_of(episode):
    kind, pieces = episode["level"]
    config = TetrisConfig(**settings(episode), box_type=kind)
    made = []
    for x, cells in pieces:
        shape, left = SHAPES[tuple(map(tuple, cells))]
        made.append(TetrisPiece(shape, x - left))
    level = TetrisLevel(4, 4, tuple(made))
    return tetris(config), TetrisGame(level, level.first(), config)


def blocksworld_of(episode):
    config = BlocksworldConfig(**settings(episode), num_blocks=3)
    task = BlocksTask(*map(tuple, episode["level"]), 0)
    return blocksworld(config), BlocksworldGame(task.start, task.goal, config)


BUILD = {"sokoban": sokoban_of, "tetris": tetris_of, "blocksworld": blocksworld_of}


@pytest.mark.parametrize("game", BUILD)
def test_rewards_ends_and_texts_are_those_of_grl(game):
    episodes = [one for one in PLAYED if one["game"] == game]
    assert len(episodes) == 30
    for number, episode in enumerate(episodes):
        environment, rules = BUILD[game](episode)
        ours = environment.make_episode(rules, "unused")
        assert list(ours.opening) == episode["opening"]
        for n, turn in enumerate(episode["turns"]):
            result = ours.step({"role": "assistant", "content": turn["text"]})
            where = f"{game} {number}, turn {n + 1}: {turn['text']!r}"
            assert result.reward == pytest.approx(turn["reward"] + turn["penalty"]), where
            assert (result.over, result.info.success) == (turn["done"], turn["success"]), where
            if not turn["done"]:
                assert result.messages[0]["content"] == turn["next"], where


def test_all_kinds_of_turns_occur_in_what_grl_played():
    turns = [turn for episode in PLAYED for turn in episode["turns"]]
    assert len(turns) > 300
    assert sum(turn["success"] for turn in turns) >= 5
    assert {round(turn["penalty"], 6) for turn in turns} == {0.0, -0.1}
    assert min(turn["reward"] for turn in turns) <= -5


@pytest.mark.parametrize("think", [True, False])
@pytest.mark.parametrize("build", [sokoban, tetris, blocksworld])
def test_demonstrations_are_read_as_they_are_written(build, think):
    config = {sokoban: SokobanConfig, tetris: TetrisConfig, blocksworld: BlocksworldConfig}[build]
    shown = build(config(protocol="grl", think=think)).demonstration("train", 3)
    assert shown.success


def test_small_games_have_the_held_out_tasks_that_a_translation_asks_for():
    def read(kind, **env_config):
        section = {"agent_type": kind, "agent_config": {"max_turns": 11}, "env_config": env_config}
        section["agent_config"] |= {"max_actions_per_turn": 5, "max_actions_all_turns": 40}
        return dict(read_agent("a", section, lambda *_: None).settings)

    small = [blocksworld(BlocksworldConfig(**read("blocksworldAgent", num_blocks=n))) for n in (2, 3)]
    for width, height, kind in ((3, 3, 1), (3, 3, 2), (3, 3, 3), (3, 4, 1)):
        config = read("tetrisAgent", dim_x=width, dim_y=height, box_type=kind)
        small.append(tetris(TetrisConfig(**config)))
    for environment in small:
        n = environment.num_tasks("eval")
        assert n < 32
        assert len({environment.task("eval", i) for i in range(n)}) == n


def test_long_answers_take_linear_time():
    text = "</think><answer>" * 50_000 + "<think>" * 50_000
    assert read_words(text, 5, think=True) == []
    assert read_words(write_words(["Up", "Down"], think=True), 5, think=True) == ["Up", "Down"]
