"""What bytes a tensor takes in a storage format, and where it may be cut."""
