"""`volley train` and `volley node` with a simulated engine and a learner of a few kB."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from tools.chaos.arena import SIMULATED
from volley.commands import train
from volley.local.stack import StackSeams
from volley.program import run_program
from volley_launch import node

SEAMS = StackSeams(SIMULATED)


def main() -> int:
    if sys.argv[1] == "train":
        return train.main([sys.argv[3]], [], SEAMS)
    parser = argparse.ArgumentParser()
    node.add(parser)
    given = parser.parse_args(sys.argv[2:])
    addresses = re.split(",", given.hosts)
    return node.main(Path(given.folder), given.overrides, addresses, given.index, given.first_port, seams=SEAMS)


if __name__ == "__main__":
    run_program(main)
