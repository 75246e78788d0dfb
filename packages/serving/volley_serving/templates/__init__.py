"""Conversations of clients and of demonstrations: their messages, and how a chat template writes an answer."""
