"""Rehearsal checkpoints: exact headers over sparse files, or a small model of the same kinds with random weights."""
