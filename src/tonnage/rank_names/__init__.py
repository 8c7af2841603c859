"""Prepared ranks under the names of other loaders: rank-sliced EXL3 experts, and vLLM's ``sharded_state``."""
