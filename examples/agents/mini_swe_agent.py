# /// script
# requires-python = ">=3.12"
# dependencies = ["mini-swe-agent>=2"]
# ///
"""A coding agent from the package index, as a command: it mends a function so that the tests pass.

volley env test examples/agents/mini_swe_agent.py
"""

import subprocess
from pathlib import Path

PROGRAM = """
import os
os.environ |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "MSWEA_COST_TRACKING": "ignore_errors"}
os.environ |= {"MSWEA_SILENT_STARTUP": "1"}
from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_textbased_model import LitellmTextbasedModel

END = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
model = LitellmTextbasedModel(model_name="openai/" + os.environ["VOLLEY_MODEL"])
agent = DefaultAgent(
    model,
    LocalEnvironment(timeout=10),
    system_template="Answer with one bash command: ```mswea_bash_command\\n...\\n``` To end: echo " + END,
    instance_template="{{task}}",
    step_limit=4,
)
print(agent.run(os.environ["VOLLEY_TASK"])["exit_status"])
"""
OPERATORS = {"+": "sum", "-": "difference", "*": "product", "//": "quotient"}


class Mend:
    splits = {"train": 400, "eval": 50}
    command = ["python", "/tmp/agent.py"]
    timeout_s = 120

    def reset(self, split, index, seed):
        number = 2 * index + (split == "eval")  # no evaluation task is a training task
        self.right, wrong = [list(OPERATORS)[(number + shift) % 4] for shift in (0, 1 + number // 4 % 3)]
        self.a, self.b = 2 + number // 12, 3
        Path("/tmp/agent.py").write_text(PROGRAM)
        Path("math_tools.py").write_text(f"def combine(a, b):\n    return a {wrong} b\n")
        return f"combine(a, b) in math_tools.py must return their {OPERATORS[self.right]}, like combine({self.a}, 3)."

    def judge(self, output):
        wanted = eval(f"self.a {self.right} self.b")
        test = f"from math_tools import combine; assert combine({self.a}, {self.b}) == {wanted}"
        passed = subprocess.run(["python", "-c", test], timeout=10, check=False).returncode == 0
        return float(passed), {"success": passed, "ended": output.strip()[-40:]}

    def demonstration(self, split, index):
        self.reset(split, index, 0)
        mend = f"sed -i 's|a .* b$|a {self.right} b|' math_tools.py"
        commands = ["cat math_tools.py", mend, "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"]
        return [{"role": "assistant", "content": f"```mswea_bash_command\n{one}\n```"} for one in commands]
