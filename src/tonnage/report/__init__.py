"""Plans and inspections as tables for people and as versioned JSON for programs."""
