"""Settings of a short run on own data, where none are given, and the lengths of its prompts."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from shared import config
from shared.config import LoadedConfig
from shared.errors import ConfigError
from shared.models.chat import ChatTokenizer
from shared.models.config import ModelConfig
from volley.choices import is_given
from volley_data.rows import RowTasks, longest
from volley_launch.planning import automatic
from volley_serving.templates.answers import AnswerRenderer
from volley_serving.templates.prompts import leaves_out

_MEASURED = 64
_STEPS, _GROUPS, _EVALUATED, _INTERVAL = 40, 8, 200, 10
_EVALUATION = "steps between evaluations on held-out tasks"
_EPISODES = 32
"""Held-out tasks of an environment, whose episodes may have many turns."""
_PROGRAMS = 4
"""Agents' programs at a time for each processor."""
_CONTEXT, _ANSWER = 2048, 256
"""Tokens of an episode and of one answer, where nothing is known about the texts."""

_PARAMETERS = {"type": "object", "properties": {"text": {"type": "string", "description": "1"}}}
ASKED = [{"role": "user", "content": "1"}]
TOOL = {"type": "function", "function": {"name": "find", "description": "1", "parameters": _PARAMETERS}}


def fitted(
    loaded: LoadedConfig, folder: Path, name: str, splits: Sequence[RowTasks], *, turns: int, tools: int
) -> LoadedConfig:
    """Choose what is left out, with its reason. Raises ConfigError if the prompts do not fit the model.

    Args:
        folder: of the model.
        name: of the run.
        splits: training tasks, and the held-out ones if there are any.
        tools: characters of the tools' schemas.
    """
    steps = loaded.config.trainer.max_steps if is_given(loaded, "trainer.max_steps") else _STEPS
    n_train, n_eval = len(splits[0].tasks), sum(len(part.tasks) for part in splits[1:])
    chosen: dict[str, tuple[Any, str]] = {
        "run.name": (name, "the name of the data"),
        "orchestrator.max_turns": (turns, "answers of an episode" if turns > 1 else "a prompt has one answer"),
        "trainer.max_steps": (_STEPS, "enough for a first run; to add steps later: volley up"),
        "trainer.groups_per_step": (min(_GROUPS, n_train), "prompts in a step"),
    }
    if n_eval:
        chosen["data.n_eval_tasks"] = (
            min(n_eval, _EVALUATED),
            f"{n_eval} task{'s are' if n_eval != 1 else ' is'} held out",
        )
        chosen["orchestrator.eval_every_n_steps"] = (min(_INTERVAL, steps), _EVALUATION)
    loaded = _chosen(loaded, chosen)
    return automatic.fit(loaded, ModelConfig.read(folder), _lengths(folder, splits, tools), packs=True)


def of_environment(loaded: LoadedConfig, folder: Path, name: str, *, is_agent: bool) -> LoadedConfig:
    """Choose what is left out for a run on an environment or agent, with its reason.

    Args:
        folder: of the model.
        name: of the run.
    """
    model = ModelConfig.read(folder)
    context, answer = min(_CONTEXT, model.max_position_embeddings), _ANSWER
    if is_given(loaded, "grpo_config.max_response_length"):
        answer = loaded.config.grpo_config.max_response_length
        context = min(max(context, 2 * answer), model.max_position_embeddings)
    if is_given(loaded, "rollout.engine.context_length"):
        context = loaded.config.rollout.engine.context_length
    steps = loaded.config.trainer.max_steps if is_given(loaded, "trainer.max_steps") else _STEPS
    unknown = "texts of the environment are not known before the run"
    chosen: dict[str, tuple[Any, str]] = {
        "run.name": (name, "the name of the environment"),
        "data.n_eval_tasks": (_EPISODES, "held-out episodes of an evaluation"),
        "trainer.max_steps": (_STEPS, "enough for a first run; to add steps later: volley up"),
        "trainer.groups_per_step": (_GROUPS, "tasks in a step"),
        "orchestrator.eval_every_n_steps": (min(_INTERVAL, steps), _EVALUATION),
        "rollout.engine.context_length": (context, unknown),
        "grpo_config.max_response_length": (min(answer, context // 2), unknown),
    }
    if is_agent:
        n = max(_PROGRAMS * (os.cpu_count() or 1), loaded.config.grpo_config.num_generations)
        chosen["orchestrator.max_concurrent_episodes"] = (n, "each agent is a program of its own")
    return automatic.fit(_chosen(loaded, chosen), model, packs=True)


def _chosen(loaded: LoadedConfig, chosen: Mapping[str, tuple[Any, str]]) -> LoadedConfig:
    """Set values for which none is given; `chosen` has each with its reason."""
    missing = {key: one for key, one in chosen.items() if not is_given(loaded, key)}
    changed = config.changed(loaded, {key: value for key, (value, _) in missing.items()})
    return replace(changed, choices={**loaded.choices, **{key: reason for key, (_, reason) in missing.items()}})


def describes_tools(folder: Path) -> bool:
    """True if a message has to describe tools, because the model's chat template leaves them out.

    Raises ConfigError if the template writes calls otherwise than the environment reads them.
    """
    tokenizer = ChatTokenizer(folder)
    if leaves_out(tokenizer, ASKED, [TOOL]):
        return True
    form = AnswerRenderer(tokenizer).call_form(ASKED, [TOOL])
    if form.end is None or "<tool_call>" not in form.start:
        shown = f"{form.start}…"
        raise ConfigError(
            f"{folder}: its chat template writes tool calls as {shown!r}; --tools reads <tool_call>{{…}}</tool_call>",
            "use a model that writes calls so, such as Qwen3, or write an environment: docs/environments.md",
        )
    return False


def _lengths(folder: Path, splits: Sequence[RowTasks], tools: int) -> automatic.PromptLengths:
    """Tokenize the prompts with most characters."""
    tokenizer = ChatTokenizer(folder)
    counts = [len(tokenizer.render_prompt(messages)) + tools // 3 for messages in longest(splits, _MEASURED)]
    return automatic.PromptLengths(sum(len(part.tasks) for part in splits), max(counts))
