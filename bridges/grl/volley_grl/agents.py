"""Translate GRL's agents (`configs/agents.yaml`) to environments and their settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from volley_grl.errors import ConversionError

_MOVES = {1: "Up", 2: "Down", 3: "Left", 4: "Right"}
_DROPS = {0: "Left", 1: "Right", 2: "Down"}
_SOKOBAN_SYMBOLS = {0: "#", 1: "_", 2: "O", 3: "√", 4: "X", 5: "P", 6: "S"}
_TETRIS_SYMBOLS = {0: "_", 1: "#", 2: "X"}
_FEW_BLOCKS = {2: 2, 3: 24}
_FEW_PIECES = {(3, 3, 1): 6, (3, 3, 2): 17, (3, 3, 3): 19, (3, 4, 1): 11}
"""Held-out tasks of small games: by the number of blocks, and by width, height and kind of the pieces."""
_LIMIT = "episodes end by max_turns and max_actions_all_turns, which come earlier"

Note = Callable[[str, str], None]


@dataclass(frozen=True, slots=True)
class Agent:
    """Environment of an agent: `kind`, `settings` of it, keys of `data`, and its largest number of turns."""

    kind: str
    settings: Mapping[str, Any]
    max_turns: int
    data: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass
class AgentKeys:
    """Keys of an agent that are still to be translated."""

    name: str
    left: dict[str, Any]
    note: Note

    def take(self, key: str, default: Any = None) -> Any:
        value = self.left.pop(key, None)
        return default if value is None else value

    def number(self, key: str, default: int) -> int:
        """Take an integer above 0. Raises ConversionError."""
        value = self.take(key, default)
        if type(value) is not int or value < 1:
            raise self.refused(key, value, "it is not a number above 0", "give one")
        return value

    def text(self, key: str) -> str:
        """Take a text. Raises ConversionError."""
        value = self.take(key, "")
        if not isinstance(value, str):
            raise self.refused(key, value, "it is not a text", "write it in quotes")
        return value

    def only(self, key: str, accepted: Any, hint: str) -> None:
        """Refuse any other value of a key than the accepted one. Raises ConversionError."""
        if (value := self.take(key, accepted)) != accepted:
            raise self.refused(key, value, f"only {accepted} has a counterpart", hint)

    def ignore(self, key: str, reason: str) -> None:
        if self.take(key) is not None:
            self.note(f"{self.name}.{key}", reason)

    def refused(self, key: str, value: Any, reason: str, hint: str) -> ConversionError:
        return ConversionError(f"{self.name}.{key}={value} of GRL's configuration: {reason}", hint)


def read_agent(name: str, section: Any, note: Note) -> Agent:
    """Translate the section of one agent. Raises ConversionError naming the key."""
    if not isinstance(section, Mapping):
        raise ConversionError(
            f"GRL's configuration names the agent {name}, but has no section {name}", "add agents.yaml"
        )
    kind = str(section["agent_type"])
    if odd := [part for part, inner in section.items() if part != "agent_type" and not isinstance(inner, Mapping)]:
        raise ConversionError(
            f"{name}.{odd[0]} of GRL's configuration is not a section", "docs/grl.md lists GRL's keys"
        )
    if kind in _REFUSED:
        reason, hint = _REFUSED[kind]
        raise ConversionError(f"{name}.agent_type={kind} of GRL's configuration: {reason}", hint)
    if kind not in _AGENTS:
        raise ConversionError(f"{name}.agent_type={kind} is not an agent of GRL", f"it has: {', '.join(_AGENTS)}")
    left = {
        f"{part}.{key}": value
        for part, inner in section.items()
        if part != "agent_type"
        for key, value in inner.items()
    }
    keys = AgentKeys(name, left, note)
    agent = _AGENTS[kind](keys)
    if unknown := [key for key, value in keys.left.items() if value is not None]:
        raise ConversionError(
            f"unknown key {name}.{min(unknown)} in GRL's configuration", "docs/grl.md lists GRL's keys"
        )
    return agent


def _sokoban(keys: AgentKeys) -> Agent:
    settings: dict[str, Any] = {
        **_conversation(keys, _MOVES),
        "dim_room": keys.take("env_config.dim_room", [6, 6]),
        "num_boxes": keys.take("env_config.num_boxes", 1),
        "min_solution": 1,
    }
    keys.only("env_config.grid_lookup", _SOKOBAN_SYMBOLS, "these are the symbols of sokoban")
    keys.only("env_config.render_mode", "text", "a model reads the room as text")
    keys.ignore("env_config.search_depth", "levels come with a proof that the budget of actions suffices")
    keys.ignore("env_config.max_steps", _LIMIT)
    return Agent("sokoban", settings, settings["max_turns"])


def _tetris(keys: AgentKeys) -> Agent:
    settings: dict[str, Any] = {
        **_conversation(keys, _DROPS),
        "dim_x": keys.number("env_config.dim_x", 4),
        "dim_y": keys.number("env_config.dim_y", 4),
        "box_type": keys.number("env_config.box_type", 1),
    }
    if (few := _FEW_PIECES.get((settings["dim_x"], settings["dim_y"], settings["box_type"]))) is not None:
        settings["eval_tasks"] = few
    keys.only("env_config.grid_lookup", _TETRIS_SYMBOLS, "these are the symbols of tetris")
    keys.only("env_config.render_mode", "text", "a model reads the box as text")
    keys.ignore("env_config.max_steps", _LIMIT)
    return Agent("tetris", settings, settings["max_turns"])


def _blocksworld(keys: AgentKeys) -> Agent:
    views = {"text": "text", "1d": "1d", "2d_compact": "2d"}
    view = keys.text("env_config.render_mode") or "text"
    if view not in views:
        hint = f"give one of {', '.join(views)}"
        raise keys.refused("env_config.render_mode", view, "blocksworld has no such drawing", hint)
    settings: dict[str, Any] = {
        **_conversation(keys, None),
        "num_blocks": keys.number("env_config.num_blocks", 3),
        "render": views[view],
        "min_solution": 1,
    }
    if (few := _FEW_BLOCKS.get(settings["num_blocks"])) is not None:
        settings["eval_tasks"] = few
    keys.ignore("env_config.max_steps", _LIMIT)
    return Agent("blocksworld", settings, settings["max_turns"])


def _conversation(keys: AgentKeys, actions: Mapping[int, str] | None) -> dict[str, Any]:
    """Settings of a game's conversation."""
    keys.only("agent_config.action_separator", "||", "games separate actions by ||")
    keys.only("agent_config.use_think_answer_token", True, "an answer may begin with its tag, or after it")
    keys.ignore("agent_config.max_tokens", "write the number into env_config.turn_prompt, if a model should read it")
    prompt, vocabulary = keys.text("agent_config.prompt"), keys.take("env_config.grid_vocab", {})
    if not isinstance(vocabulary, Mapping):
        raise keys.refused("env_config.grid_vocab", vocabulary, "it is not a mapping", "map symbols to words")
    most = keys.number("agent_config.max_actions_all_turns", 1)
    if actions:
        keys.only("env_config.action_lookup", dict(actions), "these are the actions of the game")
    if prompt and vocabulary:
        prompt += "\nSymbols: " + ", ".join(f"{symbol} {meaning}" for symbol, meaning in vocabulary.items()) + "."
    if prompt and actions:
        prompt += f"\nActions: {', '.join(actions.values())}; at most {most} in all, separated by ||."
    return {
        "protocol": "grl",
        "think": keys.take("agent_config.enable_think", True),
        "system_prompt": keys.text("agent_config.system_prompt"),
        "prompt": prompt,
        "max_turns": keys.number("agent_config.max_turns", 1),
        "max_actions_per_turn": keys.number("agent_config.max_actions_per_turn", 1),
        "max_actions": most,
        "format_penalty": keys.take("agent_config.format_penalty", -0.1),
    }


def _gsm8k(keys: AgentKeys) -> Agent:
    """GRL's environment takes the last integer of a text, rewards 10 and -0.1, and lets a wrong answer be corrected."""
    turns = keys.number("agent_config.max_turns", 1)
    settings: dict[str, Any] = {
        "system_prompt": keys.text("agent_config.system_prompt"),
        "prompt": keys.text("agent_config.prompt"),
        "attempts": min(turns, keys.number("agent_config.max_actions_all_turns", turns)),
        "extraction": "flexible",
        "correct_reward": 10.0,
        "wrong_reward": -0.1,
        "max_turns": turns,
    }
    _single_answers(keys)
    keys.ignore("agent_config.format_penalty", "an answer without a number is wrong")
    keys.ignore("agent_config.use_custom_prompt", "the prompt is the agent's")
    keys.ignore("env_config.dataset_path", "data.train and data.eval name the files: set them in the section volley")
    keys.ignore("env_config.split", "the split train is trained on, the split eval is measured")
    return Agent("gsm8k", settings, turns)


def _bird(keys: AgentKeys) -> Agent:
    turns = keys.number("agent_config.max_turns", 1)
    settings: dict[str, Any] = {
        "system_prompt": keys.text("agent_config.system_prompt"),
        "prompt": keys.text("agent_config.prompt"),
        "databases": keys.take("env_config.db_root", "datasets/bird_train/train/train_databases"),
        "max_turns": min(turns, keys.number("env_config.max_steps", 5)),
        "format_penalty": keys.take("agent_config.format_penalty", -0.1),
        "retry_factor": 0.5,
    }
    _single_answers(keys)
    path = keys.text("env_config.dataset_path")
    keys.ignore("env_config.step_timeout_seconds", "queries are bounded in SQLite's instructions")
    return Agent("text_to_sql", settings, turns, {"train": path, "eval": path} if path else {})


def _single_answers(keys: AgentKeys) -> None:
    """Ignore keys that mean nothing for one answer a turn."""
    keys.ignore("agent_config.enable_think", "an answer is found with and without a thought before it")
    keys.ignore("agent_config.use_think_answer_token", "an answer is found with and without tags")
    keys.ignore("agent_config.max_tokens", "write the number into the prompt, if a model should read it")
    keys.ignore("agent_config.max_actions_per_turn", "a turn gives one answer")
    keys.ignore("agent_config.max_actions_all_turns", "a turn gives one answer")
    keys.ignore("agent_config.action_separator", "a turn gives one answer")
    keys.ignore("env_config.max_steps", _LIMIT)


_AGENTS: Mapping[str, Callable[[AgentKeys], Agent]] = {
    "sokobanAgent": _sokoban,
    "tetrisAgent": _tetris,
    "blocksworldAgent": _blocksworld,
    "gsm8kAgent": _gsm8k,
    "birdAgent": _bird,
}
_MATH = (
    "its data set is on the Hugging Face hub",
    "write it as JSON lines with problem and answer, and set volley.data: {env: math, train: …, eval: …}",
)
_REFUSED: Mapping[str, tuple[str, str]] = {
    "webshopAgent": (
        "webshop_minimal is in no package index, and needs Java, pyserini and a model of spaCy",
        "submit it as an environment of your own: docs/environments.md",
    ),
    **dict.fromkeys(("aime24Agent", "aime25Agent", "amc23Agent", "math500Agent", "minervamathAgent"), _MATH),
}
