"""The command that serves a plan: values, and one module of words per engine."""
