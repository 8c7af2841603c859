"""What is in a checkpoint: headers, index, config and inventory. Only ``io`` and the sources open anything."""
