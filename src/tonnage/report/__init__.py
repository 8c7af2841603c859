"""What was planned, found and measured: tables and pages for people, versioned JSON for programs."""
