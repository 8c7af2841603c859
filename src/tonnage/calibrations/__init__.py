"""Records of what was fitted to measurements, each with its evidence; the shipped ones lie beside this module."""
