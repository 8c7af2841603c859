"""Serving what was planned: what is served, the engine's command and process, and how it ended."""
