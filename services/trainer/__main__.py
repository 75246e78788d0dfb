"""`python -m services.trainer --config FILE.yaml [key.path=value …]`"""

from shared.process.boot import main

main("trainer", requires="tunix")
