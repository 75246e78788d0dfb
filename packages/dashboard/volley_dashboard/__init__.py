"""Views of runs: a page in the browser, episodes token by token, plots, and reports to experiment trackers."""
