"""From a placement to files: what each rank takes of every tensor (jobs), and how the bytes get there (worker)."""
