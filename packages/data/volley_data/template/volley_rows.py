"""Environment whose tasks are rows of data, judged by reward functions.

It is packed with the rows and the functions, imports nothing of Volley, and runs in the sandbox. `volley_rows.json`
names the functions and the tools; `rows_SPLIT.jsonl` holds the rows, `rows_SPLIT.offsets` the position of each.
"""

import asyncio
import copy
import importlib
import inspect
import json
import math
import os
import struct
import time

import volley_tools

FOLDER = os.path.dirname(os.path.abspath(__file__))
OFFSET = struct.Struct("<Q")
SAMPLES = ("", "I do not know.", "<answer>42</answer>")
"""Answers with which the functions are checked on all rows."""
CHECK_S, SLOW_S = 20.0, 4.0
"""Seconds for the check of all rows, and for one call during it."""

with open(os.path.join(FOLDER, "volley_rows.json"), encoding="utf-8") as file:
    SPEC = json.load(file)


class Checked(Exception):
    """Result of the check of all rows, as JSON."""


class WrongReward(Exception):
    """A reward function failed or returned something that is no reward."""


class OwnRows:
    """The environment. Args: check: only call the functions on every row, and raise `Checked` with the result."""

    def __init__(self, check=False):
        self.splits = {split: n for split, n in SPEC["splits"].items() if n}
        self.rewards = [(one, getattr(importlib.import_module(one["module"]), one["name"])) for one in SPEC["rewards"]]
        self.toolbox = volley_tools.OwnTools(SPEC["tools"]) if SPEC["tools"] else None
        self.tools = self.toolbox.schemas() if self.toolbox else []
        if check:
            raise Checked(json.dumps(asyncio.run(self.check())))

    async def reset(self, split, index, seed):
        self.row = row_of(split, index)
        self.said = []
        more = self.toolbox.start(copy.deepcopy(self.row["columns"])) if self.toolbox else ""
        return [*self.row["messages"], *([{"role": "user", "content": more}] if more else [])]

    async def step(self, text):
        content, calls = volley_tools.split_calls(text) if self.toolbox else (text, [])
        if calls:
            self.said.append({"role": "assistant", "content": content, "tool_calls": calls})
            answers = [await self.toolbox.call(one["function"]) for one in calls]
            self.said += answers
            return answers, 0.0, False, False, {}
        self.said.append({"role": "assistant", "content": content})
        reward, parts, more = await self.score(self.row, content, self.said)
        return "", reward, True, False, {"reward_components": parts, **more}

    async def score(self, row, text, said):
        """Return the weighted sum of the functions, its parts, and `success`: every function gave at least 1."""
        parts, extra, full, told = {}, {}, True, None
        for spec, function in self.rewards:
            label, weight = spec["label"], spec["weight"]
            value = await call(spec, function, row, text, said)
            found, more = read(spec, value)
            for name, part in found.items():
                parts[f"{label}/{name}" if name else label] = weight * part
            extra.update(more)
            told = more.get("success", told)
            full = full and math.fsum(found.values()) >= 1.0 - 1e-9
        extra["success"] = full if told is None else bool(told)
        return math.fsum(parts.values()), parts, extra

    async def check(self):
        """Call every function on every row. Returns the number of rows checked, or the first mistake."""
        began, n = time.monotonic(), 0
        for split, size in self.splits.items():
            for index in range(size):
                row = row_of(split, index)
                text = SAMPLES[n % len(SAMPLES)]
                started = time.monotonic()
                try:
                    await self.score(row, text, [{"role": "assistant", "content": text}])
                except WrongReward as error:
                    return {"wrong": f"{error}, on {row['place']} with the answer {text!r}"}
                if (took := time.monotonic() - started) > SLOW_S:
                    return {"wrong": f"the reward took {took:.1f} s, on {row['place']}; a call may take {SLOW_S:g} s"}
                n += 1
                if time.monotonic() - began > CHECK_S:
                    return self.passed(n, began)
        return self.passed(n, began)

    def passed(self, n, began):
        """Result of a check without a mistake; `tools` is the number of characters of their schemas."""
        return {
            "rows": n,
            "seconds": time.monotonic() - began,
            "tools": len(json.dumps(self.tools)) if self.tools else 0,
        }


def row_of(split, index):
    """Read one row: its messages, its columns and its place in the user's file."""
    at = os.path.join(FOLDER, f"rows_{split}")
    with open(at + ".offsets", "rb") as file:
        file.seek(OFFSET.size * index)
        (start,) = OFFSET.unpack(file.read(OFFSET.size))
    with open(at + ".jsonl", "rb") as file:
        file.seek(start)
        return json.loads(file.readline())


async def call(spec, function, row, text, said):
    """Call one reward function on its own copy of the row. Raises WrongReward."""
    columns = copy.deepcopy(row["columns"])
    is_chat = not isinstance(columns[row["prompt"]], str)
    try:
        if spec["style"] == "verl":
            value = function(**verl_arguments(spec, columns, text))
        elif spec["style"] == "trl":
            answer = copy.deepcopy(said) if is_chat or len(said) > 1 else text
            prompt = columns[row["prompt"]] if isinstance(columns[row["prompt"]], str) else row["messages"]
            given = {name: [value] for name, value in columns.items() if name != "prompt"}
            given.update(prompts=[copy.deepcopy(prompt)], completions=[answer])
            names = spec["takes"]
            value = function(**(given if names is None else {name: given[name] for name in names if name in given}))
        else:
            value = function(text, columns)
        if inspect.isawaitable(value):
            value = await value
    except Exception as error:
        where = error.__traceback__
        while where.tb_next is not None and where.tb_frame.f_code.co_filename == __file__:
            where = where.tb_next
        line = f" (line {where.tb_lineno})" if where.tb_frame.f_code.co_filename != __file__ else ""
        raise WrongReward(f"{spec['shown']} raised {type(error).__name__}: {error}{line}") from error
    if spec["style"] != "trl":
        return value
    if not isinstance(value, (list, tuple)) and not hasattr(value, "tolist"):
        raise WrongReward(f"{spec['shown']} returned {short(value)}; it must return a list with one number per answer")
    values = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(values, (list, tuple)) or len(values) != 1:
        n = len(values) if isinstance(values, (list, tuple)) else "no"
        raise WrongReward(f"{spec['shown']} returned {n} values for 1 answer; it must return one number per answer")
    return values[0]


def verl_arguments(spec, columns, text):
    """Arguments of verl's compute_score: ground_truth is a column, or stands in the column reward_model."""
    nested = columns.get("reward_model")
    truth = columns.get("ground_truth", nested.get("ground_truth") if isinstance(nested, dict) else None)
    given = {
        "data_source": columns.get("data_source", ""),
        "solution_str": text,
        "ground_truth": truth,
        "extra_info": columns.get("extra_info", columns),
    }
    return {name: value for name, value in given.items() if spec["takes"] is None or name in spec["takes"]}


def read(spec, value):
    """Return the parts of a reward, and what else it says. Raises WrongReward for anything but finite numbers."""
    if value is None and spec["style"] == "trl":
        return {"": 0.0}, {}  # the function does not apply to this row
    if not isinstance(value, dict):
        return {"": number(spec, value)}, {}
    if not value:
        raise WrongReward(f"{spec['shown']} returned an empty dict; its values must be the parts of the reward")
    more = {"success": bool(value["success"])} if "success" in value else {}
    if (total := next((name for name in ("score", "reward") if name in value), None)) is not None:
        return {"": number(spec, value[total])}, more
    return {str(name): number(spec, part) for name, part in value.items() if name != "success"}, more


def number(spec, value):
    """Raises WrongReward."""
    if hasattr(value, "item") and not isinstance(value, (bool, int, float)):
        value = value.item()
    if not isinstance(value, (bool, int, float)):
        raise WrongReward(f"{spec['shown']} returned {short(value)}; it must return a number")
    if not math.isfinite(value):
        raise WrongReward(f"{spec['shown']} returned {float(value)}; it must return a finite number")
    return float(value)


def short(value):
    text = repr(value)
    return f"{'the text ' if isinstance(value, str) else ''}{text if len(text) <= 60 else text[:57] + '...'}"
