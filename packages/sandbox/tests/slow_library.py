"""A library that takes a second to import."""

import os
import time

time.sleep(1.0)


def process() -> int:
    return os.getpid()
