"""`volley verify`: proves from a run's folder what it trained on. Reads only; see docs/reliability.md for what is
proven.
"""
