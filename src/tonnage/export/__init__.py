"""A prepared directory becomes a package: manifest, plan, provenance, signature; and a package is verified."""
