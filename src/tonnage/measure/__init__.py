"""What packages hold, read from their headers: bytes per rank and class of tensors, as a record to calculate with."""
