"""Reports of a run's services about themselves, and why a run does not advance."""
