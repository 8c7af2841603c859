"""Model families as data: one TOML per family, and the small language its shapes are written in."""
