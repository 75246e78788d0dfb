"""What the services of a run say about themselves, and why a run does not advance."""
