"""Environment whose tasks are rows of data, judged by reward functions.

It is packed with the rows and the functions, imports nothing of Volley, and runs in the sandbox. `volley_rows.json`
names the functions and the tools; `rows_SPLIT.jsonl` holds the rows, `rows_SPLIT.offsets` the position of each.
"""

import asyncio
import contextlib
import copy
import importlib
import inspect
import json
import math
import os
import signal
import struct
import time

import volley_tools

FOLDER = os.path.dirname(os.path.abspath(__file__))
OFFSET = struct.Struct("<Q")
SAMPLES = ("", "I do not know.", "<answer>42</answer>")
"""Answers with which the functions are checked on all rows."""
CHECK_S, SLOW_S = 20.0, 4.0
"""Seconds for the check of all rows, and for one call of a function during it."""
COMPARED, QUICK_S = 4, 0.5
"""Rows on which answers are also judged together, and seconds of a reward that is quick enough for that."""

with open(os.path.join(FOLDER, "volley_rows.json"), encoding="utf-8") as file:
    SPEC = json.load(file)


class Checked(Exception):
    """Result of the check of all rows, as JSON."""


class WrongReward(Exception):
    """A reward function failed or returned something that is no reward."""


class TooSlow(BaseException):
    """A function took longer than the check allows. Not an Exception, so that `except Exception` does not catch it."""


class OwnRows:
    """The environment. Args: check: only call the functions on every row, and raise `Checked` with the result."""

    limit_s, at = None, ""
    """Limit of a call in seconds, and the row and answer that are checked."""

    def __init__(self, check=False):
        self.splits = {split: n for split, n in SPEC["splits"].items() if n}
        self.rewards = [(one, getattr(importlib.import_module(one["module"]), one["name"])) for one in SPEC["rewards"]]
        self.toolbox = volley_tools.OwnTools(SPEC["tools"]) if SPEC["tools"] else None
        self.tools = self.toolbox.schemas() if self.toolbox else []
        if check:
            raise Checked(json.dumps(self.checked()))

    async def reset(self, split, index, seed):
        self.row, self.said, self.turn = row_of(split, index), [], 0
        if self.toolbox is None:
            return self.row["messages"]
        *before, last = self.row["messages"]
        if more := self.begin(self.row):
            last = {**last, "content": last["content"] + more}
        return self.toolbox.opening([*before, last])

    def begin(self, row):
        """Start the tools' object for a row. Returns its text. Raises WrongReward."""
        shown = SPEC["tools"]["shown"]
        try:
            with limited(f"reset of {shown}", self.limit_s):
                return self.toolbox.start(copy.deepcopy(row["columns"]))
        except (Exception, SystemExit) as error:
            raise WrongReward(f"reset of {shown} raised {type(error).__name__}: {error}{line_of(error)}") from error

    async def step(self, text):
        self.turn += 1
        content, calls = volley_tools.split_calls(text) if self.toolbox else (text, [])
        self.said.append({"role": "assistant", "content": content, **({"tool_calls": calls} if calls else {})})
        if calls and self.turn < self.toolbox.turns:
            answers = [await self.toolbox.call(one["function"]) for one in calls]
            self.said += [message for message, _ in answers]
            fault = {} if all(ok for _, ok in answers) else {"error": "tool"}
            return [message for message, _ in answers], 0.0, False, False, {"reward_components": {}, **fault}
        try:
            reward, parts, more = await self.score(self.row, content, self.said)
        except WrongReward as error:
            raise WrongReward(f"{error}, on {self.row['place']}") from error
        return "", reward, not calls, bool(calls), {"reward_components": parts, **more}

    async def score(self, row, text, said):
        """Return the weighted sum of the functions, its parts, and `success`: every function gave at least 1."""
        parts, extra, full, told = {}, {}, True, None
        for spec, function in self.rewards:
            label, weight = spec["label"], spec["weight"]
            with limited(spec["shown"], self.limit_s):
                (value,) = await call(spec, function, row, [(text, said)], self.toolbox)
            found, more = read(spec, value)
            for name, part in found.items():
                parts[f"{label}/{name}" if name else label] = weight * part
            extra.update(more)
            told = more.get("success", told)
            full = full and math.fsum(found.values()) >= 1.0 - 1e-9
        extra["success"] = full if told is None else bool(told)
        return math.fsum(parts.values()), parts, extra

    def checked(self):
        """Check all rows. Returns the result, or the first mistake."""
        self.limit_s = SLOW_S
        try:
            return asyncio.run(self.check())
        except (WrongReward, TooSlow) as error:
            return {"wrong": f"{error}, on {self.at}"}

    async def check(self):
        """Call every function on every row, for at most CHECK_S seconds. Returns `passed`."""
        began, n = time.monotonic(), 0
        for split, size in self.splits.items():
            for index in range(size):
                row, text = row_of(split, index), SAMPLES[n % len(SAMPLES)]
                self.at = f"{row['place']} with the made-up answer {text!r}"
                started = time.monotonic()
                if self.toolbox:
                    self.begin(row)
                await self.score(row, *sample(text))
                if n < COMPARED and time.monotonic() - started < QUICK_S:
                    await self.check_alone(row)
                n += 1
                if time.monotonic() - began > CHECK_S:
                    return self.passed(n, began)
        return self.passed(n, began)

    async def check_alone(self, row):
        """Raise WrongReward if a function of TRL's signature gives an answer another reward beside other answers."""
        group = [sample(text) for text in (*SAMPLES, SAMPLES[0])]
        for spec, function in self.rewards:
            if spec["style"] != "trl":
                continue
            alone = await self.alone(spec, function, row, group)
            self.at = f"{row['place']} with {len(group)} answers at once"
            try:
                with limited(spec["shown"], self.limit_s):
                    beside = await call(spec, function, row, group, self.toolbox)
            except WrongReward:  # written for one answer
                continue
            if not same(spec, alone, beside) and same(spec, alone, await self.alone(spec, function, row, group)):
                raise WrongReward(
                    f"{spec['shown']} compares answers: it returned {short(alone)} for {len(group)} answers one by one,"
                    f" and {short(beside)} for all of them; an episode is graded alone"
                )

    async def alone(self, spec, function, row, group):
        found = []
        for one in group:
            self.at = f"{row['place']} with the made-up answer {one[0]!r}"
            with limited(spec["shown"], self.limit_s):
                found.append((await call(spec, function, row, [one], self.toolbox))[0])
        return found

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


def sample(text):
    """An answer without tool calls, as text and as messages."""
    return text, [{"role": "assistant", "content": text}]


@contextlib.contextmanager
def limited(shown, limit_s):
    """Raise TooSlow in the block after `limit_s` seconds; None is no limit."""

    def stop(*_):
        raise TooSlow(f"{shown} took longer than {limit_s:g} s")

    if limit_s is not None:
        signal.signal(signal.SIGALRM, stop)
        signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        yield
    finally:
        if limit_s is not None:
            signal.setitimer(signal.ITIMER_REAL, 0)


async def call(spec, function, row, answers, toolbox):
    """Return one reward for each of the row's answers, pairs of text and messages. Raises WrongReward.

    Functions get copies of the row. That of TRL's signature is called once, others once for each answer.
    """
    try:
        if spec["style"] == "trl":
            return values_of(
                spec, await function_value(function, **trl_arguments(spec, row, answers, toolbox)), len(answers)
            )
        found = []
        for text, _ in answers:
            columns = copy.deepcopy(row["columns"])
            if spec["style"] == "verl":
                found.append(await function_value(function, **verl_arguments(spec, columns, text)))
            else:
                found.append(await function_value(function, text, columns))
        return found
    except WrongReward:
        raise
    except (Exception, SystemExit) as error:
        has = f"; the row has {', '.join(row['columns'])}" if isinstance(error, KeyError) else ""
        raise WrongReward(f"{spec['shown']} raised {type(error).__name__}: {error}{line_of(error)}{has}") from error


async def function_value(function, *arguments, **named):
    value = function(*arguments, **named)
    return await value if inspect.isawaitable(value) else value


def values_of(spec, value, n):
    """The list that TRL's signature returns. Raises WrongReward."""
    if not isinstance(value, (list, tuple)) and not hasattr(value, "tolist"):
        raise WrongReward(f"{spec['shown']} returned {short(value)}; it must return a list with one number per answer")
    values = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(values, (list, tuple)) or len(values) != n:
        known = len(values) if isinstance(values, (list, tuple)) else "no"
        answers = f"{n} answer{'s' * (n != 1)}"
        raise WrongReward(
            f"{spec['shown']} returned {known} values for {answers}; it must return one number per answer"
        )
    return list(values)


def line_of(error):
    """Line of the user's file at which an error was raised, in brackets; empty if it is none."""
    where = error.__traceback__
    ours = (__file__, volley_tools.__file__)
    while where.tb_next is not None and where.tb_frame.f_code.co_filename in ours:
        where = where.tb_next
    return f" (line {where.tb_lineno})" if where.tb_frame.f_code.co_filename not in ours else ""


def trl_arguments(spec, row, answers, toolbox):
    """Arguments of TRL's signature: answers are messages if the prompt is of messages, or if there are tools."""
    columns, n = row["columns"], len(answers)
    is_chat = not isinstance(columns[row["prompt"]], str)
    given = {name: [copy.deepcopy(value) for _ in range(n)] for name, value in columns.items() if name != "prompt"}
    given["prompts"] = [copy.deepcopy(row["messages"]) if is_chat else columns[row["prompt"]] for _ in range(n)]
    given["completions"] = [copy.deepcopy(said) if is_chat or toolbox else text for text, said in answers]
    if toolbox and toolbox.owner is not None:
        given["environments"] = [toolbox.owner] * n
    given = {**dict.fromkeys(spec["needs"], [None] * n), **given}  # columns that only other rows have
    return given if spec["takes"] is None else {name: given[name] for name in spec["takes"] if name in given}


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


def same(spec, values, others):
    """True if rewards are equal, but for rounding."""
    pairs = [[read(spec, value)[0] for value in pair] for pair in zip(values, others, strict=True)]
    return all(math.isclose(math.fsum(one.values()), math.fsum(other.values()), abs_tol=1e-6) for one, other in pairs)


def number(spec, value):
    """Raises WrongReward."""
    if hasattr(value, "item") and not isinstance(value, (bool, int, float)):
        value = value.item()
    if not isinstance(value, (bool, int, float)):
        raise WrongReward(f"{spec['shown']} returned {short(value)}; it must return a number")
    try:
        found = float(value)
    except OverflowError:
        found = math.inf
    if not math.isfinite(found):
        raise WrongReward(f"{spec['shown']} returned {found}; it must return a finite number")
    return found


def short(value):
    text = repr(value)
    return f"{'the text ' if isinstance(value, str) else ''}{text if len(text) <= 60 else text[:57] + '...'}"
