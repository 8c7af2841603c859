"""Two checkpoints or packages of one model: the error of every tensor, and what it does to the answers."""
