"""`volley verify`: prove from a run's folder what it trained on. Read-only. Claims: docs/reliability.md."""
