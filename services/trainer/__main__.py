"""`python -m services.trainer --config FILE.yaml [key.path=value …]`"""

from shared.boot import main

main("trainer")
