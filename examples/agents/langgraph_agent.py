# /// script
# requires-python = ">=3.12"
# dependencies = ["langgraph>=0.4", "langchain-openai>=0.3"]
# ///
"""A LangGraph agent with two tools: it moves a pen on a grid, and says where the pen is.

volley env test examples/agents/langgraph_agent.py
"""

from contextlib import suppress

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.errors import GraphRecursionError
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

STEPS = {"left": (-1, 0), "right": (1, 0), "up": (0, 1), "down": (0, -1)}


class Pen:
    splits = {"train": 400, "eval": 50}
    timeout_s = 60

    def reset(self, split, index, seed):
        number = 2 * index + (split == "eval")  # no evaluation task is a training task
        self.goal = number % 5 - 2, number // 5 % 5 - 2
        self.at = 0, 0
        self.text = f"Task {number}: move the pen from (0, 0) to {self.goal}."
        return self.text

    def run(self, base_url, api_key, model):
        @tool
        def move(direction: str, steps: int) -> str:
            """Move the pen left, right, up or down."""
            x, y = STEPS.get(direction, (0, 0))
            self.at = self.at[0] + x * steps, self.at[1] + y * steps
            return "moved" if direction in STEPS else f"a direction is one of {', '.join(STEPS)}"

        @tool
        def where() -> str:
            """Position of the pen"""
            return str(self.at)

        tools = [move, where]
        chat = ChatOpenAI(base_url=base_url, api_key=api_key, model=model).bind_tools(tools)
        graph = StateGraph(MessagesState)
        graph.add_node("model", lambda state: {"messages": [chat.invoke(state["messages"])]})
        graph.add_node("tools", ToolNode(tools))
        graph.add_edge(START, "model")
        graph.add_conditional_edges("model", tools_condition)
        graph.add_edge("tools", "model")
        with suppress(GraphRecursionError):  # the model called tools until the end: judged like any other
            graph.compile().invoke({"messages": [("user", self.text)]}, {"recursion_limit": 8})
        return {"at": self.at}

    def judge(self, output):
        x, y = output["at"]
        away = abs(x - self.goal[0]) + abs(y - self.goal[1])
        return 1.0 / (1 + away), {"success": away == 0}

    def demonstration(self, split, index):
        self.reset(split, index, 0)
        x, y = self.goal
        moves = [("right" if x > 0 else "left", abs(x)), ("up" if y > 0 else "down", abs(y))]
        calls = [{"function": {"name": "move", "arguments": {"direction": d, "steps": n}}} for d, n in moves]
        return [
            {"role": "assistant", "content": "", "tool_calls": calls},
            {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "where", "arguments": {}}}]},
            {"role": "assistant", "content": f"The pen is at {self.goal}."},
        ]
