"""A run on a user's own rows and reward functions. `configure` is the one entry of commands and Python."""
