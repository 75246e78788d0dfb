"""`make chaos`: real processes, seeded faults, and the proof that nothing came of them."""
