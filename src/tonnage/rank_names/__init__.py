"""EXL3 experts of all ranks in one checkpoint, under names that say whose they are."""
