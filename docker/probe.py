"""Health check of a container: asks the service inside it and exits 0 if it answers 2xx.

    python -IS docker/probe.py PORT PATH

Only the standard library, without site packages: it runs every few seconds, beside the work.
"""

import http.client
import sys


def main(port: str, path: str) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", int(port), timeout=5)
    try:
        connection.request("GET", path)
        return 0 if connection.getresponse().status // 100 == 2 else 1
    except OSError:
        return 1


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
