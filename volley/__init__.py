"""The `volley` command."""

import services as services  # refuses to start where PYTHONPATH hides a package of ours
