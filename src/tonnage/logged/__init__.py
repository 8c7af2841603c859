"""What an engine logs as weights: the placement's parameters, and named lines for everything else in the figure."""
