"""The interfaces and records that all other packages share."""
