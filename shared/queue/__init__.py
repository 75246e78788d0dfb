"""The ticketed train-data queue, its server, and the connection to it."""
