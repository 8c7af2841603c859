"""What an engine's own start-up log says it holds, as integers, beside the plan's lines."""
