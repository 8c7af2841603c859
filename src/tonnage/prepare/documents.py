"""Names of the documents beside the weights: what a preparation and a package say of themselves."""

from __future__ import annotations

SUMMARY = "prepare.json"
"""Written last: where it is, the preparation is complete."""

STATE = ".prepare"
"""Directory of the lock and the journal, gone when the preparation is complete."""

MANIFEST = "manifest.json"
PLAN = "plan.json"
PROVENANCE = "provenance.json"
SIGNATURE = "model.sig"
"""Written last: where it is and a summary is not, the package is finished."""

PACKAGE_DOCUMENTS = (PLAN, PROVENANCE, MANIFEST)
"""What a package has besides its signature, in the order it is written."""
