"""The planner as a local web page, and the HTTP interface behind it: answers are the documents of ``--json``."""
