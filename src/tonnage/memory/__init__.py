"""What else a rank holds beside weights, and what a GPU supplies."""
